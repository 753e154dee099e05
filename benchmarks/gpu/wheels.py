"""Packages that a machine without a network is given along with the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path


def bring(folder: str | None, target: Path) -> list[str]:
    """Unpacks what `folder` holds into `target`, once; what Python's path begins with for it.
    Wheels and parts of wheels are unpacked, files of Python copied, source archives built with
    the packages that are there."""
    if folder is None:
        return [str(target)] if target.is_dir() else []
    target.mkdir(parents=True, exist_ok=True)
    for wheel in sorted([*Path(folder).glob("*.whl"), *joined(Path(folder), target.parent)]):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    for file in Path(folder).glob("*.py"):
        shutil.copy(file, target)
    for archive_file in sorted(Path(folder).glob("*.tar.gz")):
        build(archive_file, target)
    return [str(target)]


def joined(folder: Path, place: Path) -> list[Path]:
    """Wheels put together from NAME.whl.0, NAME.whl.1, ..."""
    parts = defaultdict(list)
    for file in folder.iterdir():
        if match := re.fullmatch(r"(.+\.whl)\.(\d+)", file.name):
            parts[match[1]].append((int(match[2]), file))
    made = []
    for name, numbered in parts.items():
        with (place / name).open("wb") as whole:
            for _, file in sorted(numbered):
                with file.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        made.append(place / name)
    return made


def build(archive: Path, target: Path) -> None:
    """Builds a source archive into `target`; says what went wrong, as the other packages are of
    use without it."""
    options = [
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--upgrade",
        "--target",
        str(target),
    ]
    command = [sys.executable, "-m", "pip", "install", *options, str(archive)]
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{archive.name} was not built: {done.stderr.strip()[-300:]}", file=sys.stderr)
