"""The right to write into a run directory, which one process has at a time, on whatever machine or
in whatever container.

run.lock is locked in the kernel: processes of one machine, containers too, exclude each other at
once, and a kill frees it. Where machines share a file system without sharing its locks, the lease
counts: the holder touches the file every few seconds, and another machine takes over only once that
has stopped for `lease_s`. Process numbers say nothing: every container has a 1.

The file holds the holder's epoch, one more with each holder, and its token. A holder that slept
through its lease (a suspended machine, a stopped process) finds another token there before it
writes again, and ends: see `confirm`."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, DirectoryLostError
from rlflow.storage.daemon import start_daemon
from rlflow.storage.forks import in_forked_child

logger = logging.getLogger(__name__)

LEASE_S = 60.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class DirectoryLock:
    """Held from the constructor to `close`."""

    def __init__(self, directory: Path, *, lease_s: float = LEASE_S) -> None:
        """Raises ConfigError where another process writes there, OSError where the lock file cannot
        be written."""
        self.directory = directory
        self.lease_s = lease_s
        self.path = directory / "run.lock"
        self.token = secrets.token_hex(8)
        while True:
            self._file = self.path.open("a+", encoding="utf-8", errors="replace")
            try:
                in_kernel = self._lock_in_kernel()
                self._wait_for_lease(in_kernel)
            except BaseException:
                self._file.close()
                raise
            if _same_file(self._file.fileno(), self.path):
                break
            # A start that failed removed the file in between: what was locked is not what others
            # see
            self._file.close()
        self.epoch = int(self._owner().get("epoch", 0)) + 1
        self._write({**_this_process(), "epoch": self.epoch, "token": self.token})
        in_forked_child(self._let_go)
        self._done = threading.Event()
        self._thread = start_daemon("run-lock", self._renew)

    def confirm(self) -> None:
        """Returns where this process still has the directory; asked before each write.

        Raises DirectoryLostError where it is gone, or another took over."""
        try:
            owner = _parsed(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DirectoryLostError(
                f"run.directory: {self.directory}: {error.strerror} (run.lock): it was deleted, "
                "moved or unmounted while this "
                "run was writing there. Put it back and continue with --resume."
            ) from None
        if owner.get("token") != self.token:
            raise DirectoryLostError(
                f"run.directory: {self.directory} is written by {_named(owner)} now (epoch "
                f"{owner.get('epoch', '?')}, this run "
                f"has {self.epoch}); this run ends and writes nothing more."
            )

    def held(self) -> bool:
        """Whether `confirm` would return."""
        with suppress(DirectoryLostError):
            self.confirm()
            return True
        return False

    def close(self) -> None:
        """Lets others write there. What another process has taken over stays its own."""
        self._done.set()
        self._thread.join()
        with suppress(OSError):
            if self.held():
                self._write({"epoch": self.epoch})
        self._file.close()

    def _let_go(self) -> None:
        """In the child of a fork, which would hold the lock for as long as it outlives this
        process."""
        if not self._file.closed:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, self._file.fileno(), inheritable=False)
            os.close(nowhere)

    def _lock_in_kernel(self) -> bool:
        """Whether the kernel knows locks on this file system. Raises ConfigError where another
        process has this one."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                return False
            raise self._taken(self._owner()) from None
        return True

    def _wait_for_lease(self, in_kernel: bool) -> None:
        """Returns once nobody else can be writing. Raises ConfigError as soon as another process
        shows that it does."""
        owner = self._owner()
        if "token" not in owner or (in_kernel and owner.get("boot") == _boot()):
            return  # closed as it should be; or its process is dead, which this kernel knows
        renewed, deadline = os.fstat(self._file.fileno()).st_mtime, time.monotonic() + self.lease_s
        if _file_system_time(self.directory) - renewed > self.lease_s:
            return
        logger.warning(
            "run.directory: waiting up to %.0f s for the lease of %s to end",
            self.lease_s,
            _named(owner),
        )
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self.lease_s / 8))
            if os.fstat(self._file.fileno()).st_mtime != renewed or self._owner() != owner:
                raise self._taken(owner)

    def _taken(self, owner: dict[str, Any]) -> ConfigError:
        return ConfigError(
            f"run.directory: {_named(owner)} is writing to {self.directory}; wait for it, stop it, "
            "or choose another run.name."
        )

    def _renew(self) -> None:
        while not self._done.wait(self.lease_s / 6):
            with suppress(OSError):
                if self.held():
                    os.utime(self._file.fileno())

    def _owner(self) -> dict[str, Any]:
        self._file.seek(0)
        return _parsed(self._file.read())

    def _write(self, content: dict[str, Any]) -> None:
        """In place: the kernel's lock is on this file, not on its name."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(content))
        self._file.flush()
        os.fsync(self._file.fileno())


def _this_process() -> dict[str, Any]:
    return {"process": os.getpid(), "host": socket.gethostname(), "boot": _boot()}


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner.get('process', 'unknown')} of host {owner.get('host', 'unknown')}"


def _boot() -> str:
    """What all containers of one running kernel have in common."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _parsed(text: str) -> dict[str, Any]:
    """The holder; empty for nobody, and for what an older version or a kill in the middle of
    writing left."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("epoch", 0), int) else {}


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _file_system_time(directory: Path) -> float:
    """Seconds, of the clock that gives files their times: a file server's may differ from this
    machine's."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(b".")
        probe.flush()
        return os.fstat(probe.fileno()).st_mtime
