"""What a form of tool calls is, and JSON as calls hold it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ARGUMENTS = ("arguments", "parameters")  # the latter: Llama 3.1
MOST_QUOTED = 32
_DECODER = json.JSONDecoder()

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, as chat templates take them."""


@dataclass(frozen=True)
class TextCall:
    """A use of a tool, as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


class CallsRead(NamedTuple):
    """stop: where the calls end in the text. found: the calls, None for one that cannot be read.
    unclosed: the last one does not end."""

    stop: int
    found: tuple[TextCall | None, ...]
    unclosed: bool = False


@dataclass(frozen=True)
class CallForm:
    """How the models of some families write calls of tools.

    shape: what a call looks like, for the policy to read. marks: texts by which a chat template is
    known to be of the form. opening: regular expression of what calls begin with; sure: the same
    where no template says which form it is ("": `opening`). read(text, place, tools): the calls
    that begin right behind an opening; it takes time linear in what it reads, and never goes
    back. whole(text, known): reads a response that is calls from its first character to the last;
    None for one that is an answer; known: whether the template is of the form. tokens: control
    tokens of the form, which the text of a response keeps."""

    name: str
    shape: str
    marks: tuple[str, ...]
    opening: str = ""
    sure: str = ""
    read: Callable[[str, int, Tools], CallsRead] | None = None
    whole: Callable[[str, bool], Sequence[TextCall | None] | None] | None = None
    tokens: tuple[str, ...] = ()


def load_json(text: str) -> Any:
    """The JSON value, as others can be sent it: no half of a surrogate pair, no NaN. Raises
    ValueError, RecursionError."""
    return _sendable(json.loads(text))


def decode_json(text: str, start: int, closing: str = "") -> tuple[Any, int]:
    """The JSON value at a place of the text, and where it ends. Raises ValueError,
    RecursionError.

    closing: what stands behind the value, which may quote it MOST_QUOTED times. An error of the
    decoder counts the lines in front of it, so that many broken values would each cost the whole
    text; they are decoded from pieces."""
    if not closing:
        value, stop = _DECODER.raw_decode(text, start)
        return _sendable(value), stop
    for piece in _pieces(text, start, closing):
        try:
            value, length = _DECODER.raw_decode(piece)
            return _sendable(value), start + length
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Unterminated string"):  # no longer piece helps
                raise
    raise ValueError("a string that does not end")


def _pieces(text: str, start: int, closing: str) -> Iterator[str]:
    """The text from a place to the first of what closes it, to the third, the seventh, ..."""
    stop = start
    more = 1
    while more <= MOST_QUOTED:
        for _ in range(more):
            place = text.find(closing, stop)
            if place < 0:
                yield text[start:]
                return
            stop = place + len(closing)
        yield text[start:place]
        more *= 2


def _sendable(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def call_of(value: Any) -> TextCall | None:
    """The call that an object with a name and arguments is; None where it is none. Without
    arguments they are {}."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    if isinstance(arguments, str):  # as OpenAI's clients have them
        try:
            arguments = load_json(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict | None):
        return None
    return TextCall(value["name"], arguments or {})


def skip_blanks(text: str, place: int) -> int:
    """The place of the first character from there on that is no blank."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def broken_through(text: str, place: int, closing: str) -> CallsRead:
    """A call that cannot be read, through what closes it; unclosed where nothing does."""
    closed = text.find(closing, place)
    if closed < 0:
        return CallsRead(len(text), (), unclosed=True)
    return CallsRead(closed + len(closing), (None,))
