"""Claims about scores: the tables of Search-R1 and RLinf, and SQuAD's F1 by hand."""

from __future__ import annotations

import pytest

from rlflow_environments.search.rewards.scoring import (
    contains_gold,
    exact_match,
    extract_answer,
    f1,
    normalize_answer,
    searchr1_em,
)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("U.S.A.", "usa"),
        ("an A the", ""),
        ("Theater and\tAnna\n", "theater and anna"),  # articles are whole words
        ("a-b", "ab"),  # punctuation goes first, so that no article is left to remove
        ("Café “Zoë”", "café “zoë”"),  # no Unicode normalization, curly quotes stay
        ("the-answer", "theanswer"),
    ],
)
def test_normalization_is_that_of_search_r1(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("no tag", None),
        ("<answer> Paris </answer>", "Paris"),
        ("<answer>one</answer> then <answer>\ntwo\n</answer>", "two"),
        ("<answer>open", None),
        ("<answer></answer>", ""),
        ("<Answer>x</Answer>", None),
    ],
)
def test_the_last_complete_answer_is_extracted(text, answer):
    assert extract_answer(text) == answer


def test_exact_match_takes_any_gold_after_normalization():
    assert exact_match("the Paris!", ["London", "paris"]) == 1.0
    assert exact_match("Paris, France", ["Paris"]) == 0.0
    assert exact_match(None, ["Paris"]) == 0.0
    assert exact_match("", ["Paris"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("the old town of Paris", ["Paris"], 2 * 1 / (4 + 1)),  # old town of paris
        ("Orvan Telmik", ["Telmik Orvan"], 1.0),
        ("b b c", ["b b b d"], 2 * 2 / (3 + 4)),  # bags: two b in common
        ("x", ["y", "x z"], 2 * 1 / (1 + 2)),  # the best gold counts
        ("x", ["y"], 0.0),
        ("", ["y"], 0.0),
        ("the", ["an"], 1.0),
        (None, ["y"], 0.0),
    ],
)
def test_f1_by_hand(answer, golds, expected):
    assert f1(answer, golds) == pytest.approx(expected)


def test_a_gold_answer_is_contained_as_whole_words_only():
    assert contains_gold("The river flows to the North Sea.", ["north sea"])
    assert not contains_gold("It flows to the north.", ["no"])
    assert contains_gold("It ends in Orvan", ["Orvan"])
    assert not contains_gold("anything", ["the"])  # nothing is left of it


@pytest.mark.parametrize(
    ("text", "gold", "held"),
    [
        ("北京是中国的首都。", "北京", True),
        ("アインシュタインは1879年に", "アインシュタイン", True),
        ("서울은 한국의 수도", "서울", True),
        ("北京是中国的首都。", "上海", False),
        ("Where was Einstein's father born?", "Einstein", True),
        ("Where was Einstein\u2019s father born?", "Einstein", True),
        ("a New York-based firm", "New York", True),
        ("in the USA", "U.S.A.", True),
        ("3.5 million, 1,000 more", "5", False),
        ("3.5 million, 1,000 more", "1", False),
        ("It ended in 1945.", "1945", True),
        ("...", "!", False),
    ],
)
def test_a_gold_answer_is_found_beside_punctuation_and_in_scripts_without_blanks(text, gold, held):
    assert contains_gold(text, [gold]) is held


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<search>x</search><answer>Paris</answer>", 1.0),
        ("<answer>Rome</answer>", 0.0),
        ("Paris", 0.0),
        ("<answer>Rome</answer>" * 9 + "<answer>Paris</answer>", 1.0),  # ten tags
        ("<answer>Rome</answer>" * 10 + "<answer>Paris</answer>", 0.25),  # eleven
        ("<answer>" * 11 + "Paris</answer>", 0.0),  # the extracted answer holds the other tags
        ("<answer>Paris</answer>" + "</answer>" * 10, 0.25),  # closing tags count too
        ("<answer>Rome</answer>" * 11, 0.0),
    ],
)
def test_searchr1_reward_is_a_quarter_above_ten_tags(text, reward):
    assert searchr1_em(text, ["Paris"]) == reward
