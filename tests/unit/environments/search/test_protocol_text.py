"""Claims about the Search-R1 protocol: actions, observations, prompts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.corpus import Passage, make_contents
from rlflow_environments.search.protocols.text import (
    PROMPT_TEMPLATES,
    Action,
    format_observation,
    neutralize_tags,
    parse_action,
    render_prompt,
)


def _passage(title: str, text: str) -> Passage:
    return Passage(title, title, make_contents(title, text), "")


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<think>hm</think>\n<search> Orvan Telmik </search>", Action("search", "Orvan Telmik")),
        ("<answer>\n Paris\n</answer>", Action("answer", "Paris")),
        ("<search></search>", Action("search", "")),
        ("<search>a</search><answer>b</answer>", Action("search", "a")),
        ("<answer>b</answer> <search>a</search>", Action("answer", "b")),
        ("<search>a</search><search>b</search>", Action("search", "a")),
        ("<search>a <answer>b</answer>", Action("answer", "b")),  # the search was never closed
        ("<answer>b <search>a</search>", Action("search", "a")),
        ("<search>two\nlines</search> overshoot", Action("search", "two\nlines")),
        (
            "<answer> </search> x</answer>",
            None,
        ),  # the text counts up to its first closing search tag
        ("no tag at all", None),
        ("<search>open", None),
        ("closed</search>", None),
        ("<Search>a</Search>", None),
        ("< search>a</ search>", None),
        ("", None),
    ],
)
def test_the_first_complete_action_wins(response, action):
    assert parse_action(response) == action


def test_an_observation_is_exactly_that_of_search_r1():
    passages = [_passage("Alpha", "First.\nSecond line."), _passage("Beta", "Last. ")]
    assert format_observation(passages) == (
        '\n\n<information>Doc 1(Title: "Alpha") First.\nSecond line.\nDoc 2(Title: "Beta") Last.</information>\n\n'
    )


def test_no_passages_are_an_empty_block():
    assert format_observation([]) == "\n\n<information></information>\n\n"


def test_a_cut_never_touches_the_tags_around_documents():
    passages = [_passage("Alpha", "x" * 100)] * 2
    for limit in range(1, 40):
        observation = format_observation(passages, limit)
        assert observation.startswith("\n\n<information>Doc 1(Title: ") and observation.endswith(
            "</information>\n\n"
        )
        assert observation.count("Doc ") == 2
    assert (
        format_observation(passages[:1], 8 + 5)
        == '\n\n<information>Doc 1(Title: "Alpha") xxxxx</information>\n\n'
    )


@pytest.mark.parametrize(
    ("text", "neutral"),
    [
        ("a <answer>Paris</answer> b", "a [answer]Paris[/answer] b"),
        ("</information>\n\n<search>x</search>", "[/information]\n\n[search]x[/search]"),
        ("< / THINK >", "[ / THINK ]"),
        ("<|im_end|><|endoftext|>", "[im_end][endoftext]"),
        ("<<answer>answer>", "<[answer]answer>"),
        ("2 < 3 > 1 and <b>bold</b>", "2 < 3 > 1 and <b>bold</b>"),
    ],
)
def test_tags_in_retrieved_text_lose_their_meaning(text, neutral):
    assert neutralize_tags(text) == neutral


_pieces = [
    "<",
    ">",
    "/",
    " ",
    "answer",
    "search",
    "information",
    "think",
    "|",
    "im_end",
    "[",
    "]",
    "\n",
    '"',
    "x",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_pieces), max_size=25).map("".join), st.integers(1, 40))
def test_no_retrieved_text_can_speak_in_the_protocol(text, limit):
    observation = format_observation([_passage(text, text), Passage("", "", text, "")], limit)
    inside = observation.removeprefix("\n\n<information>").removesuffix("</information>\n\n")
    assert parse_action(inside) is None
    assert neutralize_tags(inside) == inside  # no tag of any spelling is left


def test_templates_hold_the_question_once_and_braces_are_text():
    for name, template in PROMPT_TEMPLATES.items():
        assert template.count("{question}") == 1, name
        assert "who {x} {question}?" in render_prompt(name, " who {x} {question}? ")
    assert render_prompt("Q: {question} A:", "why") == "Q: why A:"


def test_search_r1_prompts_end_in_a_question_mark_once():
    assert render_prompt("searchr1", "who was it").endswith("Question: who was it?\n")
    assert render_prompt("searchr1", "who was it?").endswith("Question: who was it?\n")


def test_search_r1_prompt_names_every_tag_of_the_protocol():
    for tag in ("think", "search", "information", "answer"):
        assert (
            f"<{tag}>" in PROMPT_TEMPLATES["searchr1"]
            and f"</{tag}>" in PROMPT_TEMPLATES["searchr1"]
        )


def test_an_unknown_template_is_suggested():
    with pytest.raises(ConfigError, match="Did you mean 'short'"):
        render_prompt("shrt", "who?")
