"""Text from outside as text that UTF-8 can hold."""

from __future__ import annotations

import json
from typing import Any


def well_formed(text: str) -> str:
    """The text with U+FFFD in place of every lone surrogate: half of an emoji, where JSON was cut
    or written by hand."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def load_json(data: bytes, encoding: str = "utf-8") -> Any:
    """The JSON value of UTF-8, its texts well-formed. Raises ValueError, and RecursionError where
    it is nested too deeply."""
    text = data.decode(encoding)
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        # Only an escape can be half a pair; written out and read again, every text and key is
        # looked at.
        value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    return value
