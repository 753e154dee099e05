"""Claims about the reward models of captions, the figures by hand or of the spec."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from rlflow_environments.wrappers.reward_models import (
    Classifier,
    Ranking,
    Retrieval,
    above,
    bradley_terry,
    encoded,
    standardized,
)

GOOD = [f"You {word} the key {number}." for word in ("find", "take", "use") for number in range(10)]
BAD = [f"A wall of {word} {number}." for word in ("stone", "wood", "ice") for number in range(10)]


def test_bradley_terry_by_hand() -> None:
    first, second = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    losses = [float(bradley_terry(first, second, torch.tensor(label))) for label in (0.0, 0.5, 1.0)]
    assert math.exp(-losses[0]) == pytest.approx(0.731058579, abs=1e-6)
    assert losses == pytest.approx([0.313261688, 0.813261688, 1.313261688], abs=1e-6)


def test_values_are_standardized_and_cut() -> None:
    values = [2.0, 1.0, 0.0, -1.0]
    mean, std = sum(values) / 4, math.sqrt(sum((value - 0.5) ** 2 for value in values) / 4)
    scaled = [standardized(value, mean, std) for value in values]
    assert scaled == pytest.approx([1.341641, 0.447214, -0.447214, -1.341641], abs=1e-6)
    assert [above(value, -0.5) for value in scaled] == [*scaled[:3], 0.0]
    assert standardized(3.0, 3.0, 0.0) == 0.0


def test_a_table_knows_what_was_labelled_and_nothing_else() -> None:
    model = Retrieval()
    assert model.reward("a") == 0.0
    model.learn({("a",): 1.0, ("b",): 0.0})
    assert [model.reward(caption) for caption in ("a", "b", "A")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reply", "label", "order"),
    [("It is FOO", 1.0, 0.0), ("FOO? No: BAR.", 0.0, 1.0), ("FOOD BARN", 0.0, 0.5), ("", 0.0, 0.5)],
)
def test_replies(reply: str, label: float, order: float) -> None:
    assert (Retrieval().read(reply), Classifier().read(reply), Ranking().read(reply)) == (
        label,
        label,
        order,
    )


def test_a_classifier_generalises_to_captions_without_a_label() -> None:
    model = Classifier(lr=3e-3, steps=60)
    assert model.reward(GOOD[0]) == 0.0
    labels = {(caption,): float(caption in GOOD) for caption in GOOD[:-5] + BAD[:-5]}
    model.learn(labels)
    assert [model.reward(caption) for caption in GOOD[-5:] + BAD[-5:]] == [1.0] * 5 + [0.0] * 5


def test_a_ranking_orders_captions_by_comparisons() -> None:
    model = Ranking(lr=3e-3, steps=60)
    pairs = [(good, bad) for good, bad in zip(GOOD[:-5], BAD[:-5], strict=True)]
    model.learn({**dict.fromkeys(pairs[::2], 0.0), **{pair[::-1]: 1.0 for pair in pairs[1::2]}})
    assert min(model.reward(caption) for caption in GOOD[-5:]) > 0.5
    assert all(model.reward(caption) == 0.0 for caption in BAD[-5:])


def test_a_ranking_asks_about_pairs_of_different_captions() -> None:
    model = Ranking()
    assert model.questions("a") == [] and model.questions("a") == []
    (pair,) = model.questions("b")
    assert sorted(pair) == ["a", "b"]
    prompt = model.ask("reach {the} door", ('say "hi" {0}', "b"))
    assert "reach {the} door" in prompt and '"say \\"hi\\" {0}"' in prompt


@pytest.mark.parametrize("kind", [Classifier, Ranking])
def test_a_model_is_kept_and_taken_over(kind) -> None:
    labels = {("a", "b"): 0.0} if kind is Ranking else {("a",): 1.0}
    model, other = kind(lr=1e-2, seed=1), kind(lr=1e-2, seed=2)
    model.learn(labels)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    other.learn(labels)
    model.learn(labels)
    values = [float(one._network(encoded(["a"]))) for one in (model, other)]
    assert values[0] == pytest.approx(values[1], abs=1e-6) and model.reward("a") == other.reward(
        "a"
    )


def test_captions_of_any_text_are_rows_of_one_width() -> None:
    assert encoded(["", "ü" * 500, "\ud800"]).shape == (3, 128)


def test_making_a_model_leaves_the_random_numbers_of_others_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    Classifier()
    assert torch.rand(1) == wanted
