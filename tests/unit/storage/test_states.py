"""The states of a run's parts: what remembers something is saved, what does not leaves its slot empty."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import CheckpointError, DamagedCheckpointError
from rlflow.report.timer import Clock
from rlflow.run.checkpoints import STATE, RunState, read_state
from rlflow.storage.integrity import write_sealed
from rlflow.storage.states import load_states, states


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


class Memory(Counter):
    """A part with every kind of value."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"count": 1, "mean": 0.5, "name": "a", "on": False, "seen": {}, "last": None}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = {name: state[name] for name in self.state}


WRONG = {
    "count": ["text", [], {}, True, 10**400],
    "mean": ["text", [1.0]],
    "name": [1, [], {}],
    "on": [1, "true"],
    "seen": [[], 7, {"a": 2**70}],
    "last": [-(2**64)],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_a_value_of_another_kind_is_named_with_its_file(name: str, value: Any) -> None:
    saved = {"memory": {**Memory().state, name: value}}
    with pytest.raises(CheckpointError, match=rf"state\.json: memory\.{name}.*: expected"):
        load_states({"memory": Memory()}, saved, "state.json")


@pytest.mark.parametrize("state", [7, "text", [1], [[]], {"taken": 3}])
def test_a_state_that_is_not_the_parts_is_one_clear_error(state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^state\.json: memory"):
        load_states({"memory": Memory()}, {"memory": state}, "state.json")


def test_numbers_may_become_null_floats_and_tensors() -> None:
    later = {**Memory().state, "count": 2.0, "mean": None, "last": [1], "seen": {"a": "b"}}
    for mean in (None, torch.tensor(1.0), 3):
        memory = Memory()
        load_states({"memory": memory}, {"memory": {**later, "mean": mean}})
        assert memory.state == {**later, "mean": mean}


@pytest.mark.parametrize(
    "tensors",
    [7, [], {}, {"file": 7}, {"file": "../x", "bytes": 1, "xxh3": "0"}, {"file": "x", "bytes": []}],
)
def test_a_hand_made_list_of_tensors_is_damage(tmp_path: Path, tensors: Any) -> None:
    write_sealed(tmp_path / STATE, {"step": 1, "tensors": tensors})
    with pytest.raises(DamagedCheckpointError, match=r"state\.json|such|missing"):
        read_state(tmp_path)


def test_a_clock_counts_earlier_sessions() -> None:
    clock = Clock(before_s=100.0)
    first = clock.seconds
    assert 100 <= first <= clock.seconds < 160


def test_tensors_of_a_state_lie_in_a_file_beside_it(tmp_path: Path) -> None:
    state = {
        "algorithm": {
            "filters.0": {"tokens": torch.arange(3), "names": [torch.tensor([True]), "x"]}
        },
        "step": 1,
    }
    RunState(state).write(tmp_path)
    found = read_state(tmp_path)
    assert torch.equal(found["algorithm"]["filters.0"]["tokens"], torch.arange(3))
    assert found["algorithm"]["filters.0"]["names"][0].dtype is torch.bool and found["step"] == 1
    (file,) = tmp_path.glob("*.safetensors")
    RunState({"tokens": torch.arange(4)}).write(
        tmp_path
    )  # another content, another name: the old state had its file until now
    (other,) = tmp_path.glob("*.safetensors")
    assert other.name != file.name and torch.equal(read_state(tmp_path)["tokens"], torch.arange(4))
    content = bytearray(other.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"safetensors: damaged"):
        read_state(tmp_path)
    RunState({"step": 2}).write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"] and read_state(
        tmp_path
    ) == {"step": 2}
