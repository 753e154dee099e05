"""Arguments that a form writes as text, as values of the types that the tool's schema names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.models.calls.form import Tools, load_json

_SPELLED = {"True": True, "False": False, "None": None}
"""As Python writes what JSON writes otherwise; some templates do."""


def typed_arguments(name: str, texts: Mapping[str, str], tools: Tools) -> dict[str, Any]:
    """The arguments of a call of the tool. One that the schema says nothing of is what it reads
    like: JSON, else text."""
    properties = _properties(name, tools)
    return {key: _typed(text, properties.get(key)) for key, text in texts.items()}


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    bare = text.strip()
    try:
        value = _SPELLED[bare] if bare in _SPELLED else load_json(bare)
    except (ValueError, RecursionError):
        return text  # the tool says what it expects
    # Of two kinds one of which is text, text is what fits no other
    return text if "string" in kinds and _kind(value) not in kinds else value


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return _with_integers({named})
    if isinstance(named, list):
        return _with_integers({one for one in named if isinstance(one, str)})
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if isinstance(schema[key], list) else [schema[key]]
            return {_kind(value) for value in values}
    choices: Any = next((schema[key] for key in ("anyOf", "oneOf") if key in schema), [])
    if not isinstance(choices, list):
        return set()
    kinds = [_choice_kinds(choice) for choice in choices if isinstance(choice, Mapping)]
    return set().union(*kinds) if all(kinds) else set()


def _choice_kinds(schema: Mapping[str, Any]) -> set[str]:
    """As `_kinds`, of a choice that holds no choices: schemas of others may nest without end."""
    return _kinds({key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")})


def _with_integers(kinds: set[str]) -> set[str]:
    return kinds | {"integer"} if "number" in kinds else kinds


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")
