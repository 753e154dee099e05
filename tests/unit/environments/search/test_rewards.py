"""Claims about rewards: the tables of the originals by hand, on the policy's own text only."""

from __future__ import annotations

import asyncio

import pytest

from rlflow.errors import ConfigError
from rlflow.types import Task
from rlflow_environments.search.rewards import RULES, Transcript, make_reward, rule_scores
from rlflow_environments.search.rewards.asearcher import (
    asearcher_compat,
    asearcher_em,
    asearcher_f1,
    well_formed,
)
from rlflow_environments.search.rewards.searchr1 import (
    searchr1_em_format,
    searchr1_f1_plus,
    searchr1_subem,
    tags_in_order,
)

THOUGHT = "<think>t</think>"
ASKED = f"{THOUGHT}<search>q</search>"
CALLED = '<tool_call>{{"name": "{}", "arguments": {{"query_list": ["q"]}}}}</tool_call>'
SHOWN = "\n\n<information>Doc 1(Title: P) Paris lies there.</information>\n\n"


def _transcript(
    *texts: str, golds=("Paris",), prompt: str = "Question: where?", **metadata
) -> Transcript:
    """Responses and observations in turn, the first text being a response."""
    return Transcript(Task("t", prompt, list(golds), metadata), texts[::2], texts[1::2])


def _answered(answer: str) -> str:
    return f"<answer>{answer}</answer>"


# ---------------------------------------------------------------- Search-R1


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        ((THOUGHT + _answered("Paris"),), 1.0),
        ((ASKED, SHOWN, THOUGHT + _answered("paris!")), 1.0),
        ((ASKED, SHOWN, _answered("Paris")), 1.0 - 0.2),  # no think after the information
        ((THOUGHT + _answered("Rome"),), 0.2),
        ((ASKED, SHOWN, THOUGHT + _answered("Rome")), 0.2 + 0.1),  # the gold answer was retrieved
        ((_answered("Rome"),), 0.1),
        ((ASKED, SHOWN, "no idea"), 0.0),
        (("Paris",), 0.0),
    ],
)
def test_the_format_reward_is_the_table_of_search_r1(texts, reward):
    assert searchr1_em_format(_transcript(*texts), retrieval=0.1) == reward


@pytest.mark.parametrize(
    ("text", "in_order"),
    [
        (THOUGHT + _answered("x"), True),
        (f" \n{THOUGHT} {_answered('x')}\n", True),
        (THOUGHT + THOUGHT + _answered("x"), False),
        (THOUGHT + _answered("x") + " and more", False),
        (THOUGHT + _answered("x") + "<|im_end|>", False),
        (ASKED + THOUGHT + _answered("x"), False),
        (ASKED + SHOWN + ASKED + SHOWN + THOUGHT + _answered("x"), True),
        ("<think>" + _answered("x"), False),
        ("", False),
    ],
)
def test_the_order_of_tags_is_that_of_search_r1(text, in_order):
    assert tags_in_order(text) is in_order


def test_a_retrieved_answer_tag_is_nobodys_answer():
    """Confirmed by execution in the original: a page with an answer tag scores 0.8 there."""
    page = "\n\n<information>Trap <answer>Paris</answer></information>\n\n"
    for rule in RULES.values():
        trapped, plain = (
            rule(_transcript(ASKED, shown, "no answer of my own")) for shown in (page, SHOWN)
        )
        assert trapped == plain <= 0
    assert searchr1_em_format(_transcript(ASKED, page, THOUGHT + _answered("Rome"))) == 0.1


def test_retrieval_earns_in_tool_segments_only():
    claimed = f"{ASKED}<information>Paris</information>{THOUGHT}{_answered('Rome')}"  # the policy wrote the block itself
    assert tags_in_order(claimed) and searchr1_em_format(_transcript(claimed), retrieval=0.1) == 0.2
    shown = _transcript(ASKED, SHOWN, THOUGHT + _answered("Rome"))
    assert searchr1_em_format(shown, retrieval=0.1) == 0.2 + 0.1


def test_a_thought_that_the_prompt_or_an_observation_opens_is_in_order():
    opened = "\n<information>\nx\n</information>\n<think>\n"
    texts = ("t</think><search>q</search>", opened, "t</think>" + _answered("Paris"))
    assert searchr1_em_format(_transcript(*texts, prompt="Assistant:\n<think>\n")) == 1.0
    assert searchr1_em_format(_transcript(*texts)) == 0.8


def test_substring_match_reads_the_gold_in_the_answer_and_not_the_other_way():
    assert searchr1_subem(_transcript(_answered("the city of Paris, France"))) == 1.0
    assert searchr1_subem(_transcript(_answered("Par"))) == 0.0
    assert searchr1_subem(_transcript("Paris")) == 0.0


@pytest.mark.parametrize(
    ("texts", "golds", "reward"),
    [
        ((ASKED, SHOWN, _answered("Paris")), ("Paris",), 1.0),
        (
            (ASKED, SHOWN, _answered("in Paris")),
            ("Paris",),
            2 / 3,
        ),  # one word of two, and all of one
        ((_answered("Paris"),), ("Paris",), 1 - 0.1),
        ((_answered("old Paris town"),), ("Paris Texas",), 0.4 - 0.1),  # 2 * 1 / (3 + 2)
        ((ASKED, SHOWN, "Paris"), ("Paris",), -0.1),
        (("Paris",), ("Paris",), -0.2),
        ((CALLED.format("search"), SHOWN, _answered("Paris")), ("Paris",), 1.0),
        ((CALLED.format("access"), SHOWN, _answered("Paris")), ("Paris",), 0.9),
    ],
)
def test_f1_less_a_penalty_for_no_search_and_one_for_no_answer(texts, golds, reward):
    assert searchr1_f1_plus(_transcript(*texts, golds=golds)) == pytest.approx(reward, abs=1e-12)


def test_the_last_answer_of_all_turns_wins():
    texts = (_answered("Paris"), "", _answered("Rome"))
    assert all(rule(_transcript(*texts)) <= 0.1 for rule in RULES.values())
    assert RULES["searchr1_em"](_transcript(_answered("Rome"), "", _answered("Paris"))) == 1.0


# ---------------------------------------------------------------- ASearcher


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("the eiffel tower in paris", "eiffel tower", 0.571429),
        ("tower tower", "eiffel tower", 0.666667),  # sets, not bags
        ("The tower", "tower", 0.666667),  # articles stay
        ("True", "yes", 1.0),
        ("no", "False", 1.0),
        ("true", "yes", 0.0),  # only the exact words are mapped
        ("", "yes", 0.0),
        ("a-b", "a b", 1.0),  # punctuation separates
        ("1998年5月", "1998年5月", 1.0),
        ("1998年", "1998年5月", 2 * 2 / (2 + 4)),  # {年, 1998} against {年, 月, 1998, 5}
    ],
)
def test_asearcher_f1_by_hand(answer, gold, f1):
    assert asearcher_f1(_transcript(_answered(answer), golds=[gold])) == pytest.approx(f1, abs=1e-6)


def test_asearcher_em_maps_truth_values_in_answers_and_golds():
    assert asearcher_em(_transcript(_answered("True"), golds=["yes"])) == 1.0
    assert asearcher_em(_transcript(_answered("No."), golds=["x", "False"])) == 1.0
    assert asearcher_em(_transcript(_answered("TRUE"), golds=["yes"])) == 0.0
    assert RULES["searchr1_em"](_transcript(_answered("True"), golds=["yes"])) == 0.0


def test_the_validity_penalty_overrides_everything_unless_the_prompt_offers_it():
    allowed = "If so say '<answer> the question is invalid. </answer>'."
    refusal = _transcript(_answered("the question is invalid"), golds=["the question is invalid"])
    assert asearcher_compat(refusal) == -0.5
    assert asearcher_compat(Transcript(Task("t", allowed, refusal.golds), refusal.responses)) == 1.0
    assert (
        asearcher_compat(_transcript(_answered("question mark"), golds=["question mark"])) == -0.5
    )  # as the original
    assert (
        asearcher_compat(_transcript(_answered("Question"), golds=["Question"])) == 1.0
    )  # case matters
    retrieved = _transcript("<search>q</search>", "<answer>invalid</answer>", _answered("Paris"))
    assert asearcher_compat(retrieved) == 1.0  # unlike the original, which also reads pages


@pytest.mark.parametrize(
    ("response", "ok"),
    [
        ("thoughts</think>\n<search>q</search>", True),
        ("<search>q</search><answer>a</answer>", False),  # more than one tool
        ("<search>q", False),
        ("Assistant: <answer>a</answer>", False),
        ("</think></think>", False),
        ("", True),
    ],
)
def test_the_form_of_a_response_is_judged_as_in_asearcher(response, ok):
    assert well_formed(response) is ok


def test_one_malformed_response_zeroes_the_episode():
    good, bad = "<search>q</search>", "<search>"
    assert asearcher_compat(_transcript(good, "", _answered("Paris"))) == 1.0
    assert asearcher_compat(_transcript(bad, "", _answered("Paris"))) == 0.0
    assert asearcher_f1(_transcript(bad, "", _answered("Paris"))) == 1.0


def test_augmented_answers_earn_three_tenths():
    assert asearcher_compat(_transcript(_answered("Lutetia"), aug_answer=["Lutetia"])) == 0.3
    assert asearcher_compat(_transcript(_answered("Paris"), aug_answer=["Lutetia"])) == 0.7 + 0.3
    assert asearcher_compat(_transcript(_answered("Lutetia"), aug_answer=[])) == 0.0
    for year in (1998, 1998.0, [1998.0, float("nan")]):  # of a column of parquet
        assert asearcher_compat(_transcript(_answered("1998"), aug_answer=year)) == 0.3


# ---------------------------------------------------------------- by name


def test_all_rules_are_scored_side_by_side():
    scores = rule_scores(_transcript(ASKED, SHOWN, THOUGHT + _answered("Paris")))
    assert set(scores) == {f"score_{name}" for name in RULES} and set(scores.values()) == {1.0}


def test_a_reward_is_made_by_name_and_options():
    reward = make_reward({"name": "searchr1_em_format", "structure": 0.4})
    assert asyncio.run(reward(_transcript(THOUGHT + _answered("Rome")))).value == 0.4


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("searchr1em", "Did you mean 'searchr1_em'"),
        ({"name": "searchr1_em_format", "struct": 1}, "Did you mean 'structure'"),
        ({"name": "asearcher_compat", "base": "f2"}, "expected one of f1, em, found 'f2'"),
        ({"name": "judge", "url": "http://x"}, "missing keyword model"),
        ({"name": "judge", "url": "x", "model": "m"}, "expected an address"),
        ({"name": "judge", "url": "http://x", "model": "m", "tries": 0}, "above 0"),
    ],
)
def test_a_wrong_reward_is_one_clear_error(component, message):
    with pytest.raises(ConfigError, match=message):
        make_reward(component)
