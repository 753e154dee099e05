"""One Chromium, driven over its DevTools protocol: a pipe that carries all of its pages.

A port would have no key: whoever is on this machine could read the user's files through it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlflow.errors import MissingPackageError, RLFlowError, described
from rlflow.storage.child import Child

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",  # 64 MB in containers
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    # Pages of other episodes are never behind this one's
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
    "--remote-debugging-pipe",  # reads descriptor 3, writes to 4
)
LONGEST_MESSAGE = 64 * 2**20  # bytes


class BrowserError(RLFlowError):
    """A browser or a page failed by no fault of the policy: the episode is aborted."""


class Chromium:
    """A running browser.

    Its process ends with `close`, with this object, and with this process."""

    def __init__(self, program: str, start_s: float) -> None:
        self._program, self._start_s = program, start_s
        self._folder = Path(tempfile.mkdtemp(prefix="rlflow-chromium-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._child: Child | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self.ended = ""  # why, once it has

    async def open(self) -> None:
        """Starts it. Raises BrowserError."""
        command = [self._program, *FLAGS, f"--user-data-dir={self._folder / 'profile'}"]
        variables = {**os.environ, "TMPDIR": str(self._folder)}  # it leaves a folder there
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = await asyncio.to_thread(
                    Child,
                    "chromium",
                    command,
                    self._folder / "log",
                    variables=variables,
                    descriptors=(theirs.fileno(), theirs.fileno()),
                    error=BrowserError,
                )
            reader, self._writer = await asyncio.open_unix_connection(
                sock=ours, limit=LONGEST_MESSAGE
            )
            self._reading = asyncio.create_task(self._read(reader))
            await self._answers()
        except BaseException as failure:
            await self.close("it did not start")
            ours.close()
            if isinstance(failure, OSError):
                raise BrowserError(f"chromium: no connection: {described(failure)}.") from None
            raise

    async def _answers(self) -> None:
        """Waits for its first answer. Raises BrowserError, also where it ends before."""
        assert self._child is not None
        version = asyncio.create_task(self.ask("Browser.getVersion", self._start_s))

        def answered() -> bool | None:
            return True if version.done() and not version.exception() else None

        try:
            await asyncio.to_thread(
                self._child.wait_until, answered, self._start_s, "environment.start_s"
            )
        finally:
            version.cancel()
            await asyncio.gather(version, return_exceptions=True)

    async def ask(
        self, method: str, timeout_s: float, session: str = "", **parameters: Any
    ) -> dict[str, Any]:
        """The result of a command, of a page's session where one is named. Raises BrowserError,
        also where there is none in time."""
        if self.ended or self._writer is None:
            raise BrowserError(f"chromium: {self.ended or 'it was not opened'}.")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = session, answer
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(json.dumps(message).encode() + b"\0")
                await self._writer.drain()
                found = await answer
        except TimeoutError:
            raise BrowserError(f"chromium: no answer to {method} in {timeout_s:g} s.") from None
        except OSError as failure:
            raise BrowserError(f"chromium: {method} failed: {described(failure)}.") from None
        finally:
            self._asked.pop(number, None)
        if "error" in found:
            raise BrowserError(f"chromium: {method} failed: {found['error'].get('message')}.")
        result: dict[str, Any] = found["result"]
        return result

    async def close(self, why: str = "it was closed") -> None:
        """Ends it, at once: it keeps nothing that is worth saving."""
        self.ended = self.ended or why
        self._fail(lambda _: True, self.ended)
        if self._reading is not None:
            self._reading.cancel()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, 0.0)
        if self._writer is not None:
            self._writer.transport.abort()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "it ended"
        try:
            while True:
                self._take(json.loads((await reader.readuntil(b"\0"))[:-1]))
        except (asyncio.IncompleteReadError, OSError):
            pass  # it ended
        except asyncio.LimitOverrunError:
            why = f"it sent a message of more than {LONGEST_MESSAGE >> 20} MiB"
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            why = f"it sent what is no message: {described(problem)}"
        self.ended = self.ended or why
        self._fail(lambda _: True, self.ended)

    def _take(self, said: dict[str, Any]) -> None:
        """One message: an answer, or an event."""
        session = said.get("sessionId", "")
        if "id" in said:
            _, answer = self._asked.get(said["id"], ("", None))
            if answer is not None and not answer.done():
                answer.set_result(said)
        elif said["method"] == "Page.javascriptDialogOpening":
            text = str(said["params"].get("message"))[:200]
            self._fail(lambda one: one == session, f"the page opened a dialog: {text}")
        elif said["method"] in ("Inspector.targetCrashed", "Inspector.detached"):
            self._fail(lambda one: one == session, "the page crashed")

    def _fail(self, concerned: Callable[[str], bool], why: str) -> None:
        """Ends the wait for answers of the sessions that are concerned."""
        for session, answer in self._asked.values():
            if concerned(session) and not answer.done():
                answer.set_exception(BrowserError(f"chromium: {why}."))


def find_chromium(program: str | None) -> str:
    """The path of the program, by default of the first one of PROGRAMS that is there. Raises
    MissingPackageError."""
    names = PROGRAMS if program is None else (program,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise MissingPackageError(
            f"environment miniwob: {names[0]} is not installed: apt install chromium (or name "
            "another Chromium in environment.program)"
        )
    return found
