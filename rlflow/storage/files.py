"""Text and JSON files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rlflow.errors import CheckpointError


def write_text(path: str | Path, text: str) -> None:
    """Writes the file aside, syncs it to disk and renames it: a kill leaves the old file or the new one, never half of one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def write_json(path: str | Path, value: Any) -> None:
    """Writes one JSON document as `write_text` does. Numbers that are not finite become null."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """One JSON document.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the run or checkpoint is incomplete.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged, not JSON: {error}.") from None


def plain(value: Any) -> Any:
    """The value in what JSON can say: numbers that are not finite become null, other objects their text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if hasattr(value, "tolist"):  # numpy and torch numbers and arrays
        return plain(value.tolist())
    return str(value)
