"""Searches and what they found, on disk, so that a rollout can be made again without the index.

    source.json          {"identity": ...}: which index the records are of
    ab/ab12....json      one record per search: {"passages": [...], "query": ..., "top_k": ...}

A record's name is the SHA-256 of identity, query and top_k. Records hold no time and no order:
equal runs write equal bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rlflow.errors import ConfigError, DataError
from rlflow.storage.files import write_text
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.errors import ReplayMissError

Mode = Literal["off", "record", "replay", "strict-replay"]
"""off: nothing is read or written. record: every search goes to the server and is written. replay:
a search that was recorded is answered from there, any other goes to the server and is written.
strict-replay: there is no server."""


class SearchCache:
    """The records of one index in one folder. Several processes may share it: records are written
    whole or not at all."""

    def __init__(
        self, directory: str | Path | None = None, mode: Mode | Literal[False] = "off"
    ) -> None:
        """mode: YAML reads a bare `off` as false. Raises ConfigError without a directory, and for
        strict-replay of one that holds no records."""
        if not directory:
            raise ConfigError(
                "cache: mode without a directory; give cache.directory, the folder of the records."
            )
        self.mode = mode
        self.directory = Path(directory).expanduser()
        self._source = self.directory / "source.json"
        self._identity = _read_identity(self._source)
        if self.strict and self._identity is None:
            raise ConfigError(
                f"cache.directory: {self.directory} holds no recorded searches; record them first "
                "with cache.mode: record."
            )

    @property
    def strict(self) -> bool:
        """Whether there is no server."""
        return self.mode == "strict-replay"

    @property
    def identified(self) -> bool:
        """Whether it is known which index the records are of."""
        return self._identity is not None

    def identify(self, identity: str) -> None:
        """Says which index answers. Raises ConfigError if the records are of another one."""
        if self._identity is None:
            _write(self._source, {"identity": identity})
            self._identity = identity
        elif identity != self._identity:
            raise ConfigError(
                f"cache.directory: the searches in {self.directory} were recorded from the index "
                f"{self._identity}, the server "
                f"has {identity}. Give another directory, or serve the index that was recorded."
            )

    def get(self, query: str, top_k: int) -> list[Passage] | None:
        """What was recorded for a search; None where nothing was, or in a mode that does not read.

        Raises ReplayMissError in strict replay, DataError for a record that is damaged.
        """
        if self.mode not in ("replay", "strict-replay") or self._identity is None:
            return None
        path = self._path(query, top_k)
        try:
            record = json.loads(path.read_bytes())
            return [Passage(**passage) for passage in record["passages"]]
        except FileNotFoundError:
            if self.strict:
                raise ReplayMissError(
                    f"strict replay: the search {query!r} with top_k {top_k} was not recorded in "
                    f"{self.directory}. The rollout "
                    "differs from the recorded one, or the recording is not complete: use "
                    "cache.mode: replay to add to it."
                ) from None
            return None
        except (ValueError, KeyError, TypeError) as problem:
            raise DataError(
                f"{path}: not a recorded search ({problem}). Delete it, and it is recorded again."
            ) from None

    def put(self, query: str, top_k: int, passages: Sequence[Passage]) -> None:
        """Records a search, in the modes that do; `identify` comes first."""
        if self.mode not in ("record", "replay"):
            return
        found = [dataclasses.asdict(passage) for passage in passages]
        record = {"query": query, "top_k": top_k, "passages": found}
        _write(self._path(query, top_k), record)

    def _path(self, query: str, top_k: int) -> Path:
        name = hashlib.sha256(json.dumps([self._identity, query, top_k]).encode()).hexdigest()
        return self.directory / name[:2] / f"{name}.json"


def _read_identity(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_bytes())["identity"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(
            f'{path}: expected {{"identity": ...}} ({problem}). The folder is not a search cache.'
        ) from None


def _write(path: Path, value: Any) -> None:
    # ASCII: lone surrogates are escaped.
    write_text(path, json.dumps(value, sort_keys=True) + "\n", durable=False)
