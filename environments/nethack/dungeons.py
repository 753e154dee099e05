"""Games of NetHack beside the training process: what is asked of them, and how they fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlflow.errors import MissingPackageError, RLFlowError, install_command
from rlflow.storage.child import last_said, start_answering
from rlflow_environments.nethack.worker import address

WORKER = Path(__file__).with_name("worker.py")
START_S, GRACE_S = 60.0, 5.0
LONGEST_ANSWER = 1 << 20  # bytes


class NetHackError(RLFlowError):
    """A game failed by no fault of the policy: the episode is aborted."""


@dataclass
class Game:
    """One that is played, in a process of its own."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    limit_s: float

    async def ask(self, question: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """The game's answer. Raises NetHackError where there is none."""
        try:
            self.writer.write(json.dumps(question).encode() + b"\n")
            async with asyncio.timeout(self.limit_s + GRACE_S):  # its own timer is the first
                answer: dict[str, Any] = json.loads(await self.reader.readline() or "{}")
        except TimeoutError:
            raise NetHackError(f"nethack: no answer in {self.limit_s:g} s.") from None
        except (OSError, ValueError) as problem:
            raise NetHackError(f"nethack: the game was lost: {problem}.") from None
        if "rows" not in answer:
            raise NetHackError(f"nethack: the game was lost: {answer.get('failed', 'no answer')}.")
        return answer

    def close(self) -> None:
        """Ends it."""
        self.writer.close()


class Dungeons:
    """Starts games, and the process that they are forked from. Ends with `close` and with this
    process."""

    def __init__(self, limit_s: float) -> None:
        """limit_s: of one action. Raises MissingPackageError."""
        if find_spec("nle") is None:
            raise MissingPackageError(
                "environment nethack: the package 'nle' is not installed: "
                f"{install_command('nethack')}"
            )
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    async def begin(self, character: str, seed: int) -> tuple[Game, dict[str, Any]]:
        """A new game and its first view. Raises NetHackError."""
        folder = await asyncio.to_thread(self._running)
        limit_s = max(self._limit_s, START_S)
        try:
            with address(folder) as place:
                ends = await asyncio.open_unix_connection(place, limit=LONGEST_ANSWER)
        except OSError as problem:
            raise NetHackError(f"nethack: no game can be started: {problem}.") from None
        game = Game(*ends, limit_s)
        try:
            asked = {"character": character, "seed": seed, "limit_s": self._limit_s}
            view = await game.ask(asked)
        except BaseException:
            game.close()
            raise
        game.limit_s = self._limit_s
        return game, view

    def close(self) -> None:
        """Ends all games."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()  # which ends it
                with process:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)
                    process.kill()
                shutil.rmtree(self._folder, ignore_errors=True)

    def _running(self) -> Path:
        """Where to connect to; starts the process unless it runs."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._folder = Path(tempfile.mkdtemp(prefix="rlflow-nethack-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                self._process = start_answering(str(WORKER), str(self._folder))
                assert self._process.stdout is not None
                if self._process.stdout.readline() != b"ready\n":
                    self._process.kill()
                    told = f"did not start (is nle whole?): {last_said(self._process)}"
                    raise NetHackError(f"nethack: its process {told}.")
            return self._folder
