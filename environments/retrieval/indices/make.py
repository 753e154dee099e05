"""Retrievers by name and options: what stands under `retriever:` in a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, DataError, did_you_mean
from rlflow_environments.common.options import check_options
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders.ngram import NgramEncoder
from rlflow_environments.retrieval.indices.base import CorpusRetriever, Index, Retriever

_PACKAGE = "rlflow_environments.retrieval"
_CLIENT = f"{_PACKAGE}.client.client"


@dataclass(frozen=True)
class _Backend:
    """Where a backend's builder is (module:function), called as build(corpus, **options) with its keyword-only parameters as
    options; further signatures that its `**` options come from (or where they are); whether it can do without a corpus."""

    build: str
    schemas: tuple[Callable[..., Any] | str, ...] = ()
    brings_documents: bool = False


_BACKENDS = {
    "bm25": _Backend(f"{_PACKAGE}.indices.make:bm25_retriever"),
    "dense": _Backend(f"{_PACKAGE}.indices.dense:faiss_retriever", (NgramEncoder,)),
    "faiss": _Backend(f"{_PACKAGE}.indices.dense:faiss_retriever", (NgramEncoder,)),
    "torch": _Backend(f"{_PACKAGE}.indices.dense:torch_retriever", (NgramEncoder,)),
    "hybrid": _Backend(f"{_PACKAGE}.indices.make:hybrid_retriever"),
    "qdrant": _Backend(f"{_PACKAGE}.indices.qdrant:qdrant_retriever", (NgramEncoder,), brings_documents=True),
    "http": _Backend(f"{_CLIENT}:http_retriever", (f"{_CLIENT}:HttpRetriever",), brings_documents=True),
    "random": _Backend(f"{_PACKAGE}.indices.make:random_retriever"),
}
"""A backend is imported when it is used. `dense` and `faiss` are the same."""


def make_retriever(component: str | Mapping[str, Any], corpus: Sequence[Passage] | None) -> Retriever:
    """A retriever over a corpus, by name and options: {"name": "dense", "dimensions": 512}, or just the name.

    Names: bm25, dense (or faiss), torch, hybrid (options `bm25` and `dense`: those of its parts), qdrant, http (a server),
    random. The options are the keyword-only parameters of the builders; an index of `rlflow search build` is given by `path`.
    Raises ConfigError for an unknown name or option or a corpus that is missing, DataError for an empty corpus,
    MissingPackageError.
    """
    options = {"name": component} if isinstance(component, str) else dict(component)
    name = options.pop("name", None)
    if name not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ConfigError(
            f"retriever.name: expected one of {known}, found {name!r}.{did_you_mean(str(name), _BACKENDS)}"
        )
    backend = _BACKENDS[name]
    if corpus is None and not backend.brings_documents:
        raise ConfigError(f"retriever {name}: it needs a corpus. Set environment.corpus to a .jsonl file of passages.")
    if corpus is not None and not len(corpus):
        raise DataError("retriever: the corpus holds no passages; expected at least one.")
    build = _located(backend.build)
    check_options(f"retriever {name}", options, (build, *map(_located, backend.schemas)))
    return build(corpus, **options)


def _located(target: Callable[..., Any] | str) -> Callable[..., Any]:
    """The callable, or what stands at `module:name`."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def brings_documents(component: str | Mapping[str, Any]) -> bool:
    """Whether the retriever of this name can do without a corpus; False for an unknown name."""
    name = component if isinstance(component, str) else component.get("name")
    return isinstance(name, str) and name in _BACKENDS and _BACKENDS[name].brings_documents


def bm25_retriever(
    corpus: Sequence[Passage],
    *,
    path: str | None = None,
    mmap: bool = True,
    k1: float | None = None,
    b: float | None = None,
    title_weight: int | None = None,
) -> CorpusRetriever:
    """BM25 with bm25s. path: an index folder of kind bm25, whose parameters are stored there; without one the index is built
    in memory (see BM25Index for k1, b and title_weight)."""
    from rlflow_environments.retrieval.indices.folder import BM25, check_corpus, read_meta
    from rlflow_environments.retrieval.indices.lexical import BM25Index

    given = {name: value for name, value in (("k1", k1), ("b", b), ("title_weight", title_weight)) if value is not None}
    if path is None:
        return CorpusRetriever(corpus, BM25Index(corpus, **given))
    if given:
        raise ConfigError(
            f"retriever.{next(iter(given))}: decided when the index was built; remove it, or remove retriever.path."
        )
    folder = Path(path).expanduser()
    meta = read_meta(folder)
    if meta.kind != "bm25":
        raise ConfigError(
            f"{folder}: an index of kind {meta.kind}, expected bm25. Set retriever.name to faiss or torch."
        )
    check_corpus(folder, meta, corpus)
    return CorpusRetriever(corpus, BM25Index.load(folder / BM25, mmap=mmap))


def hybrid_retriever(
    corpus: Sequence[Passage],
    *,
    depth: int = 50,
    bm25: Mapping[str, Any] | None = None,
    dense: Mapping[str, Any] | None = None,
) -> CorpusRetriever:
    """BM25 and vectors, fused. depth: candidates of each. bm25, dense: options of the parts; dense may name another retriever
    over the corpus, such as torch."""
    from rlflow_environments.retrieval.indices.fusion import HybridIndex

    parts = {"bm25": {"name": "bm25", **(bm25 or {})}, "dense": {"name": "dense", **(dense or {})}}
    return CorpusRetriever(corpus, HybridIndex([_part(key, part, corpus) for key, part in parts.items()], depth=depth))


def random_retriever(corpus: Sequence[Passage], *, seed: int = 0) -> CorpusRetriever:
    """Passages drawn by (seed, query)."""
    from rlflow_environments.retrieval.indices.random_index import RandomIndex

    return CorpusRetriever(corpus, RandomIndex(corpus, seed=seed))


def _part(key: str, component: Mapping[str, Any], corpus: Sequence[Passage]) -> Index:
    try:
        made = make_retriever(component, corpus)
    except ConfigError as problem:
        raise ConfigError(f"retriever hybrid.{key}: {problem}") from None
    if not isinstance(made, CorpusRetriever):
        raise ConfigError(
            f"retriever hybrid.{key}: '{component['name']}' does not rank the corpus; expected faiss or torch."
        )
    return made.index
