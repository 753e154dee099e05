"""Requests for a response and replies to them, whatever interface they came through."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CONTEXT, TURNS = "context_length_exceeded", "turn_limit_reached"
"""Codes of refusals that end an episode as truncated."""


class RequestRefused(Exception):
    """Why a request gets no response; each interface has a form of its own for it.

    status: of HTTP, none that clients try again. code, parameter: what programs read."""

    def __init__(
        self, text: str, *, status: int = 400, code: str | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.code, self.parameter = status, code, parameter


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, with its arguments as the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class ModelRequest:
    """A conversation to go on with.

    messages: as a chat template takes them: contents are text, arguments of tool calls objects.
    tools: OpenAI's JSON schemas of functions. template_options: of the chat template. sampling:
    parameters that training may not be able to honour, by name. include_stop: the reply holds the
    stop string that ended it. handed_on: a later request may name the conversation, and takes its
    messages from there on."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_options: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    include_stop: bool = False
    handed_on: int | None = None
    model: str = "rlflow"


@dataclass(frozen=True)
class ModelReply:
    """A response as an agent gets it. ended: `stop`, `length` or `tool_calls`; stop_string: which
    one ended it. logprobs: (text, nats) of each sampled token."""

    id: str
    created: int
    request: ModelRequest
    content: str
    calls: Sequence[ToolCall]
    ended: str
    stop_string: str | None
    prompt_tokens: int
    response_tokens: int
    logprobs: Sequence[tuple[str, float]] = ()

    def message(self) -> dict[str, Any]:
        """The reply as a message of a conversation."""
        return assistant(self.content, self.calls)


TEMPLATE_OPTIONS = "chat_template_kwargs"
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (),  # the run's
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "seed": (),  # each attempt has its own
    "top_logprobs": (0,),
    "min_tokens": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "disable_parallel_tool_use": (False,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "output_config.format": (),
    TEMPLATE_OPTIONS: ({},),
    "thinking": ({"type": "disabled"},),
    "background": (False,),
    **dict.fromkeys(("prediction", "audio", "conversation", "prompt", "structured_outputs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("bad_words", "stop_token_ids", "allowed_token_ids"), ([],)),
}
"""Parameters under which tokens are not drawn from the policy's own distribution, only some are
kept, or the policy is shown something else, and the values that change nothing."""


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a request."""
    return {name: value for name, value in body.items() if name in NEUTRAL}


def unsupported(sampling: Mapping[str, Any], temperature: float | None) -> dict[str, str]:
    """{parameter: what it would have to be} of those that training cannot honour."""
    found = {}
    for name, value in sampling.items():
        neutral = NEUTRAL[name]
        if name == "temperature" and temperature is not None:
            neutral = (temperature,)
        if value is not None and value not in neutral:
            found[name] = " or ".join(map(repr, neutral)) or "left out"
    return found


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a request gives the chat template, as vLLM's servers take them. Raises
    RequestRefused."""
    value = body.get(TEMPLATE_OPTIONS) or {}
    if not isinstance(value, dict):
        raise RequestRefused(
            f"{TEMPLATE_OPTIONS}: expected an object of options, found {value!r:.40}.",
            parameter=TEMPLATE_OPTIONS,
        )
    return value


def text_of_content(content: Any, where: str) -> str:
    """The text of a message's content: text, nothing, or a list of parts that are text. Raises
    RequestRefused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestRefused(
                f"{where}: expected text or parts of the type text, found {kind!r:.60}; the policy "
                "reads text only.",
                parameter=where,
            )
        texts.append(text)
    return "".join(texts)


def assistant(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A message of the assistant, as a chat template takes it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": parsed(call)}}
            for call in calls
        ]
    return message


def written(arguments: Any) -> str:
    """Arguments as JSON text, whether or not they came as such."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _number(text: str) -> int | float:
    """1 for 1.0, as JavaScript sends it back."""
    number = float(text)
    return int(number) if number.is_integer() else number


_DECODER = json.JSONDecoder(parse_float=_number)


def parsed(call: ToolCall) -> Any:
    """The arguments as an object, or as they stand where they are none."""
    try:
        return _DECODER.decode(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments


def whole_number(body: Mapping[str, Any], name: str) -> int | None:
    """A limit of the request. Raises RequestRefused."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestRefused(
            f"{name}: expected a whole number above 0, found {value!r:.40}.", parameter=name
        )
    return value


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Stop strings: none, one or several. Raises RequestRefused."""
    value = body.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(one and _is_text(one) for one in found):
        raise RequestRefused(f"{name}: expected text or a list of texts.", parameter=name)
    return tuple(found)


def model_of(body: Mapping[str, Any]) -> str:
    """The model's name, which the reply repeats. Raises RequestRefused."""
    name = body.get("model") or "rlflow"
    if not _is_text(name):
        raise RequestRefused(f"model: expected text, found {name!r:.40}.", parameter="model")
    return name


def _is_text(value: Any) -> bool:
    """Half of a surrogate pair is none: nobody can be sent it."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def items(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; [] where it is missing. Raises RequestRefused."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise RequestRefused(f"{name}: expected a list of objects.", parameter=name)
    return value
