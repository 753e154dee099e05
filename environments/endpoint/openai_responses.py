"""OpenAI's responses: requests read, replies and their streams written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlflow_environments.endpoint.chat import error as error  # of the same form
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
    whole_number,
    written,
)


def read(body: Mapping[str, Any], before: Mapping[str, Sequence[dict[str, Any]]]) -> ModelRequest:
    """before: conversations by the ids of their last replies. Raises RequestRefused."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        content = text_of_content(body["instructions"], "instructions")
        messages.append({"role": "system", "content": content})
    instructions = len(messages)  # no part of what a conversation hands on
    previous = body.get("previous_response_id")
    if previous is not None:
        known = isinstance(previous, str)
        found = before.get(previous.removeprefix("resp_")) if known else None
        if found is None:
            raise RequestRefused(
                f"previous_response_id: no response {previous!r:.60} in this episode.",
                status=404 if known else 400,
                parameter="previous_response_id",
            )
        messages += found
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _take(messages, items(body, "input"))
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    return ModelRequest(
        messages=messages,
        tools=[] if body.get("tool_choice") == "none" else [*map(_tool, items(body, "tools"))],
        max_tokens=whole_number(body, "max_output_tokens"),
        sampling=sampling_of(body) | ({"response_format": form} if form else {}),
        handed_on=instructions,
        stream=bool(body.get("stream")),
        model=model_of(body),
    )


def _take(messages: list[dict[str, Any]], given: Sequence[Mapping[str, Any]]) -> None:
    """Appends items: those of the assistant that stand together are one message."""
    for item in given:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            content = text_of_content(item.get("output"), "input.output")
            messages.append({"role": "tool", "content": content})
        elif kind == "function_call":
            call = ToolCall(str(item.get("name")), written(item.get("arguments") or {}))
            _say(messages, assistant("", [call]))
        elif kind == "message" and item.get("role") == "assistant":
            _say(messages, assistant(text_of_content(item.get("content"), "input.content"), ()))
        elif kind == "message":
            role = "system" if item.get("role") == "developer" else str(item.get("role", "user"))
            content = text_of_content(item.get("content"), "input.content")
            messages.append({"role": role, "content": content})
        elif kind != "reasoning":
            raise RequestRefused(
                f"input: expected messages, function calls and their outputs, found {kind!r:.40}.",
                parameter="input",
            )


def _say(messages: list[dict[str, Any]], more: dict[str, Any]) -> None:
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant":
        messages.append(more)
        return
    calls = [*last.get("tool_calls", ()), *more.get("tool_calls", ())]
    joined = {"role": "assistant", "content": last["content"] + more["content"]}
    messages[-1] = joined | ({"tool_calls": calls} if calls else {})


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestRefused(
            f"tools: expected the type function, found {tool.get('type')!r:.40}; tools of the "
            "vendor's servers are not there.",
            parameter="tools",
        )
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def write(reply: ModelReply) -> dict[str, Any]:
    """The reply's body."""
    cut = reply.ended == "length"
    return {
        **_head(reply),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(reply),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.response_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.response_tokens,
        },
    }


def stream(reply: ModelReply) -> Iterator[str]:
    """The reply as server-sent events."""
    for number, (kind, fields) in enumerate(_events(reply)):
        body = {"type": kind, "sequence_number": number, **fields}
        yield f"event: {kind}\ndata: {json.dumps(body)}\n\n"


def _events(reply: ModelReply) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = write(reply)
    begun = {**_head(reply), "status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    for number, item in enumerate(whole["output"]):
        place = {"output_index": number}
        of: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        empty = {**item, "status": "in_progress", **of}
        yield "response.output_item.added", {**place, "item": empty}
        within = {**place, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            within["content_index"] = 0
            yield "response.content_part.added", {**within, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield "response.output_text.delta", {**within, "delta": piece, "logprobs": []}
            told = {"text": part["text"], "logprobs": []}
            yield "response.output_text.done", {**within, **told}
            yield "response.content_part.done", {**within, "part": part}
        else:
            for piece in pieces(item["arguments"]):
                yield "response.function_call_arguments.delta", {**within, "delta": piece}
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**within, **told}
        yield "response.output_item.done", {**place, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _head(reply: ModelReply) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": reply.request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
    }


def _output(reply: ModelReply) -> list[dict[str, Any]]:
    status = "incomplete" if reply.ended == "length" else "completed"
    part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
    message = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
    said = [{**message, "status": status, "content": [part]}]
    calls = [
        {
            "id": f"fc_{reply.id}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for number, call in enumerate(reply.calls)
    ]
    return [*(said if reply.content or not calls else []), *calls]
