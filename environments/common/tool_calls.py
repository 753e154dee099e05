"""Tool calls in a response's text, in the forms of chat templates, and the messages that answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rlflow.types import Message
from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.text import load_json

UNREADABLE = "Error: a tool call is one JSON object with 'name' and 'arguments'."


@dataclass(frozen=True)
class TextCall:
    """A use of a tool, as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


def read_calls(response: str) -> list[TextCall | str]:
    """The calls of a response, each as a TextCall or as what is wrong with it, for the model to
    read: `<tool_call>` blocks (Qwen, Hermes), or a response that is one JSON object (Llama)."""
    return [_call(block) for block in blocks("tool_call", response) or _bare_call(response)]


def tool_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates take it. parameters: a JSON schema of an object."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def tool_message(text: str) -> Message:
    """The message of a call's result."""
    return {"role": "tool", "content": text}


def _call(block: str) -> TextCall | str:
    try:
        call = load_json(block.encode(errors="replace"))
        # Llama 3.1 writes "parameters"
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # as OpenAI's clients have them
            arguments = json.loads(arguments)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ):  # the last: a thousand brackets
        return UNREADABLE
    if not isinstance(name, str):
        return UNREADABLE
    return TextCall(name, arguments if isinstance(arguments, dict) else {})


def _bare_call(response: str) -> list[str]:
    """The response if it is one JSON object that names a function, as Llama writes calls."""
    text = response.strip()
    return [text] if text.startswith("{") and text.endswith("}") and '"name"' in text else []
