"""gpt-oss: a message to functions.NAME, its header in front of <|message|> and JSON behind."""

from __future__ import annotations

import re

from rlflow.models.calls.form import CallForm, CallsRead, TextCall, Tools, decode_json

MESSAGE = "<|message|>"
# The recipient stands in front of the channel (templates) or behind it (the models)
_REST = r"(?:[^<]|<\|channel\|>|<\|constrain\|>){0,80}<\|message\|>"
_HEADER = re.compile(rf"([^<>\s]{{1,256}}){_REST}\s*")
_END = re.compile(r"\s*(?:<\|(?:call|end|return)\|>)?")
_NEXT = re.compile(r"<\|(?:call|end|return)\|>|(?=<\|(?:start|channel)\|>)|\Z")


def read(text: str, place: int, tools: Tools) -> CallsRead:
    """The call that a message is."""
    header = _HEADER.match(text, place)
    assert header is not None, "the opening looks ahead"
    try:
        value, stop = decode_json(text, header.end(), "<|")
    except (ValueError, RecursionError):
        ended = _NEXT.search(text, header.end())
        return CallsRead(len(text) if ended is None else ended.end(), (None,))
    call = TextCall(header[1], value) if isinstance(value, dict) else None
    ended = _END.match(text, stop)
    return CallsRead(stop if ended is None else ended.end(), (call,))


FORM = CallForm(
    name="harmony",
    shape="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>",
    marks=("<|channel|>",),
    opening=r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w{0,16})?\s?to=functions\."
    rf"(?=[^<>\s]{{1,256}}{_REST})",
    read=read,
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, "<|end|>"),
)
