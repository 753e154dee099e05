"""Hermes, Qwen2.5 and Qwen3: one JSON object in each <tool_call>."""

from __future__ import annotations

from rlflow.models.calls.form import (
    CallForm,
    CallsRead,
    Tools,
    broken_through,
    call_of,
    decode_json,
    skip_blanks,
)
from rlflow.models.calls.json_objects import read_whole

CLOSING = "</tool_call>"


def read(text: str, place: int, tools: Tools) -> CallsRead:
    """The object of a block. A string in it may quote the block's end."""
    try:
        value, stop = decode_json(text, skip_blanks(text, place), CLOSING)
        stop = skip_blanks(text, stop)
        if text.startswith(CLOSING, stop):
            return CallsRead(stop + len(CLOSING), (call_of(value),))
    except (ValueError, RecursionError):  # the last: a thousand brackets
        pass
    return broken_through(text, place, CLOSING)


FORM = CallForm(
    name="json blocks",
    shape="one JSON object with 'name' and 'arguments'",
    marks=("<tool_call>",),
    opening="<tool_call>",
    read=read,
    whole=read_whole,
)
