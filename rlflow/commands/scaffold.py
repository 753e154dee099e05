"""A new environment that works, its test, and what trains a policy on it, to start from."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rlflow.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Scaffold:
    """The files of a new environment. reference, player: `file.py:Name` of class and player."""

    source: Path
    test: Path
    player_file: Path
    configuration: Path
    policy: Path
    reference: str
    player: str


def scaffold(name: str, directory: Path) -> Scaffold:
    """The names of a new environment's files. Raises ConfigError for a name that is not usable."""
    if not _NAME.fullmatch(name) or _taken(name, directory):
        suggestion = re.sub(r"\W+", "_", name).strip("_").lower()
        if not _NAME.fullmatch(suggestion) or _taken(suggestion, directory):
            suggestion = f"my_{suggestion or 'task'}"
        expected = f"expected a snake_case name that no module has, such as '{suggestion}'"
        raise ConfigError(f"env new: {expected}, found '{name}'.")
    source, player = directory / f"{name}.py", directory / f"{name}_player.py"
    class_name = "".join(part.capitalize() for part in name.split("_"))
    return Scaffold(
        source=source,
        test=directory / f"test_{name}.py",
        player_file=player,
        configuration=directory / f"{name}.yaml",
        policy=directory / f"{name}_policy",
        reference=f"{source}:{class_name}",
        player=f"{player}:play",
    )


def _taken(name: str, directory: Path) -> bool:
    """Whether a file of that name would hide a module from all that runs in its folder."""
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        return True
    return not (directory / f"{name}.py").exists() and find_spec(name) is not None


def write_environment(name: str, directory: Path, policy: bool = False) -> Scaffold:
    """Writes `<name>.py` and `test_<name>.py`; with `policy` also a scripted player, and a
    configuration with the folder of a policy that is still to be made.

    Raises:
        ConfigError: not a usable name, or a file of that name is there.
    """
    made = scaffold(name, directory)
    files = {made.source: "environment.py.txt", made.test: "test_environment.py.txt"}
    if policy:
        files |= {
            made.player_file: "player.py.txt",
            made.configuration: "configuration.yaml.txt",
        }
    for path in [*files, *([made.policy] if policy else [])]:
        if path.exists():
            advice = "choose another name, or remove it"
            raise ConfigError(f"env new: {path} is there already; {advice}.")
    source, _, class_name = made.reference.rpartition(":")
    values = {
        "module": name,
        "Class": class_name,
        "source": source,
        "policy": str(made.policy),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for path, template in files.items():
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(f"{{{key}}}", value)
        path.write_text(text, encoding="utf-8")
    return made
