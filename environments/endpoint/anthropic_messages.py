"""Anthropic's messages: requests read, replies and their streams written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlflow_environments.endpoint.chat import pieces
from rlflow_environments.endpoint.requests import (
    ModelReply,
    ModelRequest,
    RequestRefused,
    ToolCall,
    assistant,
    items,
    model_of,
    sampling_of,
    text_of_content,
    texts,
    whole_number,
)

ENDED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NESTED = (
    ("output_config.format", "output_config", "format"),
    ("disable_parallel_tool_use", "tool_choice", "disable_parallel_tool_use"),
)
"""Parameters of `NEUTRAL` that stand in another one."""


def read(body: Mapping[str, Any], before: object = ()) -> ModelRequest:
    """before: conversations, which nothing names here. Raises RequestRefused."""
    messages: list[dict[str, Any]] = []
    if body.get("system") and body.get("messages"):  # alone it is nothing to answer
        content = text_of_content(body["system"], "system")
        messages.append({"role": "system", "content": content})
    for message in items(body, "messages"):
        messages += _read_message(message)
    choice = body.get("tool_choice")
    wanted = choice.get("type") if isinstance(choice, dict) else choice
    sampling = sampling_of(body) | ({"tool_choice": wanted} if wanted else {})
    for name, within, key in NESTED:
        if isinstance(body.get(within), dict) and key in body[within]:
            sampling[name] = body[within][key]
    return ModelRequest(
        messages=messages,
        tools=[] if wanted == "none" else [_tool(tool) for tool in items(body, "tools")],
        stop=texts(body, "stop_sequences"),
        max_tokens=whole_number(body, "max_tokens"),
        sampling=sampling,
        stream=bool(body.get("stream")),
        model=model_of(body),
    )


def _read_message(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    blocks = items(message, "content") if isinstance(content, list) else []
    if message.get("role") == "assistant":
        calls = [
            ToolCall(str(block.get("name")), json.dumps(block.get("input") or {}))
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        said = [block for block in blocks if block.get("type") not in ("tool_use", "thinking")]
        yield assistant(text_of_content(said if blocks else content, "messages.content"), calls)
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            told = text_of_content(block.get("content"), "messages.content.tool_result")
            yield {"role": "tool", "content": told}
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    if rest or not blocks:
        told = text_of_content(rest if blocks else content, "messages.content")
        yield {"role": str(message.get("role") or "user"), "content": told}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise RequestRefused(
            f"tools: expected an input_schema in each, found the type {tool.get('type')!r:.40}; "
            "tools of the vendor's servers are not there.",
            parameter="tools",
        )
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def write(reply: ModelReply) -> dict[str, Any]:
    """The reply's body."""
    return {**_head(reply), **_ended(reply), "content": _blocks(reply), "usage": _usage(reply)}


def stream(reply: ModelReply) -> Iterator[str]:
    """The reply as server-sent events."""
    usage = {**_usage(reply), "output_tokens": 0}
    empty = {**_head(reply), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**empty, "usage": usage})
    for number, block in enumerate(_blocks(reply)):
        if block["type"] == "text":
            start = {**block, "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
        else:
            start = {**block, "input": {}}
            told = json.dumps(block["input"])
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(told)]
        yield _event("content_block_start", index=number, content_block=start)
        for delta in deltas:
            yield _event("content_block_delta", index=number, delta=delta)
        yield _event("content_block_stop", index=number)
    tokens = {"output_tokens": reply.response_tokens}
    yield _event("message_delta", delta=_ended(reply), usage=tokens)
    yield _event("message_stop")


def error(refused: RequestRefused) -> dict[str, Any]:
    """A refusal's body."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _head(reply: ModelReply) -> dict[str, Any]:
    named = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
    return {**named, "model": reply.request.model}


def _ended(reply: ModelReply) -> dict[str, Any]:
    by_string = reply.ended == "stop" and reply.stop_string is not None
    reason = "stop_sequence" if by_string else ENDED[reply.ended]
    return {"stop_reason": reason, "stop_sequence": reply.stop_string if by_string else None}


def _usage(reply: ModelReply) -> dict[str, int]:
    return {"input_tokens": reply.prompt_tokens, "output_tokens": reply.response_tokens}


def _blocks(reply: ModelReply) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": reply.content}] if reply.content or not reply.calls else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.calls
    ]
    return [*text, *calls]
