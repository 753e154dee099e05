"""A directory that peers share: a file per message, written whole or not at all."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.storage.files import replacing
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.swarm.transport import ExperienceTransport

logger = logging.getLogger(__name__)

NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.\d{20}\.json")
"""Of a message: its peer, and the nanoseconds since 1970 at which it was written."""


@dataclass
class DirectoryTransport(ExperienceTransport):
    """Messages as files <peer>.<time>.json in `path`, which is made. Whoever may write there is a
    peer.

    keep: newest files of one's own that stay. max_age_s: files of anybody that are older are
    removed. max_files: read per call, the newest. max_bytes: of a message; larger files are not
    read. Links and other things than files are left alone."""

    peer: str
    path: str
    keep: PositiveInt = 64
    max_age_s: PositiveFloat = 3600.0
    max_files: PositiveInt = 256
    max_bytes: PositiveInt = 2**20
    # Names that are in the directory still
    _read: set[str] = field(default_factory=set, init=False)
    _failures = 0
    _last_ns = 0

    def __post_init__(self) -> None:
        self._path = Path(self.path)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"swarm directory {self.path}: cannot be made ({error.strerror})."
            ) from None

    def publish(self, messages: Sequence[bytes]) -> None:
        """Writes them, newest last, and removes one's own beyond `keep`."""
        for message in messages:
            self._last_ns = max(self._last_ns + 1, time.time_ns())
            try:
                name = f"{self.peer}.{self._last_ns:020d}.json"
                with replacing(self._path / name, durable=False) as aside:
                    aside.write_bytes(message)
            except OSError as error:
                self._failed(error)
        own = sorted(name for name, _ in self._files() if name.startswith(f"{self.peer}."))
        for name in own[: -self.keep]:
            self._remove(name)

    def receive(self) -> list[bytes]:
        """The others' messages that were not read yet, of the `max_files` newest."""
        oldest, others = time.time() - self.max_age_s, []
        for name, status in self._files():
            if status.st_mtime < oldest:
                self._remove(name)
            elif not name.startswith(f"{self.peer}."):
                others.append((name, status))
        # Clocks of file systems tick in milliseconds: of one tick, by name, which holds the peer's
        # own time.
        others.sort(key=lambda entry: (entry[1].st_mtime_ns, entry[0]))
        before, found = self._read, []
        self._read = {name for name, _ in others[-self.max_files :]}
        for name, status in others[-self.max_files :]:
            if name not in before and stat.S_ISREG(status.st_mode):
                content = self._content(name) if status.st_size <= self.max_bytes else None
                if content is not None and len(content) <= self.max_bytes:
                    found.append(content)
        return found

    def report(self) -> dict[str, float]:
        """Reads and writes that failed."""
        counted, self._failures = float(self._failures), 0
        return {"swarm_transport_failures": counted}

    def _files(self) -> list[tuple[str, os.stat_result]]:
        found = []
        try:
            with os.scandir(self._path) as entries:
                for entry in entries:
                    if NAME.fullmatch(entry.name):
                        with suppress(OSError):  # removed in the meantime
                            found.append((entry.name, entry.stat(follow_symlinks=False)))
        except OSError as error:
            self._failed(error)
        return found

    def _content(self, name: str) -> bytes | None:
        try:
            # Not what a name was exchanged for: a link to elsewhere, a pipe that nobody writes to.
            descriptor = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                return file.read(self.max_bytes + 1)
        except OSError as error:
            self._failed(error)
            return None

    def _remove(self, name: str) -> None:
        with suppress(OSError):  # another peer was first, or may not
            (self._path / name).unlink()

    def _failed(self, error: OSError) -> None:
        self._failures += 1
        logger.warning("swarm directory %s: %s; going on without", self._path, error)
