"""From paths and a retriever's name to an index that answers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlflow import __version__
from rlflow.errors import ConfigError
from rlflow.storage.redaction import redact
from rlflow.values import show
from rlflow_environments.retrieval.corpus import Corpus, Pages
from rlflow_environments.retrieval.indices import Retriever, make_retriever
from rlflow_environments.retrieval.indices.folder import read_meta
from rlflow_environments.retrieval.records import sample_digest
from rlflow_environments.retrieval.server.index import ServedIndex
from rlflow_environments.retrieval.server.service import LoadProgress


@dataclass(frozen=True)
class ServedSource:
    """What is served. retriever: a name and its options, as in the `environment` section of a
    configuration."""

    retriever: Mapping[str, Any]
    corpus: str | None = None
    pages: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of ServedIndex: max_batch, max_waiting, cache_bytes."""

    def changed(self, changes: Mapping[str, Any]) -> ServedSource:
        """The source with other values for options of its retriever, {"retriever": {option:
        value}}.

        Only numbers, true and false are taken: a text could name code, a file or a server. Raises
        ConfigError."""
        given = changes.get("retriever", {})
        if set(changes) - {"retriever"} or not isinstance(given, Mapping):
            raise ConfigError(
                f'reload: expected {{"retriever": {{option: value}}}} or {{}}, found '
                f"{show(dict(changes))}. Corpus, pages and "
                "index are read again from where they lie: replace the files, or start another "
                "server."
            )
        given = dict(given)
        if (name := given.pop("name", self.retriever["name"])) != self.retriever["name"]:
            raise ConfigError(
                f"reload: retriever.name: this server's is '{self.retriever['name']}', found "
                f"{show(name)}."
            )
        for key, value in given.items():
            if not isinstance(value, int | float):
                raise ConfigError(
                    f"reload: retriever.{key}: expected a number, true or false, found "
                    f"{show(value)}."
                )
        return dataclasses.replace(self, retriever={**self.retriever, **given})

    def load(
        self,
        changes: Mapping[str, Any],
        report: LoadProgress,
        on_batch: Callable[[int, float], None],
    ) -> ServedIndex:
        """The index, loaded. Raises RLFlowError."""
        source = self.changed(changes)
        corpus = None
        if source.corpus is not None:
            read = partial(report, "reading the corpus")
            corpus = Corpus(source.corpus, progress=read)
        report("loading the index", 0.0)
        retriever = make_retriever(source.retriever, corpus)
        pages = None
        if source.pages is not None:
            pages = Pages(source.pages, progress=partial(report, "reading the pages"))
        report("first search", 0.0)
        for queries in (["warm-up"], ["warm-up", "of a batch"]):  # else the first client fails
            retriever.search(queries, 1)
        info = describe(source, retriever, corpus, pages)
        return ServedIndex(retriever, pages=pages, info=info, on_batch=on_batch, **source.options)


def describe(
    source: ServedSource, retriever: Retriever, corpus: Corpus | None, pages: Pages | None
) -> dict[str, Any]:
    """What `GET /info` says: corpus, index and encoder by hash. `identity`: equal for servers that
    answer alike, wherever their files lie."""
    contents: dict[str, Any] = {
        "corpus": {"sha256": corpus.sha256, "passages": len(corpus)}
        if corpus is not None
        else None,
        **_searched_contents(source.retriever, getattr(retriever, "index", retriever)),
    }
    if pages is not None:
        contents["pages"] = {"sha256": pages.sha256, "pages": len(pages)}
    contents["index"]["hash"] = _hash(contents["index"])
    return {
        "server": "rlflow search",
        "version": __version__,
        "pages": None,
        **contents,
        "corpus_path": source.corpus,
        "identity": _hash(contents),
    }


def _searched_contents(component: Mapping[str, Any], index: Any) -> dict[str, Any]:
    """{index, encoder}: what an index holds, and each part of a hybrid one, by hash."""
    encoder = getattr(index, "encoder", None)
    searched = getattr(index, "searched", {})  # how far: what an approximate index finds
    parts = {key: _searched_contents(*part) for key, part in getattr(index, "parts", {}).items()}
    return {
        "index": {**_index_contents(component), **searched, **parts},
        "encoder": _without_places(encoder.description) if encoder is not None else None,
    }


def _index_contents(component: Mapping[str, Any]) -> dict[str, Any]:
    """The retriever's name and options, and of an index on disk what it holds instead of where it
    lies."""
    contents = _without_places(component)
    if component.get("path") is None:
        return contents
    path = Path(component["path"]).expanduser()
    if path.is_dir():
        left_out = ("corpus", "encoder", "files", "search")
        contents["built"] = {
            key: value for key, value in asdict(read_meta(path)).items() if key not in left_out
        }
    else:
        contents["file"] = sample_digest(path)
    return contents


def _without_places(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options but for those that say where something lies or runs, the model's folder among them:
    its hash is known."""
    places = ("path", "encoder", "device", "gpu", "mmap", "verify", "url", "api_key")
    return redact({key: value for key, value in options.items() if key not in places})


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
