"""One Chromium, driven over its DevTools protocol: a websocket that carries all of its pages."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import MissingPackageError, RLFlowError, described
from rlflow.storage.child import Child

if TYPE_CHECKING:
    import aiohttp

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
    "--remote-debugging-port=0",
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
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self.ended = ""  # why, once it has

    async def open(self) -> None:
        """Starts it. Raises BrowserError."""
        import aiohttp

        command = [self._program, *FLAGS, f"--user-data-dir={self._folder / 'profile'}"]
        place = self._folder / "profile" / "DevToolsActivePort"

        def address() -> str | None:
            lines = place.read_text().split("\n") if place.exists() else []
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}" if len(lines) > 1 else None

        try:
            log = self._folder / "log"
            variables = {**os.environ, "TMPDIR": str(self._folder)}  # it leaves a folder there
            self._child = Child("chromium", command, log, variables=variables, error=BrowserError)
            waiting = self._child.wait_until, address, self._start_s, "environment.start_s"
            url = await asyncio.to_thread(*waiting)
            self._client = aiohttp.ClientSession()
            self._socket = await self._client.ws_connect(url, max_msg_size=LONGEST_MESSAGE)
        except BaseException as failure:
            await self.close("it did not start")
            if isinstance(failure, aiohttp.ClientError | OSError):
                raise BrowserError(f"chromium: no connection: {described(failure)}.") from None
            raise
        self._reading = asyncio.create_task(self._read(self._socket))

    async def ask(
        self, method: str, timeout_s: float, session: str = "", **parameters: Any
    ) -> dict[str, Any]:
        """The result of a command, of a page's session where one is named. Raises BrowserError,
        also where there is none in time."""
        if self.ended or self._socket is None:
            raise BrowserError(f"chromium: {self.ended or 'it was not opened'}.")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = session, answer
        message = {"id": number, "method": method, "params": parameters}
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_json(message | ({"sessionId": session} if session else {}))
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
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            said = json.loads(message.data)
            session = said.get("sessionId", "")
            if "id" in said:
                _, answer = self._asked.get(said["id"], ("", None))
                if answer is not None and not answer.done():
                    answer.set_result(said)
            elif said["method"] == "Page.javascriptDialogOpening":
                text = str(said["params"].get("message"))[:200]
                self._fail(lambda one, of=session: one == of, f"the page opened a dialog: {text}")
            elif said["method"] in ("Inspector.targetCrashed", "Inspector.detached"):
                self._fail(lambda one, of=session: one == of, "the page crashed")
        self.ended = self.ended or "it ended"
        self._fail(lambda _: True, self.ended)

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
