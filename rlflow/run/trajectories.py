"""Trajectories as JSON lines: written by runs and evaluations, read by `rlflow show`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError
from rlflow.storage.files import plain, write_text

if TYPE_CHECKING:  # `rlflow show` reads episodes without torch
    from rlflow.types import Group, Trajectory


def write_trajectories(path: str | Path, groups: Sequence[Group], limit: int | None = None) -> None:
    """Writes one JSON line per episode: what the policy wrote, what the environment answered, rewards, token counts.
    With `limit`, that many episodes evenly spread over the groups."""
    records = [trajectory_record(group, attempt) for group in groups for attempt in range(len(group.trajectories))]
    if limit is not None and limit < len(records):
        records = [records[index * len(records) // limit] for index in range(limit)]
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def trajectory_record(group: Group, attempt: int) -> dict[str, Any]:
    """One episode as plain values. `prompt_tokens` counts what stood before the first response."""
    trajectory: Trajectory = group.trajectories[attempt]
    sampled = sum(turn.stop - turn.start for turn in trajectory.turns)
    total = sum(len(segment) for segment in trajectory.segments)
    prompt_tokens = trajectory.turns[0].start if trajectory.turns else total
    turns = [
        {
            "response": turn.response,
            "observation": turn.observation,
            "reward": turn.reward,
            "tokens": turn.stop - turn.start,
            "duration_s": round(turn.duration_s, 4),
        }
        for turn in trajectory.turns
    ]
    return plain(
        {
            "id": trajectory.id,
            "task_id": trajectory.task_id,
            "group_id": trajectory.group_id,
            "attempt": attempt,
            "source": trajectory.source,
            "prompt": trajectory.prompt or group.task.prompt,
            "answer": group.task.answer,
            "turns": turns,
            "reward": trajectory.reward,
            **({"rewards": trajectory.rewards} if trajectory.rewards else {}),
            "stop": trajectory.stop.value,
            "metrics": trajectory.metrics,
            "metadata": group.task.metadata,
            "error": trajectory.error,
            "prompt_tokens": prompt_tokens,
            "response_tokens": sampled,
            "observation_tokens": total - sampled - prompt_tokens,
        }
    )


def read_trajectories(path: str | Path) -> list[dict[str, Any]]:
    """The records that `write_trajectories` wrote.

    Raises:
        CheckpointError: the file is missing or a line is damaged (file, line number).
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected episodes as JSON lines.")
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise CheckpointError(f"{path}:{number}: not JSON ({error.msg}).") from None
    return records
