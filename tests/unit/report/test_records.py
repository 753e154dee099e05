"""Episodes on disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlflow.errors import CheckpointError
from rlflow.report.records import read_trajectories, write_trajectories
from rlflow.types import Group, StopReason, Task, Trajectory, Turn


def test_any_text_is_one_line_and_comes_back(tmp_path: Path) -> None:
    """Also what other readers take for the end of a line, and half a character."""
    said = "one\u2028two\x85\x0b\r\n three \ud83d"
    attempt = Trajectory(
        "t", "g", [], [Turn(0, 0, 0, 0.0, 0.0, said)], math.nan, StopReason.ABORTED
    )
    write_trajectories(tmp_path / "t.jsonl", [Group("g", Task("t", "?"), [attempt])])
    (found,) = read_trajectories(tmp_path / "t.jsonl")
    assert found["turns"][0]["response"] == said and found["reward"] is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{}", "an episode"), (b"[1]", "an episode"), (b"{", "a line of JSON"),
        (b"\xff", "a line of JSON in UTF-8"), (b"", "a line of JSON"), (b"[" * 100_000, "a line of JSON"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_episode_is_named(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"task_id": "t", "turns": [], "reward": 0, "metrics": {}}\n' + line + b"\n")
    with pytest.raises(CheckpointError, match=rf"t\.jsonl:2: expected {told}"):
        read_trajectories(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_trajectories(tmp_path / "missing.jsonl")


def test_named_rewards_are_written_where_there_are_some(tmp_path: Path) -> None:
    attempts = [
        Trajectory("t", "g", [], [], 1.0, StopReason.TERMINATED, rewards=rewards)
        for rewards in ({"style": 0.5}, {})
    ]
    write_trajectories(tmp_path / "t.jsonl", [Group("g", Task("t", "?"), attempts)])
    first, second = read_trajectories(tmp_path / "t.jsonl")
    assert first["rewards"] == {"style": 0.5} and first["reward"] == 1.0 and "rewards" not in second
