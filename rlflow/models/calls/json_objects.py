"""Llama 3: a response that is one JSON object, or several with `;` between them."""

from __future__ import annotations

from rlflow.models.calls.form import (
    ARGUMENTS,
    CallForm,
    CallsRead,
    TextCall,
    Tools,
    call_of,
    decode_json,
    load_json,
    skip_blanks,
)

SEPARATOR = ";"


def read(text: str, place: int, tools: Tools) -> CallsRead:
    """The objects behind <|python_tag|>, to the end of the response."""
    found: list[TextCall | None] = []
    while (place := skip_blanks(text, place)) < len(text):
        try:
            value, place = decode_json(text, place)
        except (ValueError, RecursionError):
            return CallsRead(len(text), (*found, None))
        found.append(call_of(value))
        place = skip_blanks(text, place)
        if text.startswith(SEPARATOR, place):
            place += 1
    return CallsRead(len(text), tuple(found))


def read_whole(response: str, known: bool) -> list[TextCall | None] | None:
    """The calls of a response without a mark. An object that holds a name among others of its own
    is an answer, and no call."""
    if not (response.startswith("{") and response.endswith("}") and '"name"' in response):
        return None
    found = read(response, 0, ()).found
    if len(found) == 1 and _is_answer(response):
        return None
    return list(found)


def _is_answer(response: str) -> bool:
    try:
        value = load_json(response)
    except (ValueError, RecursionError):
        return False
    return len(value) > 1 and not any(key in value for key in ARGUMENTS)


FORM = CallForm(
    name="json objects",
    shape='the response alone, one JSON object {"name": NAME, "parameters": {...}}',
    marks=("<|python_tag|>", '"parameters": '),
    opening=r"<\|python_tag\|>",
    read=read,
    whole=read_whole,
    tokens=("<|python_tag|>",),
)
