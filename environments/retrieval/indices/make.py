"""Retrievers by name and options: what stands under `retriever:` in a configuration."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.components import Kind
from rlflow.errors import ConfigError, DataError
from rlflow.values import hints_of
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices.base import CorpusRetriever, Index, Retriever

RETRIEVER = Kind("retriever", "rlflow_environments.retrieval.indices", reserved=("corpus",))
"""A class or function of `corpus`, the passages, and options. Where it may be None, the retriever brings its documents."""


def make_retriever(
    component: str | Mapping[str, Any], corpus: Sequence[Passage] | None, where: str = "retriever"
) -> Retriever:
    """A retriever over a corpus, by name and options: {"name": "dense", "dimensions": 512}, or just the name.

    Names: bm25, dense (or faiss), torch, hybrid (options `bm25` and `dense`: those of its parts), qdrant, http (a server),
    random, those of installed packages, `package.module:Name` and `file.py:Name`. An index of `rlflow search build` is given by
    `path`. where: the place in the configuration. Raises ConfigError for an unknown name or option, or a corpus that is missing,
    DataError for an empty corpus, MissingPackageError.
    """
    target, options = RETRIEVER.complete(component, where, corpus=corpus)
    if corpus is None and _needs_corpus(target):
        raise without_corpus(RETRIEVER.component(component)["name"], where)
    if corpus is not None and not len(corpus):
        raise DataError("retriever: the corpus holds no passages; expected at least one.")
    return target(**options)


def without_corpus(name: str, where: str) -> ConfigError:
    """The error for a retriever that needs a corpus where there is none."""
    return ConfigError(f"{where} '{name}': it needs a corpus. Set environment.corpus to a .jsonl file of passages.")


def brings_documents(component: str | Mapping[str, Any], where: str = "retriever") -> bool:
    """Whether the retriever of this name can do without a corpus. Raises ConfigError for an unknown name."""
    return not _needs_corpus(RETRIEVER.resolve(RETRIEVER.component(component, where)["name"], where))


def _needs_corpus(target: Callable[..., Any]) -> bool:
    corpus = inspect.signature(target).parameters.get("corpus")
    return corpus is not None and type(None) not in typing.get_args(hints_of(target).get("corpus"))


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
    from rlflow_environments.retrieval.indices.folder import BM25, check_corpus, check_folder, read_meta
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
    check_folder(folder, meta)
    return CorpusRetriever(corpus, BM25Index.load(folder / BM25, mmap=mmap))


def hybrid_retriever(
    corpus: Sequence[Passage],
    *,
    depth: int = 50,
    bm25: Mapping[str, Any] | None = None,
    dense: str | Mapping[str, Any] | None = None,
) -> CorpusRetriever:
    """BM25 and vectors, fused. depth: candidates of each. bm25, dense: options of the parts; dense may name another retriever
    over the corpus, such as torch."""
    from rlflow_environments.retrieval.indices.fusion import HybridIndex

    parts = {"bm25": {"name": "bm25", **(bm25 or {})}, "dense": {"name": "dense", **_mapping(dense)}}
    return CorpusRetriever(corpus, HybridIndex([_part(key, part, corpus) for key, part in parts.items()], depth=depth))


def random_retriever(corpus: Sequence[Passage], *, seed: int = 0) -> CorpusRetriever:
    """Passages drawn by (seed, query)."""
    from rlflow_environments.retrieval.indices.random_index import RandomIndex

    return CorpusRetriever(corpus, RandomIndex(corpus, seed=seed))


def _mapping(component: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {"name": component} if isinstance(component, str) else component or {}


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
