"""The sandbox: programs of others, run with limits, without network, in a folder of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import platform
import shlex
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow_environments.sandbox.bubblewrap import (
    CHECKING,
    FOLDER,
    HERE,
    Confines,
    SandboxError,
    SandboxKilledError,
    command,
    variables,
)
from rlflow_environments.sandbox.limits import ProgramResult
from rlflow_environments.sandbox.system_calls import system_call_filter

logger = logging.getLogger(__name__)

START_S, GRACE_S, STOP_S = 60.0, 20.0, 10.0
LONGEST_HEADER = 1 << 16  # bytes of the line before an answer
PROGRAM, SCRIPT = "program.py", "script.sh"
CHECK = (
    "export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 PYTHONPATH={folder} "
    "HOME=$(mktemp -d 2>/dev/null || echo /nonexistent)\n"
)


class Sandbox:
    """A folder in which programs run, one at a time, and what surrounds them:

        async with Sandbox(Confines(Limits(memory_mb=512))) as box:
            result = await box.python("print(6 * 7)")

    Files stay from program to program, processes do not. All of it ends with the block, with a
    cancelled call, with this process, and where a program made too many files (`ended`). A
    program's own failure is a ProgramResult; SandboxError says that the sandbox failed by no fault
    of its program, SandboxKilledError that an unconfined program ended it."""

    def __init__(self, confines: Confines | None = None) -> None:
        self.confines = confines or Confines()
        self._confined = self.confines.confinement == "bubblewrap"
        self._process: Process | None = None
        self._open = False
        self._turn = asyncio.Lock()
        self._folder = FOLDER

    async def __aenter__(self) -> Sandbox:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def ended(self) -> bool:
        """Whether it takes no more programs."""
        return not self._open

    async def open(self) -> None:
        """Starts it. Raises SandboxError."""
        if not self._confined:
            _say_unconfined()
            self._folder = tempfile.mkdtemp(prefix="rlflow-sandbox-")
        try:
            async with asyncio.timeout(START_S):
                await self._start()
        except TimeoutError:
            await self.close()
            raise SandboxError(f"sandbox: it did not start within {START_S:g} s.") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends it, and waits until all of it is gone."""
        self._leave()
        process, self._process = self._process, None
        try:
            if process is not None:
                await _gone(process)
        finally:
            if not self._confined:
                shutil.rmtree(self._folder, ignore_errors=True)

    async def run(
        self,
        argv: Sequence[str],
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
    ) -> ProgramResult:
        """Runs a program to its end, or to a limit, and ends all that it started.

        files: written before, by their names in the folder; a link that has the name is
        replaced."""
        contents = {name: _bytes(data) for name, data in (files or {}).items()}
        sizes = [(name, len(data)) for name, data in contents.items()]
        header = {"argv": list(argv), "files": sizes, "cell": False}
        return await self._ask(header, [*contents.values(), _bytes(stdin)], timeout_s)

    async def python(
        self,
        source: str,
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
        files: Mapping[str, str | bytes] | None = None,
    ) -> ProgramResult:
        """Runs a program in an interpreter of its own, this one's version with its packages."""
        named = {**(files or {}), PROGRAM: source}
        return await self.run([sys.executable, PROGRAM], stdin, timeout_s, named)

    async def bash(self, script: str, timeout_s: float | None = None) -> ProgramResult:
        """Runs the script of a shell."""
        return await self.run(["bash", SCRIPT], b"", timeout_s, {SCRIPT: script})

    async def check(self, script: str, timeout_s: float | None = None) -> ProgramResult:
        """Runs the script of a shell that judges what other programs left behind.

        They have the folder to themselves and the check stands in it; but its HOME is a new one,
        without their settings of git and others, and Python imports what they left there only
        where nothing of that name is installed."""
        place = "/run" if self._confined else str(HERE)
        return await self.bash(
            CHECK.format(folder=shlex.quote(f"{place}/{CHECKING}")) + script, timeout_s
        )

    async def cell(self, source: str, timeout_s: float | None = None) -> ProgramResult:
        """Runs a piece of Python in the interpreter of all cells, so that names stay, and prints
        the value of a last expression. A limit, or another program, ends the interpreter: the next
        cell has a new one. `code` is 1 where the cell raised."""
        data = _bytes(source)
        path = "/run/kept.py" if self._confined else str(HERE / "kept.py")
        header = {"argv": [sys.executable, path], "files": [], "cell": True}
        return await self._ask(header, [len(data).to_bytes(8, "big") + data], timeout_s)

    async def read(self, name: str) -> str:
        """The text of a file of the folder, cut as output is. Raises FileNotFoundError where it
        cannot be read."""
        result = await self.run(["cat", "--", name])
        if not result.succeeded:
            raise FileNotFoundError(f"{name}: {result.output.strip() or result.ending}")
        return result.stdout

    async def write(self, name: str, content: str | bytes) -> ProgramResult:
        """Writes a file of the folder; the result says whether there was room for it."""
        return await self.run(["true"], files={name: content})

    async def _start(self) -> None:
        read, write = os.pipe()
        try:
            with os.fdopen(write, "wb") as file:
                file.write(system_call_filter())
            filtered = self._confined and platform.machine() == "x86_64"
            words = command(self.confines, self._folder, read if filtered else -1)
            self._process = await asyncio.create_subprocess_exec(
                *words,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=variables(self.confines, self._folder),
                pass_fds=(read,) if filtered else (),
                limit=LONGEST_HEADER,
                start_new_session=True,
            )
        finally:
            os.close(read)
        assert self._process.stdout is not None and self._process.stderr is not None
        if await self._process.stdout.readline() != b"ready\n":
            said = (await self._process.stderr.read()).decode(errors="replace").split("\n")
            raise SandboxError(
                "sandbox: it did not start: "
                f"{next(filter(None, reversed(said)), 'no reason given')}. bubblewrap 0.8 or newer "
                "and namespaces of this user are needed (in a container: --privileged, or seccomp "
                "and AppArmor profiles that allow unshare and mount)."
            )
        self._open = True

    async def _ask(
        self, header: dict[str, Any], contents: list[bytes], timeout_s: float | None
    ) -> ProgramResult:
        limits = self.confines.limits
        if timeout_s is not None:
            limits = dataclasses.replace(limits, timeout_s=timeout_s)
        header |= {"timeout_s": limits.timeout_s, "stdin": len(contents[-1])}
        async with self._turn:
            if self._process is None or not self._open:
                raise SandboxError("sandbox: it has ended; open another one.")
            try:
                async with asyncio.timeout(limits.timeout_s + GRACE_S):
                    answer, texts = await self._exchange(self._process, header, contents)
            except TimeoutError:  # its programs keep the first process from answering
                await self.close()
                answer = {"code": -9, "limit": "time", "duration_s": limits.timeout_s + GRACE_S}
                texts = ["", ""]
            except (EOFError, OSError, ValueError, KeyError) as problem:
                await self.close()
                if not self._confined:  # it had the rights to do that
                    raise SandboxKilledError(
                        f"sandbox: the program ended its first process ({problem!r})."
                    ) from None
                raise SandboxError(
                    f"sandbox: its first process ended by no fault of the program ({problem!r}); "
                    "is memory used up?"
                ) from None
            except BaseException:  # cancelled: nobody waits for the program any longer
                self._leave()
                raise
        if answer["limit"] == "files":  # which no other program could get rid of
            await self.close()
        return ProgramResult(
            code=answer["code"],
            stdout=texts[0],
            stderr=texts[1],
            duration_s=answer["duration_s"],
            limit=answer["limit"],
            left_out=answer.get("left_out", 0),
            limits=limits,
        )

    async def _exchange(
        self, process: Process, header: dict[str, Any], contents: list[bytes]
    ) -> tuple[dict[str, Any], list[str]]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(header).encode() + b"\n" + b"".join(contents))
        await process.stdin.drain()
        answer = json.loads(await process.stdout.readline())
        texts = [await process.stdout.readexactly(size) for size in answer["sizes"]]
        return answer, [text.decode(errors="replace") for text in texts]

    def _leave(self) -> None:
        """Closes the way to the sandbox, which ends it within a moment."""
        self._open = False
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.transport.abort()


async def _gone(process: Process) -> None:
    """Waits for the end of a sandbox that was told to leave, and kills one that does not."""
    try:
        await _communicated(process)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode is None:
        await _communicated(process)


async def _communicated(process: Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await process.communicate()


@functools.cache
def _say_unconfined() -> None:
    logger.warning(
        "sandbox: confinement=none: programs run with all your rights, network and files included"
    )


def _bytes(data: str | bytes) -> bytes:
    return data.encode(errors="replace") if isinstance(data, str) else data
