"""Tool calls in a response's text, tools as chat templates take them, and messages that answer."""

from __future__ import annotations

from typing import Any

from rlflow.endpoint.text_calls import TextCall, read_response
from rlflow.types import Message

UNREADABLE = "Error: a tool call is one JSON object with 'name' and 'arguments'."


def read_calls(response: str) -> list[TextCall | str]:
    """The calls of a response, each as a TextCall or as what is wrong with it, for the model to
    read."""
    return [call or UNREADABLE for call in read_response(response).found]


def tool_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates take it. parameters: a JSON schema of an object."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tool_message(text: str) -> Message:
    """The message of a call's result."""
    return {"role": "tool", "content": text}
