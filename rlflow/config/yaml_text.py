"""YAML text as plain values: scalars of YAML 1.2, no key twice, errors with their place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rlflow.errors import ConfigError, did_you_mean
from rlflow.values import show


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (1e-6 is a number, `yes` is text), and no key twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            twice = isinstance(key, yaml.ScalarNode) and key.value in seen
            if twice and key.value != "<<":
                raise _fault(f"key '{key.value}' stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _PlainLoader(_Loader):
    """Refuses aliases, by which a few lines can stand for billions; runs write none."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _fault("an alias (*name)", self.peek_event().start_mark)
        return super().compose_node(parent, index)


def _fault(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_FLOAT = (
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _whole = re.compile(rf"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, _first)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """In decimal, also with a leading 0, which meant octal in YAML 1.1."""
    return int(loader.construct_scalar(node).replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def read_yaml(path: Path, aliases: bool = True) -> dict[str, Any]:
    """The sections of one YAML file without its `base`. aliases: allowed. Raises ConfigError."""
    try:
        content = parsed(path.read_text(encoding="utf-8"), _Loader if aliases else _PlainLoader)
    except FileNotFoundError:
        beside = sorted(other.name for other in path.parent.glob("*.yaml"))
        found = f" {path.parent} holds: {', '.join(beside)}." if beside else ""
        hint = did_you_mean(path.name, beside)
        raise ConfigError(f"{path}: no such configuration file.{hint}{found}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text file: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {problem_of(error)}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected sections such as 'trainer:', found {show(content)}.")
    return content


def parsed(text: str, loader: type[_Loader] = _Loader) -> Any:
    """The value of a YAML text. Raises YAMLError, also where Python cannot hold what is written."""
    try:
        return yaml.load(text, Loader=loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise yaml.YAMLError(str(error)) from None
    except (LookupError, AttributeError):  # `!!bool x`, `!!float ""`, `!!timestamp x`
        raise yaml.YAMLError("a value that does not fit its tag (!!...)") from None


def problem_of(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).replace("\n", " ")
