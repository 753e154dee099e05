"""The letters with tools that fail, take their time, or lose the run its directory: named as `<this file>:FallibleLetters`."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

from rlflow.types import Episode, Step
from tests.flow.letters import Letters

REFERENCE = f"{Path(__file__).resolve()}:FallibleLetters"
THEIRS = '{"process": 1, "host": "elsewhere", "epoch": 9, "token": "theirs"}'


def written(run: Path) -> dict[str, str]:
    """The content of every file of the run, but for its log, its lock and what is half written."""
    files = [
        path
        for path in run.rglob("*")
        if path.is_file() and not path.name.startswith(("log", "run.lock"))
    ]
    return {str(path): path.read_bytes().hex() for path in files if ".partial" not in str(path)}


def take_directory(run: Path) -> None:
    """As another process does that finds no lock there."""
    run.with_name("their.lock").write_text(THEIRS)
    run.with_name("their.lock").replace(run / "run.lock")


class FallibleLetters(Letters):
    """out: while this file is there every tool fails. takes_s: of a step. steals: a run directory that another
    process takes at the hundredth step; what its files held then is noted beside it. holds: a file that is made at the
    three hundredth step, where it is not there; then one call holds the interpreter, for ever."""

    def __init__(
        self, out: str = "", takes_s: float = 0.0, steals: str = "", holds: str = ""
    ) -> None:
        super().__init__()
        self._holds = Path(holds) if holds else None
        self._out, self._takes_s, self._steals, self._steps = out, takes_s, steals, 0

    async def step(self, episode: Episode, response: str) -> Step:
        await asyncio.sleep(self._takes_s)
        if self._out and Path(self._out).exists():
            raise ConnectionError("the tool is out")
        self._steps += 1
        if self._steals and self._steps == 100:
            take_directory(Path(self._steals))
            time.sleep(0.2)  # for a write that had asked before
            Path(f"{self._steals}.json").write_text(json.dumps(written(Path(self._steals))))
        if self._holds and self._steps == 300 and not self._holds.exists():
            self._holds.touch()
            re.match("(a+)+$", "a" * 60 + "b")
        return await super().step(episode, response)
