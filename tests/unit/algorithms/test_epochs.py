"""The order of a run's tasks: epochs as permutations, and a position that outlives the process."""

from __future__ import annotations

import json
import random

import pytest

from rlflow.algorithms.curators.epochs import Epochs
from rlflow.rollout import TaskSource
from rlflow.types import Task


def tasks(count: int) -> list[Task]:
    return [Task(str(index), f"question {index}", None) for index in range(count)]


def names(taken: list[Task]) -> list[str]:
    return [task.id for task in taken]


def resumed(source: Epochs, count: int, seed: int = 3) -> Epochs:
    """A new source in the state of another one, by way of JSON, as a checkpoint holds it."""
    restored = Epochs(tasks(count), seed)
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    return restored


def test_each_epoch_is_a_permutation_by_seed_and_epoch() -> None:
    """Steps straddle epochs: 36 tasks, 8 a step."""
    source, drawn = Epochs(tasks(36), seed=3), list[str]()
    for _ in range(9):
        drawn += names(source.take(8))
    for epoch in range(2):
        order = list(range(36))
        random.Random(f"3/{epoch}").shuffle(order)
        assert drawn[36 * epoch : 36 * (epoch + 1)] == [str(index) for index in order]


def test_without_shuffling_every_epoch_has_the_order_of_the_file() -> None:
    assert names(Epochs(tasks(3), seed=0, shuffle=False).take(7)) == [*"0120120"]


def test_the_order_is_drawn_once_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing it once per prompt took a minute per step with 170,000 questions."""
    seeds: list[str] = []
    generator = random.Random
    monkeypatch.setattr(random, "Random", lambda seed: seeds.append(seed) or generator(seed))
    source = Epochs(tasks(10), seed=3)
    for _ in range(5):
        source.take(4)
    assert seeds == ["3/0", "3/1"]


def test_the_epoch_counts_passes() -> None:
    source = Epochs(tasks(8), seed=0)
    assert isinstance(source, TaskSource)
    assert source.epoch == 0
    source.take(12)
    assert source.epoch == 1.5


@pytest.mark.parametrize("then", [1, 4, 9])
def test_a_restored_source_goes_on_whatever_the_number_per_step(then: int) -> None:
    """The position is a state, not steps times prompts: other prompts per step neither repeat nor leave out a task."""
    whole = names(Epochs(tasks(10), seed=3).take(24))
    source = Epochs(tasks(10), seed=3)
    begun = names(source.take(6))
    after = resumed(source, 10)
    while len(begun) < 24:
        begun += names(after.take(then))
    assert begun[:24] == whole


def test_over_other_data_a_new_epoch_begins(caplog: pytest.LogCaptureFixture) -> None:
    source = Epochs(tasks(10), seed=3)
    source.take(15)
    after = resumed(source, 4)
    assert after.epoch == 2 and "there are 4 training tasks, 10 at the checkpoint" in caplog.text
    assert sorted(names(after.take(4))) == [*"0123"]
