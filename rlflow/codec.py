"""Trajectories as the state of a part: tokens and log-probs joined into a few tensors, the rest as JSON can say it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.types import Group, Segment, StopReason, Task, Trajectory, Turn

_TENSORS = ("tokens", "loss_mask", "logprobs", "versions")
_TYPES = (torch.int32, torch.bool, torch.float32, torch.int32)  # a vocabulary and a version each fit 31 bits
_KEPT = (torch.int64, torch.bool, torch.float32, torch.int64)


def trajectories_state(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """A state that `remembered_trajectories` reads: 13 bytes per token and the text of the turns."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    joined = {
        name: torch.cat([torch.empty(0, dtype=kind), *(_values(segment, name).to(kind) for segment in segments)])
        for name, kind in zip(_TENSORS, _TYPES, strict=True)
    }
    return {**joined, "trajectories": [_described(trajectory) for trajectory in trajectories]}


def remembered_trajectories(state: Mapping[str, Any]) -> list[Trajectory]:
    """The trajectories of a `trajectories_state`, each tensor bit for bit."""
    columns = [state[name].to(kind) for name, kind in zip(_TENSORS, _KEPT, strict=True)]
    place, trajectories = 0, []
    for row in state["trajectories"]:
        segments = []
        for length, known in row["segments"]:
            tokens, mask, logprobs, versions = (column[place : place + length].clone() for column in columns)
            segments.append(Segment(tokens, mask, logprobs if known else None, versions))
            place += length
        changed = {"segments": segments, "turns": [Turn(**turn) for turn in row["turns"]], "stop": StopReason(row["stop"])}
        stats = {
            "group_stats": None if row["group_stats"] is None else tuple(row["group_stats"]),
            "rewards_stats": {name: tuple(found) for name, found in row["rewards_stats"].items()},
        }
        trajectories.append(Trajectory(**{**row, **changed, **stats}))
    return trajectories


def groups_state(groups: Sequence[Group]) -> dict[str, Any]:
    """A state that `remembered_groups` reads. All of a task is kept: a teacher's prompt may name its answer
    and its metadata."""
    rows = [
        [group.id, group.task.id, group.task.prompt, len(group.trajectories), *_facts(group.task)]
        for group in groups
    ]
    return {"groups": rows, **trajectories_state([trajectory for group in groups for trajectory in group.trajectories])}


def remembered_groups(state: Mapping[str, Any]) -> list[Group]:
    """The groups of a `groups_state`."""
    attempts = iter(remembered_trajectories(state))
    return [
        Group(name, _task(task, prompt, *facts), [next(attempts) for _ in range(count)])
        for name, task, prompt, count, *facts in state["groups"]
    ]


def _facts(task: Task) -> list[Any]:
    metadata = {name: _literal(value) for name, value in task.metadata.items()}
    return [_literal(task.answer), metadata, task.most_attempts, task.most_turns]


def _task(
    name: str,
    prompt: Any,
    answer: str = "None",
    metadata: Mapping[str, str] | None = None,
    *most: int | None,
) -> Task:
    """Older states hold neither answer nor metadata."""
    known = {key: ast.literal_eval(value) for key, value in (metadata or {}).items()}
    return Task(name, prompt, ast.literal_eval(answer), known, *most)


def _literal(value: Any) -> str:
    """The value as Python writes it, since JSON makes lists of tuples; where that is no literal, its text, as a
    prompt shows it."""
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return repr(str(value))
    return text


def _values(segment: Segment, name: str) -> Tensor:
    value: Tensor | None = getattr(segment, name)
    return torch.zeros(len(segment)) if value is None else value


def _described(trajectory: Trajectory) -> dict[str, Any]:
    names = [item.name for item in dataclasses.fields(trajectory) if item.name not in ("segments", "turns", "stop")]
    return {
        **{name: getattr(trajectory, name) for name in names},
        "segments": [[len(segment), segment.logprobs is not None] for segment in trajectory.segments],
        "turns": [dataclasses.asdict(turn) for turn in trajectory.turns],
        "stop": trajectory.stop.value,
    }
