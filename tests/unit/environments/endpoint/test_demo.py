"""The demo through the endpoint is the demo: tokens, log-probs, rewards and the gradient, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlflow.algorithms import PPOClipLoss, token_weights
from rlflow.batching import make_batch
from rlflow.environment import Environment
from rlflow.report.sinks import read_metrics
from rlflow.rollout import Rollout
from rlflow.types import Trajectory
from rlflow_environments.program.program import ProgramEnvironment
from rlflow_environments.search import SearchEnvironment
from rlflow_environments.search.sources import world_files
from tests.reference.trainer import ReferenceTrainer

RECIPE = Path(__file__).resolve().parents[4] / "recipes/searchr1"
POLICY, AGENT = RECIPE / "starting_policy", RECIPE / "agent.py"
LIMITS = {"max_turns": 4, "max_response_tokens": 40, "max_total_tokens": 1024}


def collected(environment: Environment) -> list[Trajectory]:
    engine = {"max_concurrency": 64}
    with Rollout.from_pretrained(
        POLICY, environment, engine=engine, samples_per_prompt=4, deterministic=True, **LIMITS
    ) as rollout:
        groups = rollout.collect(environment.tasks("train")[:16], step=1)
    return [one for group in groups for one in group.trajectories]


def gradient(played: Sequence[Trajectory], rewards: Sequence[float]) -> list[torch.Tensor]:
    batch = make_batch(played)
    advantages = torch.tensor(rewards)[batch.trajectory] - sum(rewards) / len(rewards)
    batch = batch.replace(
        weights=token_weights(batch), advantages=advantages[:, None].expand(batch.tokens.shape)
    )
    trainer = ReferenceTrainer(POLICY, lr=1e-3, device="cpu")
    trainer.update(batch, PPOClipLoss())
    return [
        parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None
    ]


@pytest.mark.slow
def test_64_trajectories_and_their_gradient_are_the_native_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    files = world_files({"directory": str(tmp_path)})
    monkeypatch.setenv("CORPUS", str(files["corpus"]))
    native = collected(SearchEnvironment(files["corpus"], files["train"]))
    options = {"reward": f"{AGENT}:reward", "messages": "text"}
    ours = collected(ProgramEnvironment(f"{AGENT}:agent", files["train"], files["val"], **options))
    assert len(ours) == len(native) == 64 and all(one.usable for one in ours)
    for one, other in zip(ours, native, strict=True):
        assert (one.task_id, one.reward, one.stop) == (other.task_id, other.reward, other.stop)
        for left, right in zip(one.segments, other.segments, strict=True):
            for name in ("tokens", "loss_mask", "logprobs", "versions"):
                assert torch.equal(getattr(left, name), getattr(right, name)), name
    rewards = [one.reward for one in native]
    assert len(set(rewards)) > 1
    found, expected = gradient(ours, rewards), gradient(native, rewards)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected) > 10
    assert any(bool(part.any()) for part in expected)


@pytest.mark.slow
def test_the_recipe_trains_the_agent_by_one_command(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    small = ("run.steps=1", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "evaluation.questions=8",
             "evaluation.final_questions=8", "checkpoint.export=false", "metrics.picture=false")  # fmt: skip
    run = tmp_path / "run"
    done = subprocess.run(
        ["bash", RECIPE / "run_train.sh", "agent", f"run.directory={run}", *small],
        env={**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (step,) = [one for one in read_metrics(run / "metrics.jsonl") if one.get("rollout/episodes")]
    assert step["rollout/episodes"] == 8 and step["rollout/broken_histories"] == 0
