"""One value against its annotation: the check of every key of a configuration and every keyword of
a component.

Ranges stand at the annotation: `lr: PositiveFloat`, `share: Annotated[float, Range(0, 1)]`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rlflow.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; `above` and `below` are bounds that are not reached
    themselves."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return (
            _is_finite(value) and self.low <= value <= self.high and self.above < value < self.below
        )

    def __str__(self) -> str:
        bounds = {
            "above": self.above,
            "from": self.low,
            "to": self.high,
            "below": self.below,
        }
        finite = {word: bound for word, bound in bounds.items() if math.isfinite(bound)}
        return " ".join(f"{word} {bound:.12g}" for word, bound in finite.items())


LARGEST = 2**63 - 1
"""Of whole numbers: what arrays, files and other programs can hold."""
UNIONS = (typing.Union, types.UnionType)
PositiveInt = Annotated[int, Range(above=0)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]


PLAIN = (str, bool, int, float, dict, Mapping, type(None))


class Named:
    """Marks a mapping that is a component: a bare name stands for {name: ...}."""


Component = Annotated[dict[str, Any], Named()]
"""A named component and its constructor keywords, e.g. {name: grpo, std: sample}. Its schema is the
constructor's signature."""


def checked(hint: Any, value: Any, where: str) -> Any:
    """The value as the annotated type. int -> float and name -> component are the only conversions;
    a bool is never a number, a number is finite. Annotations other than those of plain data
    (classes, callables, type variables) hold for every value.

    Raises:
        ConfigError: with `where`, what was expected and what was found.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _checked_annotated(hint, value, where)
    if origin in UNIONS:
        return _checked_union(hint, value, where)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        raise _unexpected(hint, value, where)
    kind = origin or hint
    if kind in (list, tuple, Sequence):
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise _unexpected(hint, value, where)
        if not isinstance(value, (list, tuple)):  # an object of one's own, from Python
            return value
        # Entries of different types are not looked into
        item = arguments[0] if len({*arguments} - {...}) == 1 else Any
        items = [checked(item, entry, f"{where}[{index}]") for index, entry in enumerate(value)]
        return tuple(items) if kind is tuple else items
    if hint is float and _is_number(value) and _is_finite(value):
        return float(value)
    if kind in PLAIN and not _holds(kind, value):
        raise _unexpected(hint, value, where)
    return value


def check_annotated(made: Any) -> None:
    """Raises ConfigError for a field of a dataclass that is not as its annotation says."""
    hints = hints_of(type(made))
    for item in dataclasses.fields(made):
        where = f"{type(made).__name__}.{item.name}"
        checked(hints.get(item.name, Any), getattr(made, item.name), where)


def hints_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> annotation of a function or of a class's constructor; Any for what cannot be
    evaluated, such as a name that is imported for type checking only."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    scope = getattr(function, "__globals__", {})
    return {
        name: _evaluated(text, scope)
        for name, text in getattr(function, "__annotations__", {}).items()
    }


@functools.cache
def section_hints(section: type) -> Mapping[str, Any]:
    """Field -> annotation of a section of the configuration."""
    return typing.get_type_hints(section, include_extras=True)


def is_component(hint: Any) -> bool:
    return any(isinstance(item, Named) for item in getattr(hint, "__metadata__", ()))


def section_of(hint: Any) -> type | None:
    """The dataclass of a nested section, also of one that may be null; None for any other
    annotation."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    sections = (kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind))
    return next(sections, None)


def describe(hint: Any) -> str:
    """What an annotation expects, in words."""
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    if hint in names:
        return names[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if is_component(hint):
            return "a name, or a mapping with one ({name: ...})"
        ranges = [str(item) for item in hint.__metadata__ if isinstance(item, Range)]
        return " ".join([describe(arguments[0]), *ranges])
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(describe(kind) for kind in arguments))
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if (origin or hint) in (list, tuple, Sequence):
        return f"a list ([a, b]) of {describe(arguments[0])}" if arguments else "a list"
    if (origin or hint) in (dict, Mapping):
        return "a mapping with keys ({name: ...})"
    return getattr(hint, "__name__", str(hint))


def show(value: Any) -> str:
    """A value as found, with its kind."""
    if value is None:
        return "null (nothing)"
    kinds = {
        str: "text",
        bool: "true/false",
        int: "whole number",
        float: "number",
        dict: "mapping",
        list: "list",
    }
    try:
        text = repr(value) if not isinstance(value, bool) else str(value).lower()
    except RecursionError:
        text = "nested too deeply"
    except ValueError:  # Python writes out no number of thousands of digits
        text = f"a number of {value.bit_length()} bits"
    kind = kinds.get(type(value), type(value).__name__)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def _checked_annotated(hint: Any, value: Any, where: str) -> Any:
    base, *_ = typing.get_args(hint)
    if is_component(hint) and isinstance(value, str):
        return {"name": value}
    ranges = [item for item in hint.__metadata__ if isinstance(item, Range)]
    if _is_number(value) and any(value not in item for item in ranges):
        raise _unexpected(hint, value, where)
    try:
        return checked(base, value, where)
    except ConfigError as problem:
        if not str(problem).startswith(f"{where}:"):
            raise  # of an entry of a list, say: that place is the better one
        raise _unexpected(hint, value, where) from None


def _checked_union(hint: Any, value: Any, where: str) -> Any:
    for kind in typing.get_args(hint):
        try:
            return checked(kind, value, where)
        except ConfigError:
            continue
    raise _unexpected(hint, value, where)


def _unexpected(hint: Any, value: Any, where: str) -> ConfigError:
    choices = typing.get_args(hint)
    words = [
        str(choice)
        for kind in (hint, *choices)
        if typing.get_origin(kind) is Literal
        for choice in typing.get_args(kind)
    ]
    meant = did_you_mean(value, words) if isinstance(value, str) else ""
    expected = describe(hint)
    if isinstance(value, int) and abs(value) > LARGEST:
        expected += f" of at most {LARGEST}"
    elif _is_number(value) and not _is_finite(value):
        expected = re.sub(r"(^| or )a number(?=$| or )", r"\1a finite number", expected)
    return ConfigError(f"{where}: expected {expected}, found {show(value)}.{meant}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    """Also of whole numbers that are too large to become a float, which are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _holds(kind: Any, value: Any) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    return kind is not float and isinstance(value, Mapping if kind is dict else kind)


def _evaluated(annotation: Any, scope: Mapping[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, dict(scope), include_extras=True)["value"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any
