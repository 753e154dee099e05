"""The algorithm section as parts: what they need, what they remember, and in which order they are asked."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import PPOClipLoss, SFTLoss, SumLoss, token_weights
from rlflow.algorithms.advantages.opd import OnPolicyDistillation
from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.base import Filter, Transform, as_part
from rlflow.algorithms.teachers.policy import PolicyTeacher
from rlflow.batching import make_batch
from rlflow.config.schema import load_config
from rlflow.errors import CheckpointError, ConfigError, RLFlowError, RolloutError
from rlflow.types import Batch, Group, Segment, StopReason, Task, Trajectory


class Counting(Filter):
    """Keeps groups with a reward, and remembers how many it has seen."""

    needs = frozenset({"proximal"})

    def __init__(self, least: float = 0.5) -> None:
        self.least, self.seen = least, 0

    def __call__(self, groups: list[Group]) -> list[Group]:
        self.seen += len(groups)
        return [
            group
            for group in groups
            if any(attempt.reward >= self.least for attempt in group.trajectories)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class Doubling(Transform):
    """Doubles every kernel, and proves that it runs without gradients."""

    needs = frozenset({"current"})

    def __call__(self, batch: Batch) -> Batch:
        assert not torch.is_grad_enabled()
        present = (
            torch.ones_like(batch.weights) if batch.coefficients is None else batch.coefficients
        )
        return batch.replace(coefficients=2 * present)


def group(name: str, reward: float) -> Group:
    segment = Segment(
        torch.arange(3),
        torch.tensor([False, True, True]),
        torch.zeros(3),
        torch.zeros(3, dtype=torch.int64),
    )
    attempt = Trajectory(
        name, name, [segment], [], reward, StopReason.TERMINATED, group_stats=(1, reward, 0.0)
    )
    return Group(name, Task(name, name), [attempt])


def algorithm(**parts: Any) -> Algorithm:
    return Algorithm(
        advantage=as_part(lambda batch: batch.rewards),
        loss=SumLoss((SFTLoss(),)),
        aggregate=token_weights,
        **parts,
    )


def test_filters_drop_groups():
    made = algorithm(filters=[Counting()])
    assert [kept.id for kept in made.admit([group("a", 0.0), group("b", 1.0)])] == ["b"]


def test_transforms_follow_one_another_without_gradients():
    batch = make_batch(group("a", 1.0).trajectories)
    out, _ = algorithm(transforms=[Doubling(), Doubling()]).transform(batch)
    assert out.coefficients is not None and bool((out.coefficients == 4).all())


def test_the_needs_of_all_parts_are_filled():
    made = algorithm(filters=[Counting()], transforms=[Doubling()])
    assert made.needs == {"proximal", "current"}


def test_a_need_that_nothing_fills_is_refused_at_the_start():
    class Hopeful(Doubling):
        needs = frozenset({"curent"})

    with pytest.raises(
        ConfigError, match=r"needs 'curent', which nothing fills.*Did you mean 'current'"
    ):
        algorithm(transforms=[Hopeful()])


def test_what_parts_remember_is_restored_by_its_place():
    made = algorithm(filters=[Counting()])
    made.admit([group("a", 1.0)])
    state = made.state_dict()
    assert state == {
        "filters.0": {"seen": 1},
        "kinds": {"filters.0": "Counting"},
    }  # parts without memory are left out
    for saved in (state, {"filters.0": {"seen": 1}}):  # as checkpoints were before
        again = algorithm(filters=[Counting()])
        again.load_state_dict(saved)
        assert again.filters[0].seen == 1
    for others in ([], [as_part(kept_first), Counting()]):
        with pytest.raises(CheckpointError, match=r"filters\.0 \(Counting\).*does not have"):
            algorithm(filters=others).load_state_dict(state)


def test_the_base_of_an_advantage_is_remembered_under_its_own_kind():
    def distilled(base: str) -> Algorithm:
        made = OnPolicyDistillation(base={"name": base})
        return Algorithm(
            made, PPOClipLoss(), token_weights, teacher=PolicyTeacher("hint: {prompt}")
        )

    made = distilled("running")
    made.advantage.base_advantage(make_batch(group("a", 1.0).trajectories))
    state = made.state_dict()
    assert (
        state["advantage.base"]["count"] == 1
        and state["kinds"]["advantage.base"] == "RunningNormalization"
    )
    again = distilled("running")
    again.load_state_dict(state)
    assert again.state_dict() == state
    with pytest.raises(
        CheckpointError, match=r"advantage\.base \(RunningNormalization\).*does not have"
    ):
        distilled("reinforce").load_state_dict(state)


def kept_first(groups: list[Group], count: int = 1) -> list[Group]:
    """A filter as a plain function with an option."""
    return groups[:count]


def mean_reward(batch: Batch) -> Tensor:
    """An advantage as a plain function."""
    return batch.require("rewards", "mean_reward") - 1


def test_a_configuration_names_parts_of_every_kind_and_functions_will_do():
    config = load_config(
        None,
        [
            "algorithm.advantage=tests.unit.algorithms.test_algorithm:mean_reward",
            "algorithm.losses=[{name: ppo_clip, anchor: proximal}]",
            "algorithm.filters=[{name: 'tests.unit.algorithms.test_algorithm:kept_first', count: 2}, "
            "'tests.unit.algorithms.test_algorithm:Counting']",
            "algorithm.transforms=['tests.unit.algorithms.test_algorithm:Doubling']",
            "algorithm.aggregate=constant",
        ],
    )
    made = Algorithm.from_config(config, response_budget=4)
    assert made.needs == {"entropy", "proximal", "current"}
    assert made.loss.loss == PPOClipLoss(anchor="proximal")
    groups = made.admit([group("a", 1.0), group("b", 0.0), group("c", 1.0)])
    assert [kept.id for kept in groups] == ["a"]
    batch = make_batch(groups[0].trajectories)
    assert made.advantage(batch).tolist() == [0.0]
    assert made.aggregate(batch).tolist() == [
        [0.0, 0.25, 0.25]
    ]  # 1 trajectory, a budget of 4 tokens


class Counted(Filter):
    """A filter of whole steps that says what it was asked."""

    whole_step = True
    max_rounds = 1  # of no account: it is not asked per round

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.closed = False

    def __call__(self, groups: list[Group]) -> list[Group]:
        self.asked.append([group.id for group in groups])
        return groups[1:]

    def report(self) -> dict[str, float]:
        counted, self.asked = float(len(self.asked)), []
        return {"asked": counted}

    def close(self) -> None:
        self.closed = True


def test_filters_of_whole_steps_come_last_and_once_and_parts_report_and_close():
    whole, rounds = Counted(), Counting()
    rounds.max_rounds = 3
    made = algorithm(filters=[whole, rounds])
    admitted = [*made.admit([group("a", 1.0), group("b", 0.0)]), *made.admit([group("c", 1.0)])]
    assert [kept.id for kept in admitted] == ["a", "c"] and whole.asked == []
    assert (
        [kept.id for kept in made.complete(admitted)] == ["c"]
        and whole.asked == [["a", "c"]]
        and rounds.seen == 3
    )
    assert made.max_rounds == 3 and algorithm().max_rounds == Filter.max_rounds
    assert made.report() == {"train/asked": 1.0} and made.report() == {"train/asked": 0.0}
    made.close()
    assert whole.closed


def test_filters_of_whole_steps_that_leave_nothing_are_named():
    class Nothing(Counting):
        whole_step = True

    class Others(Counting):
        whole_step = True

    made = algorithm(filters=[Nothing(least=2.0), Others()])
    with pytest.raises(RolloutError, match="Nothing left none of the step's 1 groups"):
        made.complete([group("a", 1.0)])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.ones(3), r"\(3,\)"),
        (torch.ones(2, 1), r"\(2, 1\)"),
        ([1.0, 2.0], "list"),
        ((1, 2, 3), "tuple"),
        (None, "NoneType"),
    ],
)
def test_an_advantage_of_another_shape_or_type_is_one_clear_error(value: Any, found: str) -> None:
    def mine(batch: Batch, scale: float = 1.0) -> Any:
        return value

    batch = make_batch(
        [attempt for one in (group("a", 0.0), group("b", 1.0)) for attempt in one.trajectories]
    )
    made = algorithm()
    made.advantage = as_part(functools.partial(mine, scale=2.0))
    with pytest.raises(
        RLFlowError, match=rf"advantage: mine: expected .* = \(2, 3\), found {found}\."
    ):
        made.credit(batch)
