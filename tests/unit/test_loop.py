"""What one training step gives its parts and reports of them, with a trainer that only remembers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import PPOClipLoss, token_weights
from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.base import as_part
from rlflow.algorithms.transforms.decoupled import Decoupled
from rlflow.algorithms.transforms.sequence_mask import SequenceMask
from rlflow.algorithms.transforms.tis import TruncatedImportance
from rlflow.errors import RolloutError
from rlflow.loop import training_step
from rlflow.report.timer import PhaseTimer
from rlflow.types import Batch, Group, Loss, PolicyOutput, Segment, StopReason, Task, Trajectory


class RememberingTrainer:
    """Its policy gives every token the log-prob -1 - 0.1 x updates so far."""

    routing = None

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.scored = 0

    def score(
        self, batch: Batch, model: str = "policy", want: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        self.scored += 1
        return {
            name: torch.full(batch.tokens.shape, -1.0 - 0.1 * len(self.batches)) for name in want
        }

    def update(self, batch: Batch, loss: Any) -> dict[str, float]:
        self.batches.append(batch)
        return {"loss": 0.0, "lr": 0.1, "logprob_gap": 0.0}


def group(rollout: Sequence[float]) -> Group:
    """Attempts of two trained tokens each, with these log-probs."""
    mask, versions = torch.tensor([False, True, True]), torch.tensor([-1, 4, 4])
    attempts = [
        Trajectory(
            "t", "g", [Segment(torch.arange(3), mask, torch.full((3,), value), versions)], [], 1.0, StopReason.TERMINATED,
            group_stats=(len(rollout), 1.0, 1.0), attempt=place,
        )
        for place, value in enumerate(rollout)
    ]  # fmt: skip
    return Group("g", Task("t", "t"), attempts)


def step(
    rollout: Sequence[float], anchor: str, transforms: Sequence[Any]
) -> tuple[RememberingTrainer, dict[str, float]]:
    advantage = as_part(lambda batch: batch.rewards)
    algorithm = Algorithm(
        advantage,
        PPOClipLoss(anchor=anchor),
        token_weights,
        transforms=transforms,
        minibatches_per_step=2,
        epochs_per_step=2,
    )
    trainer = RememberingTrainer()
    return trainer, training_step(7, [group(rollout)], trainer, algorithm, PhaseTimer())


def test_the_proximal_policy_is_that_before_the_step_and_corrections_are_reported():
    """Ratios of the proximal to the rollout policy: 1 and e, capped at 2."""
    trainer, metrics = step([-1.0, -1.0, -2.0, -2.0], "proximal", [TruncatedImportance(2.0)])
    assert trainer.scored == 1 and len(trainer.batches) == 4
    for batch in trainer.batches:
        assert batch.trainer_version.tolist() == [7, 7] and not batch.metrics
        assert torch.equal(batch.proximal_logprobs, torch.full((2, 3), -1.0))
    assert metrics["train/kept"] == 1.0
    assert metrics["train/coefficient"] == pytest.approx(1.5) and metrics[
        "train/capped"
    ] == pytest.approx(0.5)


def test_the_current_policy_is_that_just_before_each_update():
    """It moves away from the rollout policy, at -1.05, by -0.1 an update: 0.15 away at the third, 0.25 at the fourth."""
    trainer, metrics = step(
        [-1.05, -1.05], "rollout", [SequenceMask(0.1), as_part(lambda batch: batch)]
    )
    assert [float(batch.current_logprobs[0, 1]) for batch in trainer.batches] == pytest.approx(
        [-1.0, -1.1, -1.2, -1.3]
    )
    assert metrics["train/kept"] == 1.0  # the advantages are positive
    negative = as_part(lambda batch: batch.replace(advantages=-batch.advantages))
    _, metrics = step([-1.05, -1.05], "rollout", [negative, SequenceMask(0.1)])
    assert metrics["train/kept"] == pytest.approx(0.5)


def test_a_loss_may_need_the_current_policy_too():
    class Looking(Loss):
        needs = frozenset({"current"})

        def __call__(self, output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            raise NotImplementedError

    advantage, trainer = as_part(lambda batch: batch.rewards), RememberingTrainer()
    algorithm = Algorithm(advantage, Looking(), token_weights, minibatches_per_step=2)
    training_step(7, [group([-1.0, -1.0])], trainer, algorithm, PhaseTimer())
    assert [float(batch.current_logprobs[0, 1]) for batch in trainer.batches] == pytest.approx(
        [-1.0, -1.1]
    )


def test_an_interpolated_policy_takes_the_versions_of_both():
    """Sampled at version 4 in step 7: two thirds of the way from -1.6 to the current policy."""
    trainer, _ = step([-1.6, -1.6], "proximal", [Decoupled(proximal="loglinear")])
    found = [float(batch.proximal_logprobs[0, 1]) for batch in trainer.batches]
    assert found == pytest.approx(
        [-1.6 + 2 / 3 * (1.6 - 1.0 - 0.1 * place) for place in range(4)], abs=1e-6
    )
    assert trainer.scored == 4


def test_a_step_of_no_groups_is_an_error():
    with pytest.raises(RolloutError, match="step 3: all 0 episodes were aborted"):
        training_step(3, [], None, None, PhaseTimer())  # type: ignore[arg-type]
