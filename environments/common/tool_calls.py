"""Tool calls in a response's text, tools as chat templates take them, and messages that answer."""

from __future__ import annotations

from typing import Any

from rlflow.types import Message
from rlflow_environments.common.text_calls import TextCall, read_response

UNREADABLE = "Error: a tool call is one JSON object with 'name' and 'arguments'."
MOST_LEVELS = 64
"""Of nested arguments; what carries them on to a tool refuses deeper ones (pydantic from 255)."""
TOO_DEEP = f"Error: the arguments are nested deeper than {MOST_LEVELS} levels."


def read_calls(response: str) -> list[TextCall | str]:
    """The calls of a response, each as a TextCall or as what is wrong with it, for the model to
    read."""
    return [_checked(call) for call in read_response(response).found]


def _checked(call: TextCall | None) -> TextCall | str:
    if call is None:
        return UNREADABLE
    inner: list[Any] = [call.arguments]
    for _ in range(MOST_LEVELS):
        nested = [one.values() if isinstance(one, dict) else one for one in inner]
        inner = [one for values in nested for one in values if isinstance(one, (dict, list))]
    return TOO_DEEP if inner else call


def tool_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates take it. parameters: a JSON schema of an object."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tool_message(text: str) -> Message:
    """The message of a call's result."""
    return {"role": "tool", "content": text}
