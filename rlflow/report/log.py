"""The log file of a run."""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler
from pathlib import Path

from rlflow.storage.redaction import redact_text


class RunLog:
    """While active, keeps rlflow's log records: in memory until `write_to` says where, in that file
    from then on."""

    def __init__(self) -> None:
        self._handler = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL)
        self._file: logging.FileHandler | None = None
        self._level = logging.NOTSET

    def write_to(self, path: Path) -> None:
        """Appends what was kept, and every later record at once."""
        self._file = _LogFile(path, encoding="utf-8")
        self._file.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handler.setTarget(self._file)
        self._handler.flush()
        self._handler.flushLevel = logging.DEBUG

    def __enter__(self) -> RunLog:
        logger = logging.getLogger("rlflow")
        self._level = logger.level
        # A script that never heard of logging: the file is to be whole all the same
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises OSError where the last lines cannot be written."""
        logger = logging.getLogger("rlflow")
        logger.setLevel(self._level)
        logger.removeHandler(self._handler)
        self._handler.close()
        if self._file is not None:
            self._file.close()


class _Redacting(logging.Formatter):
    """URLs of services stand in messages; their passwords do not belong into a file."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _LogFile(logging.FileHandler):
    """A log that a full disk cuts short without a word: what needs the disk more stops the run and
    says why."""

    def handleError(self, record: logging.LogRecord) -> None: ...
