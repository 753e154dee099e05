"""Entries of a config.json, checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.errors import ModelError

MOST, MOST_LAYERS, MOST_FLOAT = 2**31 - 1, 2**16, 1e30
"""Above these, an entry is a mistake, and planning with it would take all memory."""


def refused(text: str) -> ModelError:
    """The error for a config.json."""
    return ModelError(f"config.json: {text}")


def whole(
    config: Mapping[str, Any],
    *keys: str,
    default: int | None = None,
    least: int = 1,
    most: int = MOST,
) -> int:
    """The first of these entries that is there. Raises ModelError unless it is a whole number from
    `least` to `most`."""
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    found = default if config.get(key) is None else config[key]
    if not isinstance(found, int) or isinstance(found, bool):
        raise refused(f"'{key}' is missing or not a whole number (found {short(found)}).")
    if not least <= found <= most:
        raise refused(f"'{key}' is {short(found)}; expected a number from {least} to {most}.")
    return found


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Raises ModelError unless the entry is a finite number above 0."""
    found = default if config.get(key) is None else config[key]
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise refused(f"'{key}' is {short(found)}; expected a number above 0.")
    if not 0 < found < MOST_FLOAT:
        raise refused(f"'{key}' is {short(found)}; expected a number above 0.")
    return float(found)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Raises ModelError unless the entry is true, false or not there."""
    found = config.get(key)
    if found is not None and not isinstance(found, bool):
        raise refused(f"'{key}' is {short(found)}; expected true or false.")
    return bool(found)


def short(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, int) and abs(value) > MOST_FLOAT:
        return "a number of more than 30 digits"
    return repr(value)[:60]


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entry for rotary embeddings, in the spelling of transformers 5 or 4. Raises ModelError
    unless it is an object."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise refused(f"'rope_parameters' is {short(found)}; expected an object or null.")
    return found


def rope_kind(rope: Mapping[str, Any]) -> str:
    """How rotary embeddings are scaled: `default`, `linear`, `llama3`, `yarn`, ..."""
    return str(rope.get("rope_type") or rope.get("type") or "default")
