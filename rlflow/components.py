"""Named components: names -> classes and functions, checked against their signatures, and made.

Every kind of component knows the names of its own package (`BUILT_IN` there), those of installed
packages (the entry-point group `rlflow.<kind>s`), `package.module:Name` and `file.py:Name`. A
component is {name: ..., keyword: value}, or the bare name. A known name whose class has a
`shorthand`, the name of one of its keywords, also takes `name:VALUE`: that keyword's value;
`formerly`, {old name: keyword}, keeps the names that keywords had."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rlflow.errors import ConfigError, RLFlowError, described, did_you_mean
from rlflow.values import Named, checked, hints_of, show

logger = logging.getLogger(__name__)

FILE_MODULE = "rlflow_file_"
T = TypeVar("T")
KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Kind(Named):
    """One kind of component; in the annotation of a configuration's key it says of which kind the
    key's components are.

    package: the module whose `BUILT_IN` maps names to `module:Name`. call: the leading parameters
    of a function that it gets with each call, such as the batch of an advantage; a component that
    is a function is made by binding the others. reserved: what the caller fills and a configuration
    cannot."""

    name: str
    package: str = ""
    call: int = 0
    reserved: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """Of the entry points: rlflow.environments, rlflow.losses."""
        return f"rlflow.{self.name}{'es' if self.name.endswith('s') else 's'}"

    def names(self) -> list[str]:
        """Every known name, built-in ones first."""
        return list(self.homes())

    def homes(self) -> dict[str, str]:
        """Every known name -> its `module:Name`, built-in ones first."""
        built_in = self.built_in()
        installed = sorted(self._installed().items())
        return {**built_in, **{name: home for name, home in installed if name not in built_in}}

    def locate(self, name: str, where: str | None = None) -> str:
        """The `module:Name` or `file.py:Name` behind a name; nothing is imported, but for a
        `name:VALUE`. Raises ConfigError for an unknown name."""
        where = where or self.name
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(f"{where}: expected a name, found {name!r}. Known: {self._known()}.")
        if ":" in name:
            known, given = self._shorthand(name, where)
            return self.locate(known, where) if given else name
        found = self.built_in().get(name) or self._installed().get(name)
        if found is None:
            raise ConfigError(
                f"{where}: unknown name '{name}'.{did_you_mean(name, self.names())} Known: "
                f"{self._known()}, or package.module:Name, or file.py:Name."
            )
        return found

    def resolve(self, name: str, where: str | None = None) -> Any:
        """The class or function behind a name. Raises ConfigError: the name is not known, or what
        it points to cannot be imported."""
        located = self.locate(name, where)
        if located == name and os.getcwd() not in sys.path:
            # The user's own module is found from where the user stands, behind all installed ones
            sys.path.append(os.getcwd())
        return _load(where or self.name, located)

    def component(self, component: Any, where: str | None = None) -> dict[str, Any]:
        """A bare name as {name: ...}, and a copy of a mapping. Raises ConfigError for anything
        else, and without a name."""
        if isinstance(component, str):
            return {"name": component}
        if not isinstance(component, Mapping) or "name" not in component:
            raise ConfigError(
                f"{where or self.name}: expected a name or a mapping with 'name', found "
                f"{show(component)}. Known names: {self._known()}."
            )
        return {str(key): value for key, value in component.items()}

    def options(self, name: str, where: str | None = None) -> list[str]:
        """The keywords that a configuration can give. Raises ConfigError for an unknown name."""
        where = where or self.name
        return list(self._known_keywords(self.resolve(name, where), where))

    def check(
        self, component: Any, offered: Sequence[str] = (), where: str | None = None
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """(class or function, keywords) of a component, checked against the signature; nothing is
        constructed.

        Raises:
            ConfigError: no or unknown name, a keyword that the signature does not have, one of
            another type, a required one
                missing.
        """
        where = where or self.name
        keywords = self.component(component, where)
        name, given = self._shorthand(keywords.pop("name"), where)
        if given.keys() & keywords.keys():
            raise ConfigError(
                f"{where}: '{name}:{''.join(given.values())}' gives '{''.join(given)}', which "
                "stands there too."
            )
        keywords.update(given)
        target = self.resolve(name, where)
        keywords = _renamed(keywords, getattr(target, "formerly", {}), where)
        known = self._known_keywords(target, where)
        keywords = _checked_keywords(
            keywords,
            known,
            where if where == name else f"{where} '{name}'",
            where,
            offered,
            any_key=_takes_any(target),
            fixed=self.reserved,
        )
        return target, keywords

    def complete(
        self, component: Any, where: str | None = None, **offered: Any
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """As `check`, with the offered values in the parameters that the component leaves open."""
        target, keywords = self.check(component, tuple(offered), where)
        accepted = inspect.signature(target).parameters
        return target, {key: offered[key] for key in offered if key in accepted} | keywords

    def build(self, component: Any, where: str | None = None, **offered: Any) -> Any:
        """The object of a component: its class, or function, called with the component's keywords;
        a function of a kind that is called later (`call`) with its keywords bound. Raises
        ConfigError as `check`, and for what making it raises, RLFlowErrors excepted."""
        target, keywords = self.complete(component, where, **offered)
        if self.call and not isinstance(target, type):
            return functools.partial(target, **keywords)
        try:
            return target(**keywords)
        except (RLFlowError, KeyboardInterrupt):
            raise
        except BaseException as error:
            name = self.component(component)["name"]
            label = name if where == name else f"{where or self.name} '{name}'"
            raise ConfigError(f"{label}: cannot be made: {_failure(error)}.") from error

    def _shorthand(self, name: Any, where: str) -> tuple[Any, dict[str, str]]:
        """(name, {keyword: VALUE}) of a `name:VALUE`; (the name, {}) of any other."""
        known, _, value = name.partition(":") if isinstance(name, str) else ("", "", "")
        # So not for file.py:Name: what is only located must not be imported
        if value and known in self.names():
            keyword = getattr(_load(where, self.locate(known, where)), "shorthand", None)
            if keyword:
                return known, {keyword: value}
        return name, {}

    def _known_keywords(
        self, target: Callable[..., Any], where: str
    ) -> dict[str, inspect.Parameter]:
        call = 0 if isinstance(target, type) else self.call
        called_with = list(_signature(target, where).parameters)[:call]
        return _keywords_of((target,), (*self.reserved, *called_with), where)

    def built_in(self) -> Mapping[str, str]:
        """Name -> `module:Name` of the core's own."""
        return importlib.import_module(self.package).BUILT_IN if self.package else {}

    def _installed(self) -> dict[str, str]:
        return {entry.name: entry.value for entry in metadata.entry_points(group=self.group)}

    def _known(self) -> str:
        return ", ".join(self.names()) or "none installed"


ENVIRONMENT = Kind("environment")
ENGINE = Kind("engine", "rlflow.rollout.engines")
TRAINER = Kind("trainer", "rlflow.trainer")
ADVANTAGE = Kind("advantage", "rlflow.algorithms.advantages", call=1)
LOSS = Kind("loss", "rlflow.algorithms.losses", call=2)
TRANSFORM = Kind("transform", "rlflow.algorithms.transforms", call=1)
FILTER = Kind("filter", "rlflow.algorithms.filters", call=1, reserved=("rollout", "seed"))
TEACHER = Kind("teacher", "rlflow.algorithms.teachers")
AGGREGATE = Kind("aggregate", "rlflow.algorithms.aggregates", call=1)
CURATOR = Kind("curator", "rlflow.algorithms.curators", reserved=("tasks", "seed"))
WEIGHT_TRANSFER = Kind("weight_transfer", "rlflow.rollout.weights", reserved=("put",))
SINK = Kind("sink", "rlflow.report", reserved=("directory", "run_name", "config", "resumed_step"))
"""The kinds of the core. A plug-in declares its own with the same class."""

PARTS = {kind.name: kind for kind in (ADVANTAGE, LOSS, AGGREGATE, TRANSFORM, FILTER, CURATOR)}
"""Those that an algorithm is made of."""


def by_file(package: str, path: Iterable[str], attribute: str) -> dict[str, str]:
    """The `BUILT_IN` of a package with a file for each component: a file's name -> the `attribute`
    of that file. path: the package's `__path__`."""
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    return {name: f"{package}.{name}:{attribute}" for name in names}


def names_code(text: str) -> bool:
    """Whether a text has the form of a reference to code: `package.module:Name` or
    `file.py:Name`."""
    module, _, attribute = text.rpartition(":")
    return bool(module) and all(part.isidentifier() for part in attribute.split("."))


def file_modules() -> list[ModuleType]:
    """The modules that `file.py:Name` has loaded. Another process cannot import them by name:
    objects of theirs are pickled by value."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(FILE_MODULE)]


def takes(*schemas: Callable[..., Any]) -> Callable[[T], T]:
    """Marks a function, or a class, whose `**options` are the keyword-only parameters of these
    signatures."""

    def mark(target: T) -> T:
        target.takes = schemas  # type: ignore[attr-defined]
        return target

    return mark


def check_options(
    options: Mapping[str, Any],
    *signatures: Callable[..., Any],
    where: str,
    reserved: Sequence[str] = (),
) -> dict[str, Any]:
    """The options as keywords of functions or classes, checked as those of a component. reserved:
    parameters that are no option.

    Raises:
        ConfigError: an option that no signature has, one of another type, a required one missing.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: expected a mapping of options, found {show(options)}.")
    return _checked_keywords(dict(options), _keywords_of(signatures, reserved, where), where, where)


def _keywords_of(
    signatures: Sequence[Callable[..., Any]], reserved: Sequence[str], where: str
) -> dict[str, inspect.Parameter]:
    """Keyword -> parameter with its evaluated annotation."""
    found: dict[str, inspect.Parameter] = {}
    for signature in signatures:
        hints = hints_of(signature)
        for parameter in _signature(signature, where).parameters.values():
            if parameter.kind in KEYWORDS and parameter.name not in reserved:
                found[parameter.name] = parameter.replace(annotation=hints.get(parameter.name, Any))
        for taken in getattr(signature, "takes", ()):
            further = _keywords_of((taken,), (*reserved, *found), where)
            found |= {key: item for key, item in further.items() if item.kind is item.KEYWORD_ONLY}
    return found


def _checked_keywords(
    keywords: Mapping[str, Any],
    known: Mapping[str, inspect.Parameter],
    label: str,
    where: str,
    offered: Sequence[str] = (),
    any_key: bool = False,
    fixed: Sequence[str] = (),
) -> dict[str, Any]:
    """The keywords with their values as the annotated types; `any_key`: others too, but for the
    `fixed` ones."""
    for key in keywords:
        if key not in known and (not any_key or key in fixed):
            raise ConfigError(
                f"{label}: unknown keyword '{key}'.{did_you_mean(key, known)} It takes: "
                f"{', '.join(known) or 'nothing'}."
            )
    needed = [key for key, parameter in known.items() if parameter.default is parameter.empty]
    if missing := [key for key in needed if key not in keywords and key not in offered]:
        raise ConfigError(
            f"{label}: missing keyword{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"it takes: {', '.join(known)}."
        )
    found = {}
    for key, value in keywords.items():
        hint = known[key].annotation if key in known else Any
        try:
            found[key] = checked(hint, value, f"{where}.{key}")
        except ConfigError as problem:
            problem.option = key
            raise
    return found


@functools.cache
def _note_once(where: str, key: str, name: str) -> None:
    logger.warning("%s: '%s' is called '%s' now; both are taken", where, key, name)


def _renamed(keywords: dict[str, Any], formerly: Mapping[str, str], where: str) -> dict[str, Any]:
    """The keywords with today's names for those that are called otherwise since, with a note, once
    for each; a name and its former one together are a ConfigError."""
    renamed = {}
    for key, value in keywords.items():
        name = formerly.get(key, key)
        if name != key and name in keywords:
            raise ConfigError(
                f"{where}: '{key}' is what '{name}' was called: found both; leave it out."
            )
        if name != key:
            _note_once(where, key, name)
        renamed[name] = value
    return renamed


def _takes_any(target: Callable[..., Any]) -> bool:
    kinds = [item.kind for item in inspect.signature(target).parameters.values()]
    return not hasattr(target, "takes") and inspect.Parameter.VAR_KEYWORD in kinds


def _signature(target: Any, where: str) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{where}: expected a class or a function, found {show(target)}."
        ) from None


def _load(where: str, reference: str) -> Any:
    """The attribute behind `package.module:Name` or `path/file.py:Name`."""
    module_name, _, attribute = reference.rpartition(":")
    if not names_code(reference):  # before anything is imported: what is refused has not run either
        raise ConfigError(f"{where}: '{reference}': expected package.module:Name or file.py:Name.")
    found: Any
    if module_name.endswith(".py"):
        found = _load_file(where, Path(module_name))
    else:
        found = _import(where, module_name, reference)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(
                f"{where}: '{reference}': {module_name} has no "
                f"'{part}'.{did_you_mean(part, public)}"
            )
        found = getattr(found, part)
    return found


def _import(where: str, module_name: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{where}: '{reference}': no module '{error.name}'; install the package or start "
                "in the directory that holds it."
            ) from None
        raise ConfigError(
            f"{where}: '{reference}' needs the package '{error.name}', which is not installed."
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}: '{reference}' cannot be imported: {_failure(error)}."
        ) from error


def _load_file(where: str, path: Path) -> ModuleType:
    """The module of a file, imported once per resolved path (pickle and dataclasses look it up in
    `sys.modules`)."""
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{where}: {path}: no such file; expected file.py:Name.")
    name = f"{FILE_MODULE}{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ConfigError(f"{where}: {path}: not a Python file.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, (Exception, SystemExit)):
            raise ConfigError(f"{where}: {path} cannot be imported: {_failure(error)}.") from error
        raise
    return module


def _failure(error: BaseException) -> str:
    """What others' code raised, and where: in one line."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{type(error).__name__} in {error.filename}:{error.lineno}: {error.msg}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    kind, _, said = described(error).partition(": ")
    return f"{kind} in {last.filename}:{last.lineno}: {said}"
