"""Episodes on disk."""

from __future__ import annotations

from pathlib import Path

from rlflow.report.records import read_trajectories, write_trajectories
from rlflow.types import Group, StopReason, Task, Trajectory


def test_named_rewards_are_written_where_there_are_some(tmp_path: Path) -> None:
    attempts = [Trajectory("t", "g", [], [], 1.0, StopReason.TERMINATED, rewards=rewards) for rewards in ({"style": 0.5}, {})]
    write_trajectories(tmp_path / "t.jsonl", [Group("g", Task("t", "?"), attempts)])
    first, second = read_trajectories(tmp_path / "t.jsonl")
    assert first["rewards"] == {"style": 0.5} and first["reward"] == 1.0 and "rewards" not in second
