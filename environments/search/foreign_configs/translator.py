"""Configurations of other systems, translated key by key after the tables beside this file.

A table is a YAML file with these entries. In their keys a `*` stands for the rest of one part; as a
last part of its own, for all that follow.

    system      name of the other system
    known_by    keys that each of its files has
    beside      further files that it reads, where they lie beside the first
    evaluates   {their key: value} of a file that evaluates instead of training
    evaluating  what `taken` has instead in such a file
    variants    list of kinds of files: {when: {their key: value}, ...}, where ... are entries of a
                table, laid over its own; a file that fits none of them is refused
    preset      algorithm under everything else
    sets        {our key: value} that holds whatever the file says
    taken       {their key: our key, or several, or {to: our key or keys, ...}}, where ... may be
                values: {theirs: ours}; others: true, values that it does not list as they are;
                times, over: their key with which to multiply, or by which to divide;
                list: true, values of several keys as one list; also: {our key: value}
    always      {their key: the one value that holds here}
    none        {reason: their keys without a counterpart}
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.config.foreign import OUTCOMES, ForeignFile, ReadKey, Translation
from rlflow.config.loading import to_dict
from rlflow.config.schema import load_config
from rlflow.config.yaml_text import read_yaml
from rlflow.errors import ConfigError

TABLES = sorted(Path(__file__).parent.glob("*.yaml"))
MOST_KEYS = 10_000
MOST_CHARACTERS = 10_000  # of a value: references to references could double it at each level
DEEPEST = 20  # references inside of references, sections inside of sections

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_ARITHMETIC = {
    "subtract": operator.sub,
    "multiply": operator.mul,
    "int_div": operator.floordiv,
}
"""Functions of whole numbers that such files use, as `${name:number,number}`."""


class _UnresolvedError(Exception):
    """A reference to something that the file does not have."""


def read_by_tables(path: Path) -> ForeignFile | None:
    """The file of a system that a table describes; None for any other."""
    try:
        keys = _flat(read_yaml(path))
    except ConfigError:
        return None  # load_config says why
    for table in map(read_yaml, TABLES):
        if all(any(_fits(known, key) for key in keys) for known in table["known_by"]):
            return ForeignFile(table["system"], functools.partial(translate, path, table))
    return None


def translate(path: Path, table: Mapping[str, Any], overrides: Sequence[str]) -> Translation:
    """Our configuration from a file of the table's system, under our overrides.

    Raises ConfigError where a value does not fit here.
    """
    keys: dict[str, Any] = {}
    for name in (path.name, *table.get("beside", ())):
        if (path.parent / name).is_file():
            keys.update(_flat(read_yaml(path.parent / name)))
    table = _variant(path, table, keys)
    evaluates = any(keys.get(key) == value for key, value in table.get("evaluates", {}).items())
    if evaluates:
        table = {**table, "taken": {**table["taken"], **table["evaluating"]}}
    work = _Translator(table, keys)
    # A later rule of the table wins, wherever its key stands in the file
    for key in sorted(keys, key=work.place):
        work.read(key)
    places = {key: place for place, key in enumerate(keys)}
    for outcome in work.outcomes.values():
        outcome.sort(key=lambda key: places[key.name])
    chosen = [f"{key}={json.dumps(value)}" for key, value in work.chosen.items()]
    try:
        taken = to_dict(load_config(None, chosen, table.get("preset")))
    except ConfigError as problem:
        raise ConfigError(f"{path}, read as {table['system']}'s: {problem}") from None
    # Another engine drops what they say of theirs
    config = load_config(taken, overrides)
    return Translation(table["system"], config, evaluates, work.outcomes)


def _variant(path: Path, table: Mapping[str, Any], keys: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table for files of this kind. Raises ConfigError for a kind without a counterpart."""
    variants = table.get("variants")
    if not variants:
        return table
    for variant in variants:
        if all(keys.get(key) == value for key, value in variant["when"].items()):
            merged = dict(table)
            for name, entry in variant.items():
                below = table.get(name)
                merged[name] = {**below, **entry} if isinstance(below, dict) else entry
            return merged
    asked = dict.fromkeys(key for variant in variants for key in variant["when"])
    here = ", ".join(f"{key}: {_show(keys[key])}" for key in asked if key in keys) or "none of them"
    known = "; or ".join(
        " with ".join(f"{key}: {_show(value)}" for key, value in variant["when"].items())
        for variant in variants
    )
    raise ConfigError(
        f"{path}, read as {table['system']}'s: it trains a task that has no counterpart here: "
        f"expected {known}, found {here}. Write a configuration of your own; `rlflow config` lists "
        "the keys."
    )


@dataclass
class _Translator:
    table: Mapping[str, Any]
    keys: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.chosen: dict[str, Any] = dict(self.table.get("sets", {}))
        self.resolved: dict[str, Any] = {}
        self.outcomes: dict[str, list[ReadKey]] = {outcome: [] for outcome in OUTCOMES}
        reasons = self.table.get("none", {}).items()
        self.rules: dict[str, Mapping[str, Any]] = {
            "taken": self.table.get("taken", {}),
            "always": self.table.get("always", {}),
            "none": {key: reason for reason, keys in reasons for key in keys},
        }

    def read(self, key: str) -> None:
        """Finds the rule of a key and does what it says."""
        kind, rule = self._rule(key)
        value = self.keys[key]
        if kind in ("", "none"):
            return self._tell("no counterpart" if kind else "not known", key, value, rule)
        try:
            value = self.resolve(value)
        except _UnresolvedError as missing:
            return self._tell("not known", key, value, f"refers to {missing}")
        if kind == "taken":
            return self._take(key, value, rule if isinstance(rule, dict) else {"to": rule})
        if value == rule:
            return self._tell("taken", key, value, "always so here")
        return self._tell("no counterpart", key, value, f"always {_show(rule)} here")

    def place(self, key: str) -> int:
        """The place of the key's rule among those that take something; -1 for another one."""
        rules = self.rules["taken"]
        pattern = key if key in rules else next((one for one in rules if _fits(one, key)), None)
        return -1 if pattern is None else list(rules).index(pattern)

    def _take(self, key: str, value: Any, rule: Mapping[str, Any]) -> None:
        targets = rule["to"] if isinstance(rule["to"], list) else [rule["to"]]
        if value is None:
            return self._tell("no counterpart", key, value, f"unset, so {targets[0]} is what it is")
        try:
            ours = self._ours(value, rule, targets[0])
        except (ConfigError, _UnresolvedError) as problem:
            return self._tell("no counterpart", key, value, str(problem))
        told = []
        for target in targets:
            before = self.chosen.get(target, ours)
            instead = f", in place of {_show(before)}" if before != ours else ""
            self.chosen[target] = ours
            if rule.get("list"):
                others = before if isinstance(before, list) else []
                self.chosen[target], instead = [*others, ours], ""
            told.append(f"{target}: {_show(ours)}{instead}")
        self.chosen.update(rule.get("also", {}))
        same = ours == value and all(_last(target) == _last(key) for target in targets)
        return self._tell(OUTCOMES[0 if same else 1], key, value, "; ".join(told))

    def _ours(self, value: Any, rule: Mapping[str, Any], target: str) -> Any:
        """The value as it is said here. Raises ConfigError where it cannot be said."""
        known = rule.get("values", {})
        for theirs, ours in known.items():
            if theirs == value:
                return ours
        if known and not rule.get("others"):
            held = target in self.chosen
            here = f" and it is {_show(self.chosen[target])}" if held else ""
            listed = " and ".join(map(_show, known))
            raise ConfigError(f"only {listed} are known for {target}{here}")
        for name, function in (("times", operator.mul), ("over", operator.truediv)):
            if name in rule:
                found = [key for key in self.keys if _fits(rule[name], key)]
                other = self.resolve(self.keys[found[0]]) if found else None
                if not _is_number(value) or not _is_number(other) or other == 0:
                    raise ConfigError(f"{target} takes numbers, of this key and of {rule[name]}")
                return int(function(value, other))
        return value

    def _rule(self, key: str) -> tuple[str, Any]:
        for kind, rules in self.rules.items():
            if key in rules:
                return kind, rules[key]
        for kind, rules in self.rules.items():
            for pattern, rule in rules.items():
                if _fits(pattern, key):
                    return kind, rule
        return "", ""

    def _tell(self, outcome: str, key: str, value: Any, told: str) -> None:
        self.outcomes[outcome].append(ReadKey(key, value, told))

    def resolve(self, value: Any, depth: int = 0) -> Any:
        """The value with what its `${...}` stand for. Raises _UnresolvedError."""
        if isinstance(value, list):
            return [self.resolve(item, depth) for item in value]
        for _ in range(DEEPEST):
            if not isinstance(value, str) or ("${" not in value and len(value) <= MOST_CHARACTERS):
                return value
            if depth > DEEPEST or len(value) > MOST_CHARACTERS:
                break
            whole = _REFERENCE.fullmatch(value)
            if whole:
                value = self._referred(whole[1], depth)
            else:
                value = _REFERENCE.sub(lambda found: str(self._referred(found[1], depth)), value)
        raise _UnresolvedError("itself, or to too much")

    def _referred(self, expression: str, depth: int) -> Any:
        if expression in self.resolved:
            return self.resolved[expression]
        name, call, arguments = expression.partition(":")
        try:
            if call:
                value = _ARITHMETIC[name](*map(int, arguments.split(",")))
            else:
                value = self.resolve(self.keys[name], depth + 1)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise _UnresolvedError(f"${{{expression}}}") from None
        # Lists of lists of references would grow without end
        if isinstance(value, list):
            raise _UnresolvedError(f"${{{expression}}}, a list")
        self.resolved[expression] = value
        return value


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value} of nested mappings; a list of plain values is a value.

    Raises ConfigError: more or deeper keys than any configuration has.
    """
    found: dict[str, Any] = {}
    for key, value in _leaves(content, ()):
        found[key] = value
        if len(found) > MOST_KEYS:
            raise ConfigError(f"expected at most {MOST_KEYS:,} keys, found more.")
    return found


def _leaves(content: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if len(above) > DEEPEST:
        raise ConfigError(f"{'.'.join(above)}: nested too deeply.")
    nested = isinstance(content, list) and any(isinstance(item, (dict, list)) for item in content)
    items = dict(enumerate(content)) if nested else content
    if isinstance(items, dict) and items:
        for key, value in items.items():
            yield from _leaves(value, (*above, str(key)))
    elif above:
        yield ".".join(above), content


def _fits(pattern: str, key: str) -> bool:
    """Whether a key is one of those that a pattern stands for."""
    wanted, parts = pattern.split("."), key.split(".")
    if wanted[-1] == "*" and len(parts) >= len(wanted):
        wanted, parts = wanted[:-1], parts[: len(wanted) - 1]
    return len(wanted) == len(parts) and all(
        part.startswith(word[:-1]) if word.endswith("*") else part == word
        for word, part in zip(wanted, parts, strict=True)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
