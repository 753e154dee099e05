"""With adapters alone the engine's log-probs are the trainer's, up to the rounding of the policy's dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.algorithms import PPOClipLoss, token_weights
from rlflow.batching import make_batch
from rlflow.environment import Environment
from rlflow.rollout import Rollout
from rlflow.trainer.base import BASE, Trainer
from rlflow.types import Batch, Step, Task
from tests.fixtures import tiny_model

# Nats per token. bfloat16 has 8 bits: log-probs of logits up to 8 are 2^-5 apart
FLOAT32, BFLOAT16 = 1e-4, 2.0**-5
UPDATES = 4


class Continued(Environment):
    """A response, whatever it is."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{number}", f"Question {number}:") for number in range(6)]

    def step(self, episode: Any, response: str) -> Step:
        return Step(reward=0.0, terminated=True)


def sampled(rollout: Rollout, step: int) -> Batch:
    groups = rollout.collect(rollout.environment.tasks("train"), step)
    return make_batch([one for group in groups for one in group.usable])


@pytest.mark.parametrize(("dtype", "bound"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)])
@pytest.mark.parametrize("lora", [{"rank": 8, "alpha": 16}, {"rank": 3, "alpha": 7, "targets": ["v_proj", "up_proj"]}])  # fmt: skip
def test_the_engine_computes_the_trainers_policy_and_the_base_is_far_from_it(
    tmp_path: Path, dtype: str, bound: float, lora: dict[str, Any]
) -> None:
    path = tiny_model(tmp_path, "qwen3", scale=0.15)
    trainer = Trainer.from_pretrained(path, dtype=dtype, lr=2e-2, lora=lora)
    shared = {"samples_per_prompt": 4, "max_turns": 1, "max_response_tokens": 16}
    draw = torch.Generator().manual_seed(0)
    with Rollout.from_pretrained(path, Continued(), engine={"dtype": dtype}, **shared) as rollout:
        for version in range(UPDATES + 1):
            rollout.load_weights(trainer.adapters(), version)
            batch = sampled(rollout, version)
            if version < UPDATES:
                advantages = torch.randn(len(batch), 1, generator=draw) * batch.loss_mask
                batch = batch.replace(advantages=advantages)
                trainer.update(batch.replace(weights=token_weights(batch)), PPOClipLoss())
    mask = batch.loss_mask
    policy, base = (trainer.score(batch, one)["logprobs"][mask] for one in ("policy", BASE))
    trainer.close()
    gap = (batch.logprobs[mask] - policy).abs()
    change = (policy - base).abs()
    assert float(gap.mean()) < bound and float(change.mean()) > 4 * float(gap.mean())
    if dtype == "float32":
        assert float(gap.max()) < bound and float(change.mean()) > 1000 * float(gap.mean())
