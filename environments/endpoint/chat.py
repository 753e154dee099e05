"""OpenAI's chat completions: requests read, replies and their streams written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlflow_environments.endpoint.requests import (
    TEMPLATE_OPTIONS,
    ModelReply,
    ModelRequest,
    RequestRefused,
    ToolCall,
    assistant,
    items,
    model_of,
    sampling_of,
    template_options,
    text_of_content,
    texts,
    whole_number,
    written,
)

PIECE = 32
"""Characters of a piece of a stream: the response is whole before it begins."""
ROLES = {"developer": "system", "function": "tool"}


def read(body: Mapping[str, Any], before: object = ()) -> ModelRequest:
    """before: conversations, which nothing names here. Raises RequestRefused."""
    if body.get("n") not in (None, 1):
        raise RequestRefused(
            f"n: expected 1, found {body['n']!r:.20}; ask several times.", parameter="n"
        )
    options = body.get("stream_options")
    sampling = sampling_of(body)
    sampling.pop(TEMPLATE_OPTIONS, None)  # which training renders with
    return ModelRequest(
        messages=[read_message(one) for one in items(body, "messages")],
        tools=[] if body.get("tool_choice") == "none" else items(body, "tools"),
        stop=texts(body, "stop"),
        max_tokens=whole_number(body, "max_completion_tokens") or whole_number(body, "max_tokens"),
        template_options=template_options(body),
        sampling=sampling,
        stream=bool(body.get("stream")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        include_stop=bool(body.get("include_stop_str_in_output")),
        model=model_of(body),
    )


def read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a chat template takes it. Raises RequestRefused."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestRefused("messages: expected a role in each.", parameter="messages")
    content = text_of_content(message.get("content"), "messages.content")
    if role == "assistant":
        return assistant(content, [_call(one) for one in items(message, "tool_calls")])
    return {"role": ROLES.get(role, role), "content": content}


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise RequestRefused(
            "messages.tool_calls: expected a function with a name.", parameter="messages"
        )
    return ToolCall(name, written(function.get("arguments") or {}), str(call.get("id") or ""))


def write(reply: ModelReply) -> dict[str, Any]:
    """The reply's body."""
    calls = [_written(call) for call in reply.calls]
    content = None if calls and not reply.content else reply.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    message |= {"tool_calls": calls} if calls else {}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": reply.ended,
        "logprobs": _logprobs(reply),
    }
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def stream(reply: ModelReply) -> Iterator[str]:
    """The reply as server-sent events."""
    head = _head(reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], ended: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": ended, "logprobs": None}
        if ended:
            choice["logprobs"] = _logprobs(reply)
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    yield chunk({"role": "assistant", "content": ""})
    for piece in pieces(reply.content):
        yield chunk({"content": piece})
    for number, call in enumerate(reply.calls):
        yield chunk({"tool_calls": [{"index": number, **_written(call)}]})
    yield chunk({}, reply.ended)
    if reply.request.stream_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(reply)})}\n\n"
    yield "data: [DONE]\n\n"


def error(refused: RequestRefused) -> dict[str, Any]:
    """A refusal's body."""
    kinds = {401: "authentication_error", 500: "server_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    told = {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}
    return {"error": told}


def pieces(text: str) -> Iterator[str]:
    """The text as a stream gives it."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def _written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _head(reply: ModelReply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.request.model,
    }


def _usage(reply: ModelReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.response_tokens,
        "total_tokens": reply.prompt_tokens + reply.response_tokens,
    }


def _logprobs(reply: ModelReply) -> dict[str, Any] | None:
    if not reply.request.logprobs:
        return None
    content = [
        {
            "token": text,
            "logprob": logprob if math.isfinite(logprob) else 0.0,  # unknown: JSON has no NaN
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in reply.logprobs
    ]
    return {"content": content, "refusal": None}
