"""Rollout and trainer meet: what the engine says that it sampled from is what the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model

from rlflow.batching import make_batch
from rlflow.environment import Environment
from rlflow.rollout import Rollout
from rlflow.trainer.base import Trainer
from rlflow.types import Episode, Step, Task
from tests import rounding
from tests.reference import ORACLE


class Echo(Environment):
    stop = ("e", " ", "a")

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{index}", f"Question {index}: which river?\n") for index in range(4)]

    async def step(self, episode: Episode, response: str) -> Step:
        return Step(
            f"\nDoc {episode.turns}: {response}\n", float(len(response) % 3), episode.turns == 3
        )


@pytest.mark.parametrize("family, temperature", [("qwen2", 1.0), ("qwen3", 0.7), ("llama", 1.3)])
def test_engine_and_trainer_agree_on_every_sampled_token_also_after_new_weights(
    tmp_path: Path, family: str, temperature: float
) -> None:
    path = tiny_model(tmp_path / "a", family, tied=family == "qwen3", scale=0.2)
    other = tiny_model(tmp_path / "b", family, tied=family == "qwen3", scale=0.2, seed=1)
    environment = Echo()
    with Rollout.from_pretrained(
        path, environment, temperature=temperature, max_response_tokens=30
    ) as rollout:
        for version, directory in enumerate((path, other)):
            trainer = Trainer.from_pretrained(directory, backend=ORACLE)
            rollout.load_weights(trainer.weights(), version)
            groups = rollout.collect(environment.tasks("train"), step=version)
            batch = make_batch([trajectory for group in groups for trajectory in group.usable])
            assert int(batch.loss_mask.sum()) > 100
            gap = (trainer.score(batch)["logprobs"] - batch.logprobs)[batch.loss_mask].abs()
            _, bound = rounding.logprobs(
                directory, rounding.rows_of(batch), temperature
            )  # of the engine and of the trainer
            assert gap.max() <= 2 * bound
            assert torch.equal(batch.loss_mask, batch.versions == version)
