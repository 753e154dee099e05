"""One line of JSON per search request, so that a query of a trajectory can be found again in the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.server.index import Answer

BUFFER_BYTES = 1 << 20


class QueryLog:
    """Lines are gathered in memory; `flush`, called now and then, writes them. A busy terminal or disk then slows no answer."""

    def __init__(self, path: str | Path) -> None:
        """Opens the file for appending. Raises ConfigError where that is not possible."""
        try:
            self._file = Path(path).open("ab", buffering=BUFFER_BYTES)  # noqa: SIM115 -- it lives as long as the server
        except OSError as problem:
            raise ConfigError(f"--query-log {path}: cannot be written ({problem}).") from None

    def write(self, trace: str, queries: Sequence[str], top_k: int, answer: Answer, seconds: float) -> None:
        """One line: the trace of the request, its queries, times in ms, and the ids that each query found."""
        line = {
            "trace": trace,
            "queries": [query.encode("utf-8", "replace").decode() for query in queries],
            "topk": top_k,
            "total_ms": round(seconds * 1000, 2),
            "queued_ms": round(answer.waited_s * 1000, 2),
            "searched_ms": round(answer.searched_s * 1000, 2),
            "cached": answer.cached,
            "shared": answer.shared,
            "ids": [[orjson.loads(document)["id"] for document, _ in hits] for hits in answer.results],
        }
        self._file.write(orjson.dumps(line) + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
