"""Peaks of memory by phase."""

from __future__ import annotations

import pytest
import torch

from rlflow.report import memory
from rlflow.report.memory import PeakMemory, highest

MIB = 2**20


@pytest.fixture(params=["kernel", "sampled"])
def peaks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> PeakMemory:
    if request.param == "sampled":
        monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path_factory.mktemp("proc") / "absent" / "clear_refs")
    elif not memory._CLEAR_REFS.exists():
        pytest.skip("no /proc/self/clear_refs here")
    return PeakMemory()


def spend(mebibytes: int) -> None:
    """Touches that much memory for long enough to be sampled, and frees it."""
    held = torch.ones(mebibytes * MIB // 4)
    while_held = torch.tensor(0.0)
    for _ in range(40):
        while_held += held.sum()
    del held


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


def test_processes_are_joined_by_their_highest_peak() -> None:
    assert highest([{"update": 1.0, "score": 3.0}, {"update": 2.0}, {}]) == {"update": 2.0, "score": 3.0}
