"""Batches as a run makes them, from attempts that are described in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlflow.batching import make_batch
from rlflow.types import Batch, Segment, StopReason, Trajectory, Turn, stamp


@dataclass
class Said:
    """A response: how many tokens, what it earned, how long it took, whether it stands in a new segment."""

    tokens: int = 2
    reward: float = 0.0
    seconds: float = 1.0
    new_segment: bool = False


@dataclass
class Tried:
    """An attempt: its responses, named rewards, and how it ended. A number is one response of that reward."""

    turns: list[Said] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    stop: StopReason = StopReason.TERMINATED


def trajectory_of(tried: Tried | float, group: str, attempt: int) -> Trajectory:
    """Every segment begins with a prompt of one token, and an observation of one token stands between two responses."""
    tried = tried if isinstance(tried, Tried) else Tried([Said(reward=tried)])
    masks: list[list[bool]] = [[False]]
    turns = []
    for place, said in enumerate(tried.turns):
        if said.new_segment:
            masks.append([False])
        elif place:
            masks[-1].append(False)
        start = len(masks[-1])
        masks[-1] += [True] * said.tokens
        turns.append(Turn(len(masks) - 1, start, start + said.tokens, said.reward, said.seconds))
    segments = [
        Segment(
            torch.ones(len(mask)).long(),
            torch.tensor(mask),
            -torch.ones(len(mask)),
            torch.zeros(len(mask)).long(),
        )
        for mask in masks
    ]
    reward = sum(said.reward for said in tried.turns)
    return Trajectory(
        group,
        group,
        segments,
        turns,
        reward,
        tried.stop,
        attempt=attempt,
        rewards=dict(tried.rewards),
    )


def batch_of(*groups: list[Tried | float]) -> Batch:
    """The batch of some groups of attempts, statistics stamped."""
    made = []
    for place, group in enumerate(groups):
        trajectories = [
            trajectory_of(tried, f"g{place}", attempt) for attempt, tried in enumerate(group)
        ]
        stamp(trajectories)
        made += trajectories
    return make_batch(made)


def split(rewards: list[float]) -> list[Tried | float]:
    """Attempts with these rewards, the first of them in three segments: it must count once all the same."""
    first = Tried(
        [Said(3, 0.0), Said(1, 0.0, new_segment=True), Said(2, rewards[0], new_segment=True)]
    )
    return [first, *rewards[1:]]
