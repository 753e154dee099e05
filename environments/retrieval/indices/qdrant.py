"""Retrieval with Qdrant. Documents come from the payloads of its points, so that no corpus file is needed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.components import takes
from rlflow.errors import ConfigError, DataError, did_you_mean
from rlflow.values import PositiveInt
from rlflow_environments.retrieval.corpus import Passage, make_passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
from rlflow_environments.retrieval.indices import qdrant_collections as collections
from rlflow_environments.retrieval.indices.base import Retriever, check_top_k
from rlflow_environments.retrieval.indices.exact import OVERFETCH
from rlflow_environments.retrieval.indices.folder import META, IndexMeta, check_corpus, check_encoder, read_meta
from rlflow_environments.retrieval.indices.opening import EncoderOption, encoder_of, stored_encoder
from rlflow_environments.retrieval.indices.qdrant_build import build_folder, fill
from rlflow_environments.retrieval.indices.qdrant_layout import LOCAL_COLLECTION, SHARD, STORAGE, verify_points

ENGINES = ("edge", "local")
_SAMPLED = 3


class QdrantRetriever(Retriever):
    """Passages of a collection, nearest first, ties by point id. Approximate where the collection has a graph or is quantized."""

    def __init__(self, encoder: Encoder, collection: collections.Collection, *, keep: Any = None) -> None:
        """keep: what has to live as long as the retriever. Raises DataError for an encoder of other dimensions."""
        if encoder.dimensions != collection.dimensions:
            raise DataError(
                f"retriever qdrant: the encoder makes {encoder.dimensions} dimensions, the collection holds "
                f"{collection.dimensions}. Give the encoder that it was built with."
            )
        self.encoder = encoder
        self.collection = collection
        self._keep = keep

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See Retriever. Raises RetrievalError where the server does not answer."""
        check_top_k(top_k)
        if not queries:
            return []
        vectors = self.encoder.encode_queries(queries)
        results: list[list[Passage]] = [[] for _ in queries]
        places = np.flatnonzero(vectors.any(axis=1))
        if len(places):
            for place, points in zip(places, self.collection.query(vectors[places], top_k + OVERFETCH), strict=True):
                best = sorted(points, key=lambda point: (-point.score, point.id))[:top_k]
                results[place] = [replace(make_passage(point.payload, point.id), score=point.score) for point in best]
        return results


@takes(NgramEncoder)
def qdrant_retriever(
    corpus: Sequence[Passage] | None,
    *,
    url: str | None = None,
    collection: str = "default_collection",
    api_key: str | None = None,
    prefer_grpc: bool = False,
    grpc_port: int = 6334,
    timeout_s: float = 60.0,
    tries: int = 3,
    path: str | None = None,
    engine: str = "edge",
    hnsw_ef: PositiveInt | None = None,
    exact: bool = False,
    quantization: Mapping[str, Any] | None = None,
    encoder: EncoderOption = None,
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """A collection of a server (url), of a folder (path, made by `rlflow search build --index qdrant` or from the corpus now),
    or one made from the corpus for the lifetime of the retriever. engine: of a folder, edge (Qdrant's own) or local
    (qdrant-client's, in Python). hnsw_ef, exact, quantization: see SearchOptions. verify: encode a few passages again and
    compare.
    """
    if engine not in ENGINES:
        raise ConfigError(
            f"retriever qdrant.engine: expected edge or local, found '{engine}'.{did_you_mean(engine, ENGINES)}"
        )
    if tries < 1 or timeout_s <= 0:
        raise ConfigError(f"retriever qdrant: expected tries >= 1 and timeout_s > 0, found {tries} and {timeout_s}.")
    collections.check_quantization(quantization)
    options = collections.SearchOptions(hnsw_ef, exact, quantization)
    if url is None:
        return _embedded(corpus, path, engine, options, encoder, hashed)
    if path is not None:
        raise ConfigError("retriever qdrant: give url or path, not both.")
    if encoder is None and corpus is None:
        raise ConfigError("retriever qdrant.encoder: expected the model that the collection was built with.")
    made = encoder_of(encoder, hashed, corpus if corpus is not None else [])
    remote = collections.connect(
        url,
        collection,
        api_key=api_key,
        grpc_port=grpc_port if prefer_grpc else None,
        timeout_s=timeout_s,
        tries=tries,
        options=options,
    )
    retriever = QdrantRetriever(made, remote)
    points = remote.sample(_SAMPLED)
    if not points:
        raise DataError(
            f"{url}: the collection '{collection}' is empty. Build it with `rlflow search build --index qdrant`."
        )
    if verify:
        verify_points(f"{url}, collection '{collection}'", made, points)
    return retriever


def _embedded(
    corpus: Sequence[Passage] | None,
    path: str | None,
    engine: str,
    options: collections.SearchOptions,
    encoder: EncoderOption,
    hashed: Mapping[str, Any],
) -> QdrantRetriever:
    if path is not None and (Path(path).expanduser() / META).is_file():
        return _open_folder(Path(path).expanduser(), corpus, options, encoder, hashed)
    if corpus is None:
        raise ConfigError(
            "retriever qdrant: give url, a path that `rlflow search build --index qdrant` made, or a corpus."
        )
    made = encoder_of(encoder, hashed, corpus)
    if path is not None:
        build_folder(corpus, Path(path).expanduser(), made, engine, _silent)
        return _open_folder(Path(path).expanduser(), corpus, options, encoder, hashed)
    keep = tempfile.TemporaryDirectory(prefix="rlflow-qdrant-") if engine == "edge" else None
    if keep is None:
        opened: Any = collections.open_local(None, LOCAL_COLLECTION, options=options, create=made.dimensions)
    else:
        opened = collections.open_edge(Path(keep.name), made.dimensions, options=options, create=True)
    fill(opened, made, corpus, _silent)
    return QdrantRetriever(made, opened, keep=keep)


def _open_folder(
    folder: Path,
    corpus: Sequence[Passage] | None,
    options: collections.SearchOptions,
    encoder: EncoderOption,
    hashed: Mapping[str, Any],
) -> QdrantRetriever:
    meta = read_meta(folder)
    if meta.kind not in ("qdrant-edge", "qdrant-local"):
        raise ConfigError(f"{folder}: an index of kind {meta.kind}. Set retriever.name to torch, faiss or bm25.")
    if corpus is not None:
        check_corpus(folder, meta, corpus)
    made = stored_encoder(folder, meta, encoder, _unchanged(folder, meta, hashed))
    check_encoder(folder, meta, made.description)
    opened: collections.Collection
    if meta.kind == "qdrant-edge":
        opened = collections.open_edge(folder / SHARD, meta.dimensions, options=options)
    else:
        opened = collections.open_local(folder / STORAGE, LOCAL_COLLECTION, options=options)
    return QdrantRetriever(made, opened)


def _unchanged(folder: Path, meta: IndexMeta, hashed: Mapping[str, Any]) -> Mapping[str, Any]:
    """No options, where those of the configuration, that the folder was built from, are still the same; else the options."""
    built = meta.encoder or {}
    same = built.get("family") == "hashed" and all(built.get(key) == value for key, value in hashed.items())
    return {} if same else hashed


def _silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""
