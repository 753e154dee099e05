"""Names -> objects: a built-in table, entry points of installed packages, `package.module:Name` and `file.py:Name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from rlflow.errors import ConfigError, did_you_mean

BUILTIN: dict[str, dict[str, str]] = {
    "environment": {},
    "engine": {"embedded": "rlflow.rollout.embedded.engine:EmbeddedEngine"},
}
"""Kind -> name -> where. Plug-ins add to a kind through the entry-point group `rlflow.<kind>s`. Losses and advantages are
resolved by `rlflow.algorithms`."""


def names(kind: str) -> list[str]:
    """Every name known for a kind, built-in ones first."""
    _check_kind(kind)
    return [*BUILTIN[kind], *sorted(set(_entry_points(kind)) - set(BUILTIN[kind]))]


def resolve(kind: str, name: str) -> Any:
    """The class or function behind a name, a `package.module:Name` or a `file.py:Name`.

    Raises:
        ConfigError: the name is not known, or what it points to cannot be imported.
    """
    _check_kind(kind)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{kind}: expected a name, found {name!r}. Known: {_known(kind)}.")
    if ":" in name:
        return _load(kind, name)
    if name in BUILTIN[kind]:
        return _load(kind, BUILTIN[kind][name])
    entry = _entry_points(kind).get(name)
    if entry is not None:
        return _load(kind, entry.value)
    raise ConfigError(
        f"{kind}: unknown name '{name}'.{did_you_mean(name, names(kind))} Known: {_known(kind)}, or "
        "package.module:Name, or file.py:Name."
    )


def build(kind: str, component: Mapping[str, Any], **offered: Any) -> Any:
    """The object of a component: its class or factory called with the component's keywords. `offered` values fill
    parameters that the component leaves open, where the constructor has them.

    Raises:
        ConfigError: no or unknown name, a keyword that the constructor does not take, a required one missing.
    """
    target, keywords = check_component(kind, component, tuple(offered))
    accepted = inspect.signature(target).parameters
    for key, value in offered.items():
        if key in accepted and key not in keywords:
            keywords[key] = value
    return target(**keywords)


def check_component(
    kind: str, component: Mapping[str, Any], offered: tuple[str, ...] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(class or function, keywords) of a component, checked against the signature; nothing is constructed."""
    if not isinstance(component, Mapping) or "name" not in component:
        raise ConfigError(f"{kind}: expected a mapping with 'name', found {component!r}. Known names: {_known(kind)}.")
    name = component["name"]
    target = resolve(kind, name)
    keywords = {str(key): value for key, value in component.items() if key != "name"}
    parameters = inspect.signature(target).parameters
    takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    by_keyword = [
        key
        for key, item in parameters.items()
        if item.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    for key in keywords:
        if key not in by_keyword and not takes_any:
            raise ConfigError(
                f"{kind} '{name}': unknown keyword '{key}'.{did_you_mean(key, by_keyword)} "
                f"It takes: {', '.join(by_keyword) or 'nothing'}."
            )
    missing = [
        key
        for key in by_keyword
        if parameters[key].default is inspect.Parameter.empty and key not in keywords and key not in offered
    ]
    if missing:
        raise ConfigError(
            f"{kind} '{name}': missing keyword{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"it takes: {', '.join(by_keyword)}."
        )
    return target, keywords


def _check_kind(kind: str) -> None:
    if kind not in BUILTIN:
        raise ValueError(f"unknown kind of component '{kind}'; kinds: {', '.join(BUILTIN)}")


def _entry_points(kind: str) -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=f"rlflow.{kind}s")}


def _known(kind: str) -> str:
    return ", ".join(names(kind)) or "none installed"


def _load(kind: str, reference: str) -> Any:
    """The attribute behind `package.module:Name` or `path/file.py:Name`."""
    module_name, _, attribute = reference.rpartition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{kind}: '{reference}': expected package.module:Name or file.py:Name.")
    module = (
        _load_file(kind, Path(module_name)) if module_name.endswith(".py") else _import(kind, module_name, reference)
    )
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            close = difflib.get_close_matches(part, public, n=1)
            raise ConfigError(
                f"{kind}: '{reference}': {module_name} has no '{part}'."
                + (f" Did you mean '{close[0]}'?" if close else "")
            )
        found = getattr(found, part)
    return found


def _import(kind: str, module_name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{kind}: '{reference}': no module '{error.name}'; install the package or start in the "
                "directory that holds it."
            ) from None
        raise ConfigError(f"{kind}: '{reference}' needs the package '{error.name}', which is not installed.") from error


def _load_file(kind: str, path: Path) -> ModuleType:
    """The module of a file, imported once per resolved path (pickle and dataclasses look it up in `sys.modules`)."""
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{kind}: {path}: no such file; expected file.py:Name.")
    name = f"rlflow_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ConfigError(f"{kind}: {path}: not a Python file.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
