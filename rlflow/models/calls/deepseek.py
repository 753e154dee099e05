"""DeepSeek V3, V3.1 and R1: calls between marks of their own, as fenced or bare JSON."""

from __future__ import annotations

import re

from rlflow.models.calls.form import CallForm, CallsRead, TextCall, Tools, decode_json, skip_blanks

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
# V3 and R1 name the kind in front, and fence the JSON; V3.1 has the name there
_FENCED = re.compile(rf"\s*function{SEPARATOR}([^<>\s]{{1,256}})\s*```json\s*")
_BARE = re.compile(rf"\s*([^<>\s]{{1,256}}){SEPARATOR}\s*(?={{)")
_CALL_END = re.compile(rf"\s*(?:```)?\s*{CALL_END}")


def read(text: str, place: int, tools: Tools) -> CallsRead:
    """The calls behind the mark that opens all of them."""
    found: list[TextCall | None] = []
    while text.startswith(CALL, place := skip_blanks(text, place)):
        call, stop = _read_call(text, place + len(CALL))
        if stop < 0:
            return CallsRead(len(text), tuple(found), unclosed=True)
        found.append(call)
        place = stop
    if text.startswith(END, place):
        place += len(END)
    return CallsRead(place, tuple(found) or (None,))


def _read_call(text: str, place: int) -> tuple[TextCall | None, int]:
    """One call and where it ends, -1 where it does not."""
    head = _FENCED.match(text, place) or _BARE.match(text, place)
    if head:
        try:
            value, stop = decode_json(text, head.end(), CALL_END)
            ended = _CALL_END.match(text, stop)
            if ended:
                call = TextCall(head[1], value) if isinstance(value, dict) else None
                return call, ended.end()
        except (ValueError, RecursionError):
            pass
    closed = text.find(CALL_END, place)
    return None, closed + len(CALL_END) if closed >= 0 else -1


FORM = CallForm(
    name="deepseek",
    shape=f"{BEGIN}{CALL}function{SEPARATOR}NAME\n```json\n{{...}}\n```{CALL_END}{END}",
    marks=(BEGIN,),
    opening=BEGIN,
    read=read,
    tokens=(BEGIN, END, CALL, SEPARATOR, CALL_END),
)
