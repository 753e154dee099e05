"""Peaks of memory by phase."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from rlflow.report import timer
from rlflow.report.timer import PeakMemory, highest

MIB = 2**20


@pytest.fixture
def peaks() -> PeakMemory:
    if not timer.CLEAR_REFS.exists():
        pytest.skip("no /proc/self/clear_refs here")
    return PeakMemory()


def spend(mebibytes: int) -> None:
    """Touches that much memory, which no allocator had before, and gives it back."""
    with mmap.mmap(-1, mebibytes * MIB) as held:
        held[:: mmap.PAGESIZE] = b"1" * (len(held) // mmap.PAGESIZE)


def test_a_peak_counts_what_was_freed_again_and_each_block_starts_anew(peaks: PeakMemory) -> None:
    with peaks.measure("small"):
        spend(1)
    with peaks.measure("large"):
        spend(256)
    with peaks.measure("after"):
        spend(1)
    taken = peaks.take()
    assert 200 / 1024 < taken["large"] - taken["small"] < 300 / 1024
    assert abs(taken["after"] - taken["small"]) < 50 / 1024
    assert peaks.take() == {}


def test_the_highest_of_several_blocks_and_of_a_failed_one_stays(peaks: PeakMemory) -> None:
    with pytest.raises(KeyError), peaks.measure("update"):
        spend(128)
        raise KeyError
    first = dict(peaks._peaks)
    with peaks.measure("update"):
        spend(1)
    assert peaks.take() == first


@pytest.mark.parametrize("absent", ["CLEAR_REFS", "STATUS"])
def test_a_system_without_a_peak_of_the_block_gives_that_of_the_process(
    absent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timer, absent, tmp_path / "absent" / "file")
    peaks = PeakMemory()
    with peaks.measure("update"):
        spend(64)
    assert peaks.take()["update"] > 64 / 1024


def test_processes_are_joined_by_their_highest_peak() -> None:
    assert highest([{"update": 1.0, "score": 3.0}, {"update": 2.0}, {}]) == {
        "update": 2.0,
        "score": 3.0,
    }
