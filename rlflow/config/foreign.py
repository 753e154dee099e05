"""Configuration files of other systems: which plug-in reads one, and what it says of its keys.

The core reads none itself. What became of their keys is data here, so that the commands report it
alike for every plug-in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rlflow.config.schema import RunConfig, load_config

READERS = "rlflow.foreign_configs"
"""Entry-point group of functions of a path: the ForeignFile, or None for a file that they do not
know."""
OUTCOMES = ("taken", "taken under another name", "no counterpart", "not known")


@dataclass(frozen=True)
class ReadKey:
    """What became of one of their keys. name: theirs; told: our key with its value, or a reason."""

    name: str
    value: Any
    told: str


@dataclass
class Translation:
    """Our configuration from their file. outcomes: all of their keys, by entries of OUTCOMES."""

    system: str
    config: RunConfig
    evaluates: bool
    outcomes: dict[str, list[ReadKey]]


@dataclass(frozen=True)
class ForeignFile:
    """A file of another system. translate: makes our configuration of it, under our overrides;
    raises ConfigError where a value does not fit here."""

    system: str
    translate: Callable[[Sequence[str]], Translation]


def foreign_file(path: str | Path) -> ForeignFile | None:
    """The file, where a plug-in knows its system; None for one of ours or of nobody's."""
    for entry in sorted(metadata.entry_points(group=READERS), key=lambda entry: entry.name):
        file: ForeignFile | None = entry.load()(Path(path))
        if file is not None:
            return file
    return None


def read_config(
    path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[RunConfig, Translation | None]:
    """The configuration from a file of ours or of another system, under our overrides, and its
    translation if it is not ours. Raises ConfigError."""
    file = foreign_file(path) if path else None
    if file is None:
        return load_config(path, overrides), None
    translation = file.translate(overrides)
    return translation.config, translation
