"""Trajectories as JSON lines: written by runs and evaluations, read by `rlflow show`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError
from rlflow.storage.files import plain, read_json_lines, write_json_lines

EXPECTED = {"task_id", "turns", "reward", "metrics"}

if TYPE_CHECKING:  # `rlflow show` reads episodes without torch
    from rlflow.types import Group, Trajectory


def write_trajectories(path: str | Path, groups: Sequence[Group]) -> None:
    """Writes one line of JSON per episode: turns, rewards, token counts."""
    attempts = ((group, place) for group in groups for place in range(len(group.trajectories)))
    write_json_lines(path, (trajectory_record(group, place) for group, place in attempts))


def trajectory_record(group: Group, attempt: int) -> dict[str, Any]:
    """One episode as plain values. `prompt_tokens` counts what stood before the first response;
    `group_mean` and `group_std` are of the rewards of its group's usable attempts."""
    trajectory: Trajectory = group.trajectories[attempt]
    sampled = sum(turn.stop - turn.start for turn in trajectory.turns)
    total = sum(len(segment) for segment in trajectory.segments)
    prompt_tokens = trajectory.turns[0].start if trajectory.turns else total
    # Segments repeat what stood before them
    observed = trajectory.metrics.get("observation_tokens", total - sampled - prompt_tokens)
    turns = [
        {
            "response": turn.response,
            "observation": turn.observation,
            "reward": turn.reward,
            "tokens": turn.stop - turn.start,
            "duration_s": round(turn.duration_s, 4),
            **({"picture": turn.picture} if turn.picture else {}),
        }
        for turn in trajectory.turns
    ]
    record = {
        "id": trajectory.id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "attempt": attempt,
        "source": trajectory.source,
        "prompt": trajectory.prompt or group.task.prompt,
        "answer": group.task.answer,
        "turns": turns,
        "reward": trajectory.reward,
        "stop": trajectory.stop.value,
        "metrics": trajectory.metrics,
        "metadata": group.task.metadata,
        "error": trajectory.error,
        "prompt_tokens": prompt_tokens,
        "response_tokens": sampled,
        "observation_tokens": int(observed),
    }
    if trajectory.group_stats:
        _, record["group_mean"], record["group_std"] = trajectory.group_stats
    if trajectory.rewards:
        record["rewards"] = trajectory.rewards
    return plain(record)


def read_trajectories(path: str | Path) -> list[dict[str, Any]]:
    """The records that `write_trajectories` wrote.

    Raises:
        CheckpointError: the file is missing or a line is no episode (file, line number).
    """
    records = read_json_lines(path)
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not record.keys() >= EXPECTED:
            raise CheckpointError(f"{path}:{number}: expected an episode, found another value.")
    return records


def text_of(observation: Any, roles: bool = False) -> str:
    """A prompt or an observation as text; of messages a line each, with its role on demand."""
    if not isinstance(observation, list):
        return str(observation)
    shown = "[{role}] {content}" if roles else "{content}"
    return "\n".join(shown.format_map({"role": "?", "content": "", **one}) for one in observation)
