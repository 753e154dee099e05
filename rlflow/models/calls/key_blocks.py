"""GLM-4.5 and GLM-4.6: a name with <arg_key> and <arg_value> in each <tool_call>."""

from __future__ import annotations

import re

from rlflow.models.calls.form import CallForm, CallsRead, TextCall, Tools, broken_through
from rlflow.models.calls.typed import typed_arguments

CLOSING = "</tool_call>"
_NAME = re.compile(r"\s*([^<>\s]{1,256})\s*(?=<arg_key>|</tool_call>)")
_KEY = re.compile(r"\s*<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>")
# A value may quote anything but what follows one; the second ends a block whose value does not end
_VALUE_END = re.compile(
    r"</arg_value>\s*(?=<arg_key>|</tool_call>)"
    r"|(?P<broken></tool_call>\s*(?:(?=<tool_call>)|\Z))"
)
_END = re.compile(r"\s*</tool_call>")


def read(text: str, place: int, tools: Tools) -> CallsRead:
    """The name and arguments of a block."""
    name = _NAME.match(text, place)
    if name is None:
        return broken_through(text, place, CLOSING)
    place = name.end()
    texts: dict[str, str] = {}
    while key := _KEY.match(text, place):
        ended = _VALUE_END.search(text, key.end())
        if ended is None:
            return CallsRead(len(text), (), unclosed=True)
        if ended["broken"]:
            return CallsRead(ended.end(), (None,))
        texts[key[1].strip()] = text[key.end() : ended.start()]
        place = ended.end()
    end = _END.match(text, place)
    if end is None:
        return broken_through(text, place, CLOSING)
    return CallsRead(end.end(), (TextCall(name[1], typed_arguments(name[1], texts, tools)),))


FORM = CallForm(
    name="key blocks",
    shape="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    marks=("<arg_key>",),
    opening="<tool_call>",
    sure=r"<tool_call>(?=\s*[^<>\s]{1,256}\s*<arg_key>)",
    read=read,
)
