"""Llama 3.2 and 4, where the template says so: a response that is a list of Python's calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rlflow.models.calls.form import CallForm, TextCall, load_json

_BEGIN = re.compile(r"\[\s*[A-Za-z_][\w.]{0,255}\(")
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')"""
    r"|(?P<number>-?\d[\d.eE+-]{0,400})"
    r"|(?P<called>[A-Za-z_][\w.]{0,255})\(|(?P<key>[A-Za-z_]\w{0,255})\s*="
    r"|(?P<word>True|False|None|true|false|null)\b|(?P<sign>[\[\]{}(),:]))",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def read_whole(response: str, known: bool) -> Sequence[TextCall | None] | None:
    """The calls of a response that is nothing else. Nothing is evaluated: the calls are rewritten
    to JSON, which is read. Without a template that says so, a list that cannot be read is an
    answer."""
    if not (_BEGIN.match(response) and response.endswith("]")):
        return None
    try:
        calls = load_json(_as_json(response))
    except (ValueError, RecursionError):
        return [None] if known else None
    return [TextCall(call["//"], call[""]) if _is_call(call) else None for call in calls]


def _is_call(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"//", ""}
        and isinstance(value["//"], str)
        and isinstance(value[""], dict)
    )


def _as_json(source: str) -> str:
    """JSON in which a call is an object of two keys that no name of Python is. Raises ValueError
    for what is no list of calls of literals."""
    written: list[str] = []
    open_calls: list[bool] = []  # of each bracket that is open: whether it is a call's
    place = 0
    while place < len(source):
        token = _TOKEN.match(source, place)
        if token is None:
            raise ValueError(f"no Python literal at {place}")
        place = token.end()
        kind, text = token.lastgroup, token[0].strip()
        if kind == "text":
            written.append(json.dumps(_unescaped(text[1:-1])))
        elif kind == "called":
            if open_calls != [False]:
                raise ValueError(f"a call among arguments at {place}")
            open_calls.append(True)
            written.append(f'{{"//":"{token["called"]}","":{{')
        elif kind == "key":
            if not (open_calls and open_calls[-1]):
                raise ValueError(f"a keyword outside of a call at {place}")
            written.append(f'"{token["key"]}":')
        elif kind == "sign":
            written.append(_bracket(text, open_calls))
        else:
            written.append(_WORDS.get(text, text))
    return "".join(written)


def _bracket(sign: str, open_calls: list[bool]) -> str:
    if sign in "[{":
        open_calls.append(False)
    elif sign in "]})":
        of_call = open_calls.pop() if open_calls else False
        if of_call != (sign == ")"):
            raise ValueError("brackets do not match")
        return "}}" if of_call else sign
    elif sign == "(":
        raise ValueError("no call, and no literal of JSON")
    return sign


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1] or match[2]
        return chr(int(code, 16)) if code else _ESCAPED.get(match[3], _kept(match[3]))

    return _ESCAPE.sub(character, text)


def _kept(character: str) -> str:
    """As Python has it: a backslash in front of what it does not escape stays."""
    return character if character in "\\'\"" else f"\\{character}"


FORM = CallForm(
    name="pythonic",
    shape="the response alone, [NAME(KEY=VALUE, ...)]",
    marks=("func_name1(",),
    whole=read_whole,
)
