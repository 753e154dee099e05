"""One reader of tool calls: what is no call stays text, and nothing that is read can break a reply."""

from __future__ import annotations

import json
import time

import pytest

from rlflow.models.calls.form import TextCall
from rlflow.models.calls.reader import CallReader, ReadResponse

read_response = CallReader().read


def test_calls_and_the_text_around_them() -> None:
    text = ' I add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "b"}</tool_call> '
    assert read_response(text) == ReadResponse(
        "I add.", (TextCall("add", {"a": 1}), TextCall("b", {}))
    )
    assert read_response(' {"name": "b"} ') == ReadResponse("", (TextCall("b", {}),))
    assert read_response(" none ") == ReadResponse(" none ")


def test_what_cannot_be_read_stays_and_is_counted() -> None:
    wrong = "a <tool_call>{</tool_call> b"
    assert read_response(wrong) == ReadResponse(wrong, (None,)) and read_response(wrong).failed == 1
    cut = '<tool_call>{"name": "b"}</tool_call> c <tool_call>{"name"'
    assert read_response(cut) == ReadResponse(
        'c <tool_call>{"name"', (TextCall("b", {}),), unclosed=True
    )
    assert read_response(cut).failed == 1 and read_response('{"name": }').failed == 1


def test_thinking_holds_no_call() -> None:
    call, thought = '<tool_call>{"name": "b"}</tool_call>', "<think>maybe <tool_call> as in "
    ended = f"{thought}{call}? no.</think>"
    assert read_response(f"{ended} I will not.") == ReadResponse(f"{ended} I will not.")
    assert read_response(f"{ended}{call}") == ReadResponse(ended, (TextCall("b", {}),))


@pytest.mark.parametrize("arguments", ["[1, 2]", "0", '"[1, 2]"'])
def test_arguments_that_are_no_object_make_no_call(arguments: str) -> None:
    text = f'{{"name": "a", "arguments": {arguments}}}'
    assert read_response(text) == ReadResponse(text, (None,))
    assert read_response('{"name": "a", "arguments": null}').calls == [TextCall("a", {})]


def test_an_answer_that_holds_a_name_is_no_call() -> None:
    answer = '{"name": "Marie", "born": 1867}'
    assert read_response(answer) == ReadResponse(answer)
    assert read_response('{"name": "find", "parameters": {"born": 1867}, "id": 1}').calls == [
        TextCall("find", {"born": 1867})
    ]


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_no_call_holds_what_json_cannot(number: str) -> None:
    assert read_response(
        f'<tool_call>{{"name": "a", "arguments": {{"x": {number}}}}}</tool_call>'
    ).found == (None,)


def test_halves_of_characters_are_replaced() -> None:
    half = '{"name": "a", "arguments": {"x": "\\ud83d"}}'
    for text in (half, json.dumps({"name": "a", "arguments": '{"x": "\\ud83d"}'})):
        assert read_response(text).calls == [TextCall("a", {"x": "\ufffd"})]


def test_reading_takes_time_linear_in_the_text() -> None:
    begun = time.perf_counter()
    for text in (
        "<tool_call>" * 50_000,
        "<tool_call>{</tool_call>" * 20_000,
        '{"name"' * 50_000 + "}",
        "[" * 500_000,
    ):
        read_response(text)
    assert time.perf_counter() - begun < 2.0
