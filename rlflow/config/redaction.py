"""Secrets that must not be written: known by the key that they stand under, or by their place in a URL or a header."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "***"

_SECRET_WORDS = (
    r"token|passwords?|passwd|pwd|passphrase|secrets?|credentials?|authorization|cookies?|bearer|jwt|(?:api|access)keys?"
)
_SECRET = re.compile(rf"(?:(?:^|_|-)(?:{_SECRET_WORDS})|\w[_-]keys?)$", re.I)
_NOT_SECRET = re.compile(
    r"(^|_)((eos|bos|pad|unk|sep|mask|stop|start|end|cls)_token"
    r"|(question|answer|text|title|id|sort|group|prompt|data|primary|cache|label|column|field|metric|local|any)_keys?)$",
    re.I,
)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s]*@")
_URL_USER = re.compile(r"(https?://)(?![^/\s@]*:)[^/\s@]+@", re.I)
_URL_PARAMETER = re.compile(rf"([?&](?:[\w-]+[_-])?(?:keys?|{_SECRET_WORDS})=)[^&#\s]+", re.I)
_HEADER = re.compile(r"\b(Bearer\s+)[\w.~+/=-]{8,}", re.I)


def redact(value: Any, key: str = "") -> Any:
    """A copy in which texts under secret-looking keys (api_key, ..._token, password, cookie) and secrets in URLs are `***`."""
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(item, key) for item in value]
    if isinstance(value, str):
        if value and _SECRET.search(key) and not _NOT_SECRET.search(key):
            return REDACTED
        return redact_text(value)
    return value


def redact_text(text: str) -> str:
    """A text, such as an error or a line of a log, in which passwords and tokens of URLs and headers are `***`."""
    text = _URL_USER.sub(rf"\1{REDACTED}@", _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text))
    return _HEADER.sub(rf"\1{REDACTED}", _URL_PARAMETER.sub(rf"\1{REDACTED}", text))
