"""Where the relative paths of a run's config.yaml start: the folder that the run was started in.

A run notes that folder as `run.folder`. Whoever uses its config.yaml from elsewhere works in that
folder too, so that files, data and commands are found as they were. After a project has been moved
or copied it is the same place beside the run: config.yaml lies in PROJECT/`run.directory`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.config.loading import read_assignment
from rlflow.config.schema import RunConfig, load_config
from rlflow.config.yaml_text import read_yaml
from rlflow.errors import CALLED_IN, ConfigError
from rlflow.run.directory import run_path
from rlflow.storage.files import leaves

logger = logging.getLogger(__name__)


def project_folder(config_file: Path) -> Path | None:
    """The folder that the relative paths of a configuration start at; None: the current one."""
    content = _content(config_file)
    section = content.get("run")
    if not isinstance(section, Mapping) or not isinstance(section.get("folder"), str):
        return None
    noted = str(section["folder"])
    folder, beside = Path(noted), _project_beside(config_file.resolve().parent, section)
    if beside is None or not beside.is_dir():
        return folder if folder.is_dir() else None
    if not folder.is_dir() or beside == folder:
        return beside
    # Both are there: a copy, or a run that was moved alone
    names = [name for name in _names(content) if (folder / name).exists()]
    return beside if all((beside / name).exists() for name in names) else folder


def enter_project(config_file: Path, overrides: Sequence[str], resume: bool = False) -> list[str]:
    """Changes to the folder of a configuration's paths; returns the overrides with the paths of the
    folder before as absolute ones. resume: of the run that the file lies in, wherever that is
    now."""
    folder, here = project_folder(config_file), Path.cwd()
    config_file = config_file.resolve()
    overrides = list(overrides)
    if folder is not None and folder.resolve() != here.resolve():
        overrides = [_absolute(override, here) for override in overrides]
        os.environ.setdefault(CALLED_IN, str(here))
        os.chdir(folder)
        logger.warning("%s: relative paths are those of %s", config_file, folder)
    if resume and folder is not None:
        overrides = [*_own_directory(config_file, overrides), *overrides]
    return overrides


def _own_directory(config_file: Path, overrides: Sequence[str]) -> list[str]:
    """The override that names the run in which the file lies, where its configuration does not."""
    keys = {override.partition("=")[0].strip() for override in overrides}
    try:
        named = run_path(load_config(config_file).run)
    except ConfigError:
        return []  # whoever reads it next says so
    here = config_file.parent
    if keys & {"run", "run.directory", "run.name"} or named.resolve() == here:
        return []
    if not (here / "metrics.jsonl").is_file():
        return []
    path = str(here).replace("{", "{{").replace("}", "}}").replace("'", "''")
    return [f"run.directory='{path}'"]


def _project_beside(run: Path, section: Mapping[str, Any]) -> Path | None:
    """The project that a run lies in, by what its configuration says of its directory."""
    config = RunConfig()
    config.run.directory = str(section.get("directory", config.run.directory))
    config.run.name = str(section.get("name", config.run.name))
    try:
        inside = run_path(config.run)
    except ConfigError:
        return None
    parts = inside.parts
    if inside.is_absolute() or ".." in parts or run.parts[-len(parts) :] != parts:
        return None
    return Path(*run.parts[: -len(parts)])


def _content(config_file: Path) -> Mapping[str, Any]:
    try:
        return read_yaml(config_file)
    except ConfigError:
        return {}  # whoever reads it next says so


def _names(content: Mapping[str, Any]) -> Iterator[str]:
    """What may be relative paths in a configuration, those of runs apart."""
    for key, value in leaves(content):
        if isinstance(value, str) and value and not key.startswith("run."):
            name = value.rpartition(":")[0] if ".py:" in value else value
            if len(name) < 1000 and not os.path.isabs(name) and "\0" not in name:
                yield name


def _absolute(override: str, here: Path) -> str:
    """An override whose value is a path, or code in a file, of that folder, with all of the path."""
    try:
        key, value = read_assignment(override)
    except ConfigError:
        return override
    if not isinstance(value, str) or not any(_names({"value": value})):
        return override
    (name,) = _names({"value": value})
    # A word may be a split that is called as a folder is
    if not (os.sep in name or Path(name).suffix) or not (here / name).exists():
        return override
    return f"{key}='{here / value!s}'".replace("\n", " ")
