"""New projects that work, from templates: what is trained, its test, and a policy that learns it."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError

FORMS = "rlflow.scaffolds"
"""Entry-point group of `Form`s; `rlflow env new` has a flag for each, called as the entry."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Form:
    """A kind of project that `rlflow env new NAME` writes.

    files: {name of a file: its template in the folder `templates`, or a function of its text}.
    lessons: keywords of `Lessons` for a tiny policy that imitates the player; None: no policy is
    made. requires: raises what is missing before anything is written. following: the commands to
    go on with. In names, templates and commands, {module} and others stand for what is in
    `Scaffold.values`."""

    help: str
    files: Mapping[str, str | Callable[[], str]]
    following: Sequence[str]
    lessons: Mapping[str, Any] | None = None
    templates: Path = _TEMPLATES
    requires: Callable[[], object] = lambda: None


_CLASS_FILES = {"{module}.py": "environment.py.txt", "test_{module}.py": "test_environment.py.txt"}
_PLAYED_FILES = {**_CLASS_FILES, "{module}_player.py": "player.py.txt"}
_CHECKS = ("rlflow env check {reference}", "rlflow env play {reference}", "{pytest} {test}")
LOOK = "rlflow view {run} --open  # curve: {run}/progress.png"
"""The last of the commands: where to see what was learned."""
TRAIN = ("rlflow train --config {configuration}", LOOK)
ENVIRONMENT = Form("an environment and its test", _CLASS_FILES, _CHECKS)
LEARNING = Form(
    "also a scripted player, a tiny policy that imitates it, a configuration to train it by",
    {**_PLAYED_FILES, "{module}.yaml": "configuration.yaml.txt"},
    (*_CHECKS, *TRAIN),
    lessons={},
)
SCRIPT = Form(
    "as --policy, with a training loop of your own in place of the configuration: train_NAME.py "
    "trains, evaluates, logs, saves, and goes on after a kill",
    {**_PLAYED_FILES, "train_{module}.py": "script.py.txt"},
    (*_CHECKS, "python {script}", LOOK),
    lessons={},
)


def forms() -> dict[str, Form]:
    """{flag without its dashes: what it writes}, those of plug-ins included."""
    entries = sorted(metadata.entry_points(group=FORMS), key=lambda entry: entry.name)
    return {
        "policy": LEARNING,
        **{entry.name: entry.load() for entry in entries},
        "script": SCRIPT,
    }


@dataclass(frozen=True)
class Scaffold:
    """A new project's files. reference, player: `file.py:Name` of its class and player."""

    name: str
    directory: Path
    form: Form = ENVIRONMENT

    @property
    def class_name(self) -> str:
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def source(self) -> Path:
        return self.directory / f"{self.name}.py"

    @property
    def test(self) -> Path:
        return self.directory / f"test_{self.name}.py"

    @property
    def configuration(self) -> Path:
        return self.directory / f"{self.name}.yaml"

    @property
    def policy(self) -> Path:
        return self.directory / f"{self.name}_policy"

    @property
    def reference(self) -> str:
        return f"{self.source}:{self.class_name}"

    @property
    def player(self) -> str:
        return f"{self.directory / self.name}_player.py:play"

    @property
    def files(self) -> list[Path]:
        """What is written; the policy is made afterwards."""
        return [self.directory / name.format(module=self.name) for name in self.form.files]

    @property
    def values(self) -> dict[str, str]:
        """What stands in templates and commands for the names in braces."""
        pytest = "" if find_spec("pytest") else "pip install pytest && "
        folder = "" if self.directory == Path() else f"{self.directory}/"
        return {
            "module": self.name,
            "Class": self.class_name,
            "folder": folder,
            "source": str(self.source),
            "test": str(self.test),
            "script": str(self.directory / f"train_{self.name}.py"),
            "configuration": str(self.configuration),
            "policy": str(self.policy),
            "reference": self.reference,
            "run": f"runs/{self.name}",
            "pytest": f"{pytest}python -m pytest",
        }

    def following(self) -> list[str]:
        """The commands to go on with, as they are typed."""
        values = {
            name: value if name == "pytest" else shlex.quote(value)
            for name, value in self.values.items()
        }
        return [command.format_map(values) for command in self.form.following]


def scaffold(name: str, directory: Path, form: Form = ENVIRONMENT) -> Scaffold:
    """The names of a new project's files. Raises ConfigError for a name that is not usable."""
    if not _NAME.fullmatch(name) or _taken(name, directory):
        suggestion = re.sub(r"\W+", "_", name).strip("_").lower()
        if not _NAME.fullmatch(suggestion) or _taken(suggestion, directory):
            suggestion = f"my_{suggestion or 'task'}"
        expected = f"expected a snake_case name that no module has, such as '{suggestion}'"
        raise ConfigError(f"env new: {expected}, found '{name}'.")
    return Scaffold(name, directory, form)


def _taken(name: str, directory: Path) -> bool:
    """Whether a file of that name would hide a module from all that runs in its folder."""
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return True
    return not (directory / f"{name}.py").exists() and find_spec(name) is not None


def write_environment(name: str, directory: Path, form: Form = ENVIRONMENT) -> Scaffold:
    """Writes the files of a new project, without the policy, which is still to be made.

    Raises:
        ConfigError: not a usable name, or a file of that name is there.
    """
    made = scaffold(name, directory, form)
    form.requires()
    for path in [*made.files, *([made.policy] if form.lessons is not None else [])]:
        if path.exists():
            advice = "choose another name, or remove it"
            raise ConfigError(f"env new: {path} is there already; {advice}.")
    directory.mkdir(parents=True, exist_ok=True)
    for path, template in zip(made.files, form.files.values(), strict=True):
        if isinstance(template, str):
            text = (form.templates / template).read_text(encoding="utf-8")
            for key, value in made.values.items():
                text = text.replace(f"{{{key}}}", value)
        else:
            text = template()
        path.write_text(text, encoding="utf-8")
    return made
