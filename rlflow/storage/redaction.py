"""Secrets that must not be written: whatever stands in a header or in a URL's login or query,
unless its name is known to be harmless, and what stands under a key that is called a secret in one
of its words."""

from __future__ import annotations

import json
import re
from typing import Any

from rlflow.storage.files import leaves, plain

REDACTED = "***"

_HARMLESS_HEADERS = {
    "accept",
    "accept-encoding",
    "accept-language",
    "connection",
    "content-type",
    "user-agent",
}
_HARMLESS_PARAMETERS = {
    "api-version", "format", "k", "lang", "language", "limit", "model", "n", "offset", "page", "q",
    "query", "revision", "split", "timeout", "top", "top_k", "topk", "version",
}  # fmt: skip
_HARMLESS_LOGINS = {"git"}  # ssh://git@host
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = {
    "apikey", "apikeys", "accesskey", "accesskeys", "auth", "authorization", "bearer", "cookie",
    "cookies", "credential", "credentials", "jwt", "passphrase", "passwd", "password", "passwords",
    "pwd", "secret", "secrets", "sig", "signature",
}  # fmt: skip
"""Wherever they stand in a key. `token`, `pass` and `key` only as its last word: a token_budget is
none."""
_NO_TOKEN = {"bos", "cls", "end", "eos", "mask", "pad", "sep", "start", "stop", "unk"}
_NO_KEY = {
    "answer", "any", "cache", "column", "data", "field", "group", "id", "label", "local", "metric",
    "primary", "prompt", "question", "sort", "text", "title",
}  # fmt: skip
"""What stands before `token` and `key` where they are none."""
_LOGIN = re.compile(r"://([^\s/]*)@")
_PARAMETER = re.compile(r"""([?&;])([^=&;#"'<>]*)(=?)([^&;#"'<>)}\]]*)""")
_FRAGMENT = re.compile(r"""(#[^=&;#"'<>]*=)[^&;#"'<>)}\]]+""")
_TOKEN = re.compile(
    r"""\b(?:(authorization["']?\s*[:=]\s*["']?(?:\w+\s+)?)[^\s"',}]{4,}"""
    r"""|(bearer\s+)[\w.~+/=-]{8,})""",
    re.I,
)


def redact(value: Any, key: str = "", hidden: bool = False) -> Any:
    """A copy in which texts and numbers under secret keys and headers, and secrets in URLs, are
    `***`.

    hidden: all that is in the value is a secret, but for headers with harmless names."""
    hidden = (hidden or _is_secret(key)) and key.lower() not in _HARMLESS_HEADERS
    if isinstance(value, dict):
        return {name: redact(item, str(name), hidden) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, key, hidden) for item in value]
    if hidden and value not in (None, "") and not isinstance(value, bool):
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def redacted_keys(values: Any) -> list[str]:
    """The dotted keys of the texts in which `***` stands for a secret, as `redact` left them."""
    filled = json.loads(json.dumps(plain(values)).replace(REDACTED, "redacted"))
    again = dict(leaves(redact(filled)))
    return [
        key
        for key, value in leaves(values)
        if isinstance(value, str) and REDACTED in value and again[key] == value
    ]


def redact_text(text: str) -> str:
    """A text, such as an error or a line of a log, in which logins, parameters and tokens of URLs
    and headers are `***`."""
    if "://" in text:
        text = re.sub(r"\S+", lambda found: _redact_url(found[0]), text)
    return _TOKEN.sub(rf"\1\2{REDACTED}", text)


def _is_secret(key: str) -> bool:
    words = [word.lower() for word in _WORD.findall(key)]
    before, last = ["", "", *words][-2:]
    if {"header", "headers", *_SECRET} & set(words) or last == "pass":
        return True
    if last == "token":
        return before not in _NO_TOKEN
    return last in ("key", "keys") and before != "" and before not in _NO_KEY


def _redact_url(word: str) -> str:
    """A word, with what it holds of secrets where it is a URL."""
    start = word.find("://")
    if start < 0:
        return word
    address = _LOGIN.sub(
        lambda found: found[0] if found[1] in _HARMLESS_LOGINS else f"://{REDACTED}@", word[start:]
    )
    return word[:start] + _FRAGMENT.sub(
        rf"\1{REDACTED}", _PARAMETER.sub(_redact_parameter, address)
    )


def _redact_parameter(found: re.Match[str]) -> str:
    mark, name, equals, value = found.groups()
    if name.lower() in _HARMLESS_PARAMETERS or not (name or value):
        return found[0]
    return f"{mark}{name}={REDACTED}" if equals else f"{mark}{REDACTED}"
