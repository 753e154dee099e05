"""Recognises in a request the conversation that it goes on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlflow_environments.endpoint.requests import ModelRequest


@dataclass(frozen=True)
class Continuation:
    """after: the turn after whose response `messages` stand; -1 where the conversation is another
    one, which `messages` are all of. place: names the conversation, `messages` included."""

    after: int
    messages: list[dict[str, Any]]
    place: bytes


class SaidHistory:
    """The conversations of an episode, as a tree of its turns.

    A conversation is named by a chain of digests over its tools, its template's options and its
    messages, so that a request is recognised in time that is linear in its length."""

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}
        self._said: dict[bytes, str] = {}

    def find(self, request: ModelRequest) -> Continuation:
        """The longest conversation so far that the request's begins with; the assistant's messages
        in the rest read as they were said, where they were said here."""
        options = request.template_options
        place = _digest(b"", [request.tools, options] if options else request.tools)
        after, start = -1, 0
        for number, message in enumerate(request.messages, start=1):
            place = _digest(place, _own(message))
            if number < len(request.messages) and place in self._turns:
                after, start = self._turns[place], number
        return Continuation(after, [self._as_said(one) for one in request.messages[start:]], place)

    def record(self, place: bytes, turn: int, said: str, forms: Iterable[dict[str, Any]]) -> None:
        """Takes the response of a turn. forms: messages that an agent may make of it."""
        for form in forms:
            own = _own(form)
            self._turns[_digest(place, own)] = turn
            self._said[_digest(b"", own)] = said

    def _as_said(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] != "assistant":
            return message
        said = self._said.get(_digest(b"", _own(message)))
        return message if said is None else {"role": "assistant", "content": said}


def _own(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it is compared: blanks around what the assistant said count for nothing."""
    if message["role"] != "assistant":
        return message
    return {**message, "content": message["content"].strip()}


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
