"""Mistral and Mixtral: [TOOL_CALLS] in front of a JSON list, or of each name and its [ARGS]."""

from __future__ import annotations

import re

from rlflow.models.calls.form import (
    CallForm,
    CallsRead,
    TextCall,
    Tools,
    call_of,
    decode_json,
    skip_blanks,
)

MARK = "[TOOL_CALLS]"
_NAMED = re.compile(r"([^\[\]{}\s]{1,256})\s*(?:\[CALL_ID\][^\[\]{}\s]{1,64}\s*)?\[ARGS\]\s*")


def read(text: str, place: int, tools: Tools) -> CallsRead:
    """The list, or the call of one name."""
    place = skip_blanks(text, place)
    named = _NAMED.match(text, place)
    try:
        value, stop = decode_json(text, named.end() if named else place, MARK)
    except (ValueError, RecursionError):
        return _broken(text, place)
    if named:
        return CallsRead(stop, (TextCall(named[1], value) if isinstance(value, dict) else None,))
    calls = value if isinstance(value, list) else [value]
    return CallsRead(stop, tuple(call_of(one) for one in calls) or (None,))


def _broken(text: str, place: int) -> CallsRead:
    following = text.find(MARK, place)
    return CallsRead(len(text) if following < 0 else following, (None,))


FORM = CallForm(
    name="mistral",
    shape='[TOOL_CALLS] and a JSON list [{"name": NAME, "arguments": {...}}]',
    marks=(MARK,),
    opening=r"\[TOOL_CALLS\]",
    read=read,
    tokens=(MARK, "[ARGS]", "[CALL_ID]"),
)
