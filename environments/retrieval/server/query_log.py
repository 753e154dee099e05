"""One line of JSON per search request, so that a query of a trajectory can be found again in the
server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.server.index import Answer
from rlflow_environments.retrieval.server.records import dump_json, load_record

logger = logging.getLogger(__name__)

KEPT_BYTES = 16 << 20  # of lines that wait to be written


class QueryLog:
    """Lines are gathered in memory; `flush`, called now and then, writes them. A busy terminal or
    disk then slows no answer, and a full one ends nothing: lines that it does not take are dropped,
    which is said once."""

    def __init__(self, path: str | Path) -> None:
        """Opens the file for appending. Raises ConfigError where that is not possible."""
        try:
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115
        except OSError as problem:
            raise ConfigError(f"--query-log {path}: cannot be written ({problem}).") from None
        self._path = path
        self._lines: list[bytes] = []
        self._bytes = 0
        self._cut = False  # whether the file ends within a line
        self._failing = False

    def write(
        self, trace: str, queries: Sequence[str], top_k: int, answer: Answer, seconds: float
    ) -> None:
        """One line: the trace of the request, its queries, times in ms, and the ids that each query
        found."""
        line = {
            "trace": trace,
            "queries": [query.encode("utf-8", "replace").decode() for query in queries],
            "topk": top_k,
            "total_ms": round(seconds * 1000, 2),
            "queued_ms": round(answer.waited_s * 1000, 2),
            "searched_ms": round(answer.searched_s * 1000, 2),
            "cached": answer.cached,
            "shared": answer.shared,
            "ids": [
                [load_record(document)["id"] for document, _ in hits] for hits in answer.results
            ],
        }
        record = dump_json(line) + b"\n"
        self._lines.append(record)
        self._bytes += len(record)
        if self._bytes > KEPT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what has gathered. What the disk does not take is dropped."""
        if not self._lines:
            return
        data = (b"\n" if self._cut else b"") + b"".join(self._lines)
        self._lines.clear()
        self._bytes = 0
        try:
            while data:
                data = data[self._file.write(data) :]
                self._cut = bool(data)
        except OSError as problem:
            if not self._failing:
                logger.warning(
                    "--query-log %s: cannot be written (%s); lines are left out",
                    self._path,
                    problem.strerror,
                )
            self._failing = True
            return
        if self._failing:
            logger.warning("--query-log %s: is written again", self._path)
        self._failing = False

    def close(self) -> None:
        """Writes what has gathered and closes the file."""
        self.flush()
        self._file.close()
