"""A new environment that works, and its test, to start from."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from rlflow.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES = Path(__file__).parent / "templates"


def write_environment(name: str, directory: Path) -> tuple[Path, Path, str]:
    """Writes `<name>.py` and `test_<name>.py` into the directory; returns both paths and the `file.py:Class` that names it.

    Raises:
        ConfigError: not a usable name, or a file of that name is there.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        suggestion = re.sub(r"\W+", "_", name).strip("_").lower() or "my_environment"
        raise ConfigError(f"env new: expected a snake_case name such as '{suggestion}', found '{name}'.")
    source, test = directory / f"{name}.py", directory / f"test_{name}.py"
    for path in (source, test):
        if path.exists():
            raise ConfigError(f"env new: {path} is there already; choose another name, or remove it.")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    directory.mkdir(parents=True, exist_ok=True)
    for path, template in ((source, "environment.py.txt"), (test, "test_environment.py.txt")):
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        path.write_text(text.replace("{module}", name).replace("{Class}", class_name), encoding="utf-8")
    return source, test, f"{source}:{class_name}"
