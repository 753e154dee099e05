"""Qwen3-Coder and Qwen3.5: <function=NAME> with <parameter=NAME> in each <tool_call>."""

from __future__ import annotations

import re

from rlflow.models.calls.form import CallForm, CallsRead, TextCall, Tools, broken_through
from rlflow.models.calls.typed import typed_arguments

CLOSING = "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\s]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]{1,256})>")
# A value may quote anything but what follows one; the second ends a block whose value does not end
_VALUE_END = re.compile(
    r"</parameter>\s*(?=<parameter=|</function>)"
    r"|(?P<broken></function>\s*</tool_call>\s*(?:(?=<tool_call>)|\Z))"
)
_END = re.compile(r"\s*</function>\s*</tool_call>")


def read(text: str, place: int, tools: Tools) -> CallsRead:
    """The function of a block."""
    function = _FUNCTION.match(text, place)
    if function is None:
        return broken_through(text, place, CLOSING)
    place = function.end()
    texts: dict[str, str] = {}
    while parameter := _PARAMETER.match(text, place):
        ended = _VALUE_END.search(text, parameter.end())
        if ended is None:
            return CallsRead(len(text), (), unclosed=True)
        if ended["broken"]:
            return CallsRead(ended.end(), (None,))
        value = text[parameter.end() : ended.start()]
        texts[parameter[1]] = value.removeprefix("\n").removesuffix("\n")
        place = ended.end()
    end = _END.match(text, place)
    if end is None:
        return broken_through(text, place, CLOSING)
    call = TextCall(function[1], typed_arguments(function[1], texts, tools))
    return CallsRead(end.end(), (call,))


FORM = CallForm(
    name="xml blocks",
    shape="<tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    marks=("<parameter=",),
    opening="<tool_call>",
    sure=r"<tool_call>(?=\s*<function=)",
    read=read,
)
