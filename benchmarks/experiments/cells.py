"""Cells: one arm with one seed, in a process of its own, and the file that remembers what came of each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from fuzzing.cases import forked

from experiments.base import Figures
from rlflow.storage.files import plain


@dataclass(frozen=True)
class Cell:
    """What a result belongs to: the same cell is never made twice."""

    experiment: str
    arm: str
    seed: int
    quick: bool
    version: int


class CellLog:
    """cells.jsonl: a line for each cell that has a result, written when it has one. What a kill left of a line is skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[Cell, Figures] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                record = json.loads(line)
                self._found[Cell(**record["cell"])] = record["figures"]
            except (ValueError, TypeError, KeyError):
                continue

    def get(self, cell: Cell) -> Figures | None:
        """The figures of a cell; None where it was not made yet."""
        return self._found.get(cell)

    def append(self, cell: Cell, figures: Figures, **facts: object) -> None:
        """Writes a cell's figures, on disk when this returns. facts: what else the line says (seconds, processor)."""
        figures = plain(figures)
        line = json.dumps({"cell": asdict(cell), "figures": figures, **facts}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}" if self._torn else line)
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._found[cell] = figures


def play(run: Callable[[], Figures], deadline_s: float) -> tuple[Figures | None, str, float]:
    """(the figures or None, why there are none, seconds) of a function that is called in a fork of this process. What it leaves
    in temporary folders goes with it, and so does what it started."""
    with tempfile.TemporaryDirectory(prefix="rlflow-cell-") as name:
        folder = Path(name)
        answer = folder / "figures.json"

        def work() -> int:
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
            answer.write_text(json.dumps(plain(run())), encoding="utf-8")
            return 0

        ended = forked(work, folder, deadline_s)
        if ended.code == 0 and answer.is_file():
            return json.loads(answer.read_text(encoding="utf-8")), "", ended.seconds
        said = [line for line in ended.err.splitlines() if line.strip()]
        if ended.code is None:
            return None, f"no end after {deadline_s:.0f} s", ended.seconds
        return None, f"exit {ended.code}: {said[-1] if said else 'it said nothing'}", ended.seconds
