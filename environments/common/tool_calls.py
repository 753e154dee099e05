"""Tool calls in a response's text, tools as chat templates take them, and messages that answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.models.calls.form import TextCall
from rlflow.models.calls.reader import CallReader, ReadResponse
from rlflow.types import Episode, Message

MOST_LEVELS = 64
"""Of nested arguments; what carries them on to a tool refuses deeper ones (pydantic from 255)."""
TOO_DEEP = f"Error: the arguments are nested deeper than {MOST_LEVELS} levels."


def read_calls(
    response: str, reader: CallReader | None = None, tools: Sequence[Mapping[str, Any]] = ()
) -> list[TextCall | str]:
    """The calls of a response, each as a TextCall or as what is wrong with it, for the model to
    read. reader: see `reader_of`; None: calls of any form. tools: those that can be called."""
    read = (reader or CallReader()).read(response, tools)
    calls = [_checked(call, read.shape) for call in read.found]
    if read.unclosed:
        calls.append(f"Error: a tool call does not end; it is {read.shape}.")
    return calls


def reader_of(episode: Episode) -> CallReader:
    """What reads calls as the chat template of the episode's model writes them; of a response that
    no model gave, calls of any form."""
    reader: CallReader | None = getattr(episode.sampled, "calls", None)
    return reader or CallReader()


def unreadable(shape: str) -> str:
    """What is wrong with a call of no such shape."""
    return f"Error: a tool call is {shape}."


def _checked(call: TextCall | None, shape: str) -> TextCall | str:
    if call is None:
        return unreadable(shape)
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


__all__ = [
    "CallReader",
    "ReadResponse",
    "TextCall",
    "read_calls",
    "reader_of",
    "tool_message",
    "tool_schema",
    "unreadable",
]
