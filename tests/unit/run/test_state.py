"""The states of a run's parts: what remembers something is saved, what does not leaves its slot empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.run.clock import Clock
from rlflow.run.state import load_states, states


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_states_go_into_a_checkpoint_and_back() -> None:
    saved = states({"counter": Counter(3), "stateless": object()})
    assert saved == {"counter": {"count": 3}, "stateless": {}}
    counter = Counter()
    load_states({"counter": counter, "stateless": object()}, saved)
    assert counter.count == 3


def test_a_part_that_remembered_nothing_when_it_was_saved_begins_anew() -> None:
    """A run may be resumed with an algorithm that has a memory, where the one before had none, and the other way round."""
    counter = Counter(5)
    load_states({"algorithm": counter}, {"algorithm": {}})
    load_states({"algorithm": object()}, {"algorithm": {"count": 3}})
    assert counter.count == 5


def test_a_clock_counts_earlier_sessions() -> None:
    clock = Clock(before_s=100.0)
    first = clock.seconds
    assert 100 <= first <= clock.seconds < 160
