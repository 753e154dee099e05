"""Calls of tools in the text of a response, in the forms of the open models' chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rlflow.endpoint.requests import ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ReadResponse:
    """content: the text around the calls. failed: calls that begin and cannot be read, which stay
    part of the content."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    failed: int = 0


def read_response(text: str) -> ReadResponse:
    """The calls of a response: `<tool_call>` blocks (Qwen, Hermes), or a response that is one JSON
    object (Llama)."""
    bare = text.strip()
    if bare.startswith("{") and bare.endswith("}") and (call := _read(bare)) is not None:
        return ReadResponse("", (call,))
    kept: list[str] = []
    calls: list[ToolCall] = []
    failed = 0
    while True:
        before, opening, rest = text.partition(OPENING)
        kept.append(before)
        if not opening:
            break
        block, closing, text = rest.partition(CLOSING)
        call = _read(block) if closing else None
        if call is None:
            failed += 1
            kept.append(opening + block + closing)
        else:
            calls.append(call)
    content = "".join(kept)
    return ReadResponse(content.strip() if calls else content, tuple(calls), failed)


def _read(block: str) -> ToolCall | None:
    try:
        call: Any = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))  # the latter: Llama 3.1
    if isinstance(arguments, str):  # some write JSON in JSON
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))
