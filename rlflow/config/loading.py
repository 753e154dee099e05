"""Configuration dataclasses from YAML files and dotted overrides, and back to redacted YAML."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rlflow.config.keys import described_keys, elsewhere
from rlflow.config.yaml_text import parsed, problem_of, read_yaml
from rlflow.errors import ConfigError, closest, did_you_mean
from rlflow.storage.files import write_text
from rlflow.storage.redaction import redact
from rlflow.values import checked, is_component, section_hints, section_of, show

T = TypeVar("T")
COMMAND_LINE = "command line"
PRESETS = Path(__file__).parents[1] / "algorithms" / "presets"
PRESET = "preset:"
"""Before a preset's name, where a file is expected."""
WHOLE = ("algorithm",)
"""Sections that a preset replaces: which losses run must not depend on what stood there before."""


def load_config(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    schema: type[T],
    preset: str | None = None,
) -> T:
    """The configuration from a YAML file (or its content) and overrides, over the defaults.

    preset: a file of `algorithms/presets` by name, laid over the file and under the overrides;
    `base: preset:NAME` lays it under. `base: other.yaml` in a file is read first, relative to that
    file. A component that gets another `name` is replaced, else its keywords are merged. overrides:
    `section.key=value`, values in YAML; keys reach into components and lists
    (`algorithm.losses.0.clip_low=0.1`).

    Raises:
        ConfigError: file missing or not YAML, key unknown, value of the wrong type.
    """
    draft = _drafted(path, overrides, schema, preset)
    return typing.cast(T, draft.build(schema, draft.raw, ()))


def keys_set(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    schema: type,
    preset: str | None = None,
) -> set[str]:
    """The dotted keys, sections among them, that file, preset or overrides of `load_config` set.
    Raises ConfigError for a file that is missing or not YAML."""
    return set(_drafted(path, overrides, schema, preset).origins)


def _drafted(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    schema: type,
    preset: str | None,
) -> _Draft:
    """Files, preset and overrides over the schema's defaults."""
    draft = _Draft(schema, to_dict(schema()))
    files: list[tuple[str, Mapping[str, Any]]] = []
    if isinstance(path, Mapping):
        files.append(("configuration", path))
    elif path is not None:
        files += _read_files(Path(path), ())
    if preset is not None:
        files += _read_files(preset_path(preset, "--preset"), ())
    for source, content in files:
        if Path(source).parent == PRESETS:
            defaults = to_dict(schema())
            draft.raw |= {name: defaults[name] for name in WHOLE if name in content}
        draft.merge(draft.raw, content, source, ())
    # Names first: `environment.size=5 environment=mine` must mean the same in either order.
    for override in sorted(overrides, key=lambda text: not draft.chooses(text)):
        draft.override(override)
    return draft


def presets() -> dict[str, str]:
    """Every preset's name with the comment that its file begins with."""
    found = {}
    for path in sorted(PRESETS.glob("*.yaml")):
        written = path.read_text(encoding="utf-8").splitlines()
        lines = itertools.takewhile(lambda line: line.startswith("#"), written)
        found[path.stem] = " ".join(line.lstrip("# ") for line in lines)
    return found


def preset_path(name: str, where: str) -> Path:
    """The file of a preset. Raises ConfigError for an unknown name."""
    known = presets()
    if name not in known:
        raise ConfigError(
            f"{where}: unknown preset '{name}'.{did_you_mean(name, known)} Known: "
            f"{', '.join(known)}."
        )
    return PRESETS / f"{name}.yaml"


def read_assignment(text: str, form: str = "KEY=VALUE") -> tuple[str, Any]:
    """The key and the YAML value of `KEY=VALUE`. Raises ConfigError, which names the `form`."""
    key, equals, written = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{COMMAND_LINE}: expected {form}, found '{text}'.")
    try:
        return key.strip(), parsed(written)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{COMMAND_LINE}: {key}: '{written[:200]}' is not a YAML value: {problem_of(error)}."
        ) from None


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as plain nested dicts and lists (copies)."""
    return dataclasses.asdict(config)


def save_config(config: Any, path: str | Path) -> None:
    """Writes the resolved configuration as YAML, for this user alone; secrets are `***`."""
    write_text(path, config_text(config), private=True)


def config_text(config: Any) -> str:
    """The resolved configuration as YAML text, secrets replaced by `***`."""
    values = redact(config if isinstance(config, dict) else to_dict(config))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def differences(config: Any) -> dict[str, Any]:
    """The sections of a configuration with the keys whose values are not the schema's defaults."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, default = getattr(config, item.name), getattr(type(config)(), item.name)
        if value != default:
            found[item.name] = differences(value) if dataclasses.is_dataclass(value) else value
    return found


def config_keys(schema: type) -> list[str]:
    """Every dotted key of a schema, in its order; a component counts as one key."""
    return [key.name for key in described_keys(schema)]


def _read_files(path: Path, chain: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, content) of the file and the files it is based on, the deepest base first."""
    if path.resolve() in chain:
        links = " -> ".join(map(str, chain))
        raise ConfigError(f"{path}: 'base' leads back to this file: {links}.")
    content = read_yaml(path)
    base = content.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base: expected a file name (text), found {show(base)}.")
        below = path.parent / base
        if base.startswith(PRESET):
            below = preset_path(base.removeprefix(PRESET), f"{path}: base")
        yield from _read_files(below, (*chain, path.resolve()))
    yield str(path), content


class _Draft:
    """Raw values while files and overrides are laid over each other, and each key's origin."""

    def __init__(self, schema: type, raw: dict[str, Any]) -> None:
        self.schema = schema
        self.raw = raw
        self.origins: dict[str, str] = {}
        self.sections = set(_sections(schema, ()))
        hints = {path: hint for hint, path in _component_hints(schema, ())}
        self.components = set(hints)
        self.lists = {path for path, hint in hints.items() if not is_component(hint)}

    def merge(
        self,
        into: dict[str, Any],
        new: Mapping[str, Any],
        source: str,
        path: tuple[str, ...],
    ) -> None:
        """Merges mappings in place; a component with another `name` starts from nothing."""
        name = new.get("name", into.get("name"))
        if path not in self.sections and name != into.get("name", name):
            into.clear()
        for key, value in new.items():
            here = (*path, str(key))
            value = self.named(here, value)
            self.origins[".".join(here)] = source
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self.merge(into[key], value, source, here)
            else:
                into[key] = value

    def named(self, path: tuple[str, ...], value: Any) -> Any:
        """The value, a component's bare name in it as {name: ...}."""
        if path in self.lists and isinstance(value, (str, list)):
            entries = [value] if isinstance(value, str) else value
            return [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
        chosen = isinstance(value, str) and self.holds_component(path)
        return {"name": value} if chosen else value

    def holds_component(self, path: tuple[str, ...]) -> bool:
        return path in self.components or (path[:-1] in self.components and path[-1].isdecimal())

    def chooses(self, override: str) -> bool:
        """Whether an override names a component, as `environment=mine` does."""
        path = tuple(override.partition("=")[0].strip().split("."))
        return path[-1] == "name" or self.holds_component(path)

    def override(self, text: str) -> None:
        """Applies one `section.key=value`; makes missing mappings, but no list positions."""
        key, value = read_assignment(text, "section.key=value")
        path = tuple(key.split("."))
        if not all(path):
            raise ConfigError(f"{COMMAND_LINE}: expected section.key=value, found '{text}'.")
        node: Any = self.raw
        for depth, part in enumerate(path[:-1], start=1):
            if isinstance(node, dict) and node.get(part) is None:
                node[part] = {}
                self.origins[".".join(path[:depth])] = COMMAND_LINE
            node = node[_place(node, path[:depth])]
        place = _place(node, path)
        if isinstance(node, list):
            node[place] = self.named(path, value)
        else:
            self.merge(node, {place: value}, COMMAND_LINE, path[:-1])
        self.origins[".".join(path)] = COMMAND_LINE

    def build(self, cls: Any, raw: Any, path: tuple[str, ...]) -> Any:
        """The dataclass `cls` from a mapping, every key and type checked."""
        if not isinstance(raw, dict):
            raise ConfigError(
                f"{self.where(path)}: expected a section with keys, found {show(raw)}."
            )
        hints = section_hints(cls)
        fields = {item.name: hints[item.name] for item in dataclasses.fields(cls)}
        for key in raw:
            if key not in fields:
                here = (*path, str(key))
                hint = _suggest(here, list(fields), self.schema)
                raise ConfigError(f"{self.where(here)}: unknown key.{hint}")
        return cls(
            **{key: self.value(fields[key], value, (*path, key)) for key, value in raw.items()}
        )

    def value(self, hint: Any, raw: Any, path: tuple[str, ...]) -> Any:
        """One value as its annotation says: a section, or what `checked` returns."""
        section = section_of(hint)
        if section is None or (raw is None and section is not hint):
            return checked(hint, raw, self.where(path))
        return self.build(section, raw, path)

    def where(self, path: tuple[str, ...]) -> str:
        """`file: section.key` with the file that set the key, or the nearest key above it."""
        for length in range(len(path), 0, -1):
            if source := self.origins.get(".".join(path[:length])):
                return f"{source}: {'.'.join(path)}"
        return ".".join(path) or "configuration"


def _sections(schema: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    for name, hint in section_hints(schema).items():
        if section := section_of(hint):
            yield from _sections(section, (*path, name))


def _component_hints(schema: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """(annotation, key) of what holds a component or a list of them."""
    for name, hint in section_hints(schema).items():
        if section := section_of(hint):
            yield from _component_hints(section, (*path, name))
        elif is_component(hint) or any(map(is_component, typing.get_args(hint))):
            yield hint, (*path, name)


def _place(node: Any, path: tuple[str, ...]) -> Any:
    """The key, or the index of a list, at the end of a path, whose other parts lead to the node.
    Raises ConfigError where it has no such."""
    *above, part = path
    if isinstance(node, dict):
        return part
    where, told = ".".join(above), f"{COMMAND_LINE}: {'.'.join(path)}"
    if not isinstance(node, list):
        raise ConfigError(f"{told}: '{where}' is {show(node)}, it has no keys.")
    if part.isdecimal() and int(part) < len(node):
        return int(part)
    raise ConfigError(
        f"{told}: '{where}' is a list of {len(node)}; expected an index below {len(node)}, found "
        f"'{part}'. A whole list is set by {where}=[...]."
    )


def _suggest(path: tuple[str, ...], siblings: list[str], root: type) -> str:
    """A hint: the key that has this name in other libraries, else the closest key of this section,
    else of any, else the keys of this section. Deeper sections have few keys, which are named."""
    *section, word = path
    if known := elsewhere(word):
        return known
    here = {name: ".".join((*section, name)) for name in siblings}
    deepest_first = sorted(config_keys(root), key=lambda key: -key.count("."))
    anywhere = {key.rpartition(".")[2]: key for key in deepest_first}
    for places in (here, anywhere) if len(section) <= 1 else (here,):
        if meant := closest(word, places):
            return f" Did you mean '{places[meant]}'?"
    of_section = f" of {'.'.join(section)}" if section else ""
    hint = f" Known keys{of_section}: {', '.join(siblings)}; `rlflow config WORD` finds more."
    return hint if section else f"{hint} An option of the environment is environment.{word}."
