"""Calls of tools in the text of a response, in the forms of the open models' chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPENING, CLOSING = "<tool_call>", "</tool_call>"
THOUGHT = "</think>"  # what stands in front is no call, as inference servers have it
ARGUMENTS = ("arguments", "parameters")  # the latter: Llama 3.1


@dataclass(frozen=True)
class TextCall:
    """A use of a tool, as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ReadResponse:
    """content: the text around the calls. found: the calls in order, None for one that cannot be
    read, which stays part of the content, as does one that begins and does not end (unclosed)."""

    content: str
    found: tuple[TextCall | None, ...] = ()
    unclosed: bool = False

    @property
    def calls(self) -> list[TextCall]:
        """Those that can be read."""
        return [call for call in self.found if call is not None]

    @property
    def failed(self) -> int:
        """How many cannot."""
        return self.found.count(None) + self.unclosed


def read_response(text: str) -> ReadResponse:
    """The calls of a response: `<tool_call>` blocks behind its thinking (Qwen, Hermes), or a
    response that is one JSON object (Llama). Without arguments they are {}."""
    bare = text.strip()
    if bare.startswith("{") and bare.endswith("}") and '"name"' in bare:
        return _read_bare(text, bare)
    start = text.find(THOUGHT) + len(THOUGHT) if THOUGHT in text else 0
    kept = [text[:start]]
    found: list[TextCall | None] = []
    while (opened := text.find(OPENING, start)) >= 0:
        closed = text.find(CLOSING, opened)
        if closed < 0:
            break
        call = _call(text[opened + len(OPENING) : closed])
        stop = closed + len(CLOSING)
        kept.append(text[start : opened if call else stop])
        found.append(call)
        start = stop
    content = "".join(kept) + text[start:]
    return ReadResponse(content.strip() if any(found) else content, tuple(found), opened >= 0)


def _read_bare(text: str, bare: str) -> ReadResponse:
    """An object that holds a name among others of its own is an answer, and no call."""
    try:
        value = _load(bare)
    except (ValueError, RecursionError):
        return ReadResponse(text, (None,))
    if len(value) > 1 and not any(key in value for key in ARGUMENTS):
        return ReadResponse(text)
    call = _call(bare)
    return ReadResponse("" if call else text, (call,))


def _call(block: str) -> TextCall | None:
    try:
        call = _load(block)
        name = call["name"]
        arguments = next((call[key] for key in ARGUMENTS if key in call), None)
        if isinstance(arguments, str):  # as OpenAI's clients have them
            arguments = _load(arguments)
    except (ValueError, TypeError, KeyError, RecursionError):  # the last: a thousand brackets
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        return None
    return TextCall(name, arguments or {})


def _load(text: str) -> Any:
    """The JSON value, as others can be sent it: no half of a surrogate pair, no NaN. Raises
    ValueError, RecursionError."""
    value = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    return json.loads(value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
