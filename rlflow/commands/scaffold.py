"""A new environment that works, its test, and what trains a policy on it, to start from."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
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
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        suggestion = re.sub(r"\W+", "_", name).strip("_").lower()
        if not _NAME.fullmatch(suggestion) or keyword.iskeyword(suggestion):
            suggestion = f"my_{suggestion or 'task'}"
        expected = f"expected a snake_case name such as '{suggestion}'"
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
