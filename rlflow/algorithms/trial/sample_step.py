"""A small made-up step that holds what is rare in a real one, for parts of algorithms to be tried
on."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rlflow.batching import make_batch
from rlflow.types import (
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    Batch,
    Group,
    PolicyOutput,
    Segment,
    StopReason,
    Task,
    Trajectory,
    Turn,
    stamp,
)

FIELDS = {  # what a need fills, in the batch and in the policy's output
    "proximal": "proximal_logprobs",
    "reference": "reference_logprobs",
    "teacher": "teacher_logprobs",
    "current": "current_logprobs",
    "current_entropy": "current_entropy",
}


def sample_tasks() -> list[Task]:
    return [Task(f"task-{number}", f"Say {number}", str(number)) for number in range(12)]


def sample_groups(seed: int = 0) -> list[Group]:
    """Four groups: of mixed rewards, of two segments per attempt, of equal rewards, of a single
    usable attempt; one attempt is aborted, one was cut and one has a segment in which nothing was
    sampled."""
    generator = torch.Generator().manual_seed(seed)
    rewards = (
        [0.0, 1.0, 0.0, 0.5],
        [1.0, 0.0, 2.0, 0.25],
        [1.0, 1.0, 1.0, 1.0],
        [0.75],
    )
    groups = []
    for number, returns in enumerate(rewards):
        attempts = [_trajectory(number, *one, generator) for one in enumerate(returns)]
        if number == 0:
            attempts[3].stop = StopReason.MAX_TOKENS
            attempts[2].segments[-1].loss_mask[:] = False
            stop = StopReason.ABORTED
            aborted = dataclasses.replace(attempts[0], attempt=4, stop=stop, segments=[], turns=[])
            attempts.append(aborted)
        stamp(attempts)
        groups.append(Group(f"0:task-{number}", sample_tasks()[number], attempts))
    return groups


def _trajectory(group: int, attempt: int, reward: float, generator: torch.Generator) -> Trajectory:
    segments, turns = [], []
    for place in range(2 if group == 1 else 1):
        length = int(torch.randint(6, 14, (), generator=generator))
        mask = torch.zeros(length, dtype=torch.bool)
        # Prompt, a response, an observation of one token, another response
        mask[2:4], mask[5:] = True, True
        tokens = torch.randint(1, 20, (length,), generator=generator)
        logprobs = torch.where(mask, -3 * torch.rand(length, generator=generator), 0.0)
        versions = torch.randint(0, 3, (length,), generator=generator)
        segments.append(Segment(tokens, mask, logprobs, torch.where(mask, versions, -1)))
        turns += [Turn(place, 2, 4, 0.0, 0.5), Turn(place, 5, length, 0.0, 1.5)]
    turns[-1].reward = reward
    return Trajectory(
        task_id=f"task-{group}",
        group_id=f"0:task-{group}",
        segments=segments,
        turns=turns,
        reward=reward,
        stop=StopReason.TERMINATED,
        attempt=attempt,
        id=f"0:task-{group}/{attempt}",
        rewards={"answer": reward, "style": attempt / 4},
    )


def sample_batch(needs: frozenset[str]) -> Batch:
    """The step's batch with exactly what is needed, advantages and weights filled."""
    batch = make_batch([each for group in sample_groups() for each in group.trajectories])
    generator = torch.Generator().manual_seed(1)
    mask = batch.loss_mask
    centred = batch.require("rewards", "check") - batch.require("group_mean", "check")
    filled: dict[str, Tensor] = {
        field: torch.where(
            mask,
            batch.logprobs + 0.3 * torch.randn(mask.shape, generator=generator),
            0.0,
        ).clamp(max=0)
        for need, field in FIELDS.items()
        if need in needs
    }
    if "current_entropy" in filled:
        filled["current_entropy"] = -filled["current_entropy"]
    # The rows were sampled at 0 to 2
    filled["trainer_version"] = torch.full_like(batch.lengths, 3)
    if "values" in needs:
        for field in ("values", "returns"):
            filled[field] = torch.randn(mask.shape, generator=generator) * mask
        filled["final_values"] = torch.randn(len(batch), generator=generator)
    extras = _teacher_top(mask, generator) if "top_logprobs" in needs else {}
    return batch.replace(
        advantages=centred.float()[:, None] * mask,
        weights=mask / mask.sum(),
        extras=extras,
        **filled,
    )


def _teacher_top(mask: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """The likeliest three of a teacher's twenty tokens."""
    top = torch.randn(*mask.shape, 20, generator=generator).log_softmax(-1).topk(3)
    return {
        TEACHER_TOP_IDS: top.indices * mask[..., None],
        TEACHER_TOP_LOGPROBS: top.values * mask[..., None],
    }


def sample_output(batch: Batch, needs: frozenset[str], seed: int = 2) -> PolicyOutput:
    generator = torch.Generator().manual_seed(seed)
    near = batch.logprobs + 0.3 * torch.randn(batch.tokens.shape, generator=generator)
    logprobs = torch.where(batch.loss_mask, near.clamp(max=-1e-3), 0.0).requires_grad_()
    more: dict[str, Tensor] = {
        name: (
            torch.rand(batch.tokens.shape, generator=generator) * batch.loss_mask
        ).requires_grad_()
        for name in ("entropy", "values")
        if name in needs
    }
    if "top_logprobs" in needs:
        twenty = torch.randn(*batch.tokens.shape, 20, generator=generator).log_softmax(-1)
        more["top_logprobs"] = (twenty[..., :3] * batch.loss_mask[..., None]).requires_grad_()
    return PolicyOutput(logprobs=logprobs, **more)
