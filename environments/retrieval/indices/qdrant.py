"""Retrieval with Qdrant. Documents come from the payloads of its points: no corpus file is
needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlflow.components import check_options, takes
from rlflow.errors import ConfigError, DataError
from rlflow.values import PositiveFloat, PositiveInt
from rlflow_environments.retrieval.corpus import Passage, make_passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder
from rlflow_environments.retrieval.indices.base import Retriever, check_top_k
from rlflow_environments.retrieval.indices.exact import OVERFETCH
from rlflow_environments.retrieval.indices.folder import (
    META,
    check_corpus,
    check_encoder,
    read_meta,
)
from rlflow_environments.retrieval.indices.opening import (
    EncoderOption,
    encoder_of,
    stored_encoder,
)
from rlflow_environments.retrieval.indices.qdrant_build import build_folder, fill, verify_points
from rlflow_environments.retrieval.indices.qdrant_collections import (
    Collection,
    connect,
    open_embedded,
)

ENGINES = ("edge", "local")
_SAMPLED = 3


class QdrantRetriever(Retriever):
    """Passages of a collection, nearest first, ties by point id. Approximate where the collection
    has a graph or is quantized."""

    def __init__(self, encoder: Encoder, collection: Collection) -> None:
        """Raises DataError for an encoder of other dimensions."""
        if encoder.dimensions != collection.dimensions:
            raise DataError(
                f"retriever qdrant: the encoder makes {encoder.dimensions} dimensions, the "
                f"collection holds {collection.dimensions}. Give the encoder that it was built "
                "with."
            )
        self.encoder = encoder
        self.collection = collection

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See Retriever. Raises RetrievalError where the server does not answer."""
        check_top_k(top_k)
        if not queries:
            return []
        vectors = self.encoder.encode_queries(queries)
        results: list[list[Passage]] = [[] for _ in queries]
        places = np.flatnonzero(vectors.any(axis=1))
        if len(places):
            found = self.collection.query(vectors[places], top_k + OVERFETCH)
            for place, points in zip(places, found, strict=True):
                best = sorted(points, key=lambda point: (-point.score, point.id))[:top_k]
                results[place] = [
                    replace(make_passage(point.payload, point.id), score=point.score)
                    for point in best
                ]
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
    timeout_s: PositiveFloat = 60.0,
    tries: PositiveInt = 3,
    path: str | None = None,
    engine: Literal["edge", "local"] = "edge",
    hnsw_ef: PositiveInt | None = None,
    exact: bool = False,
    quantization: Mapping[str, Any] | None = None,
    encoder: EncoderOption = None,
    verify: bool = True,
    **hashed: Any,
) -> Retriever:
    """A collection of a server (url), of a folder (path, made by `rlflow search build --index
    qdrant` or from the corpus now), or one made from the corpus for the lifetime of the retriever.
    engine: of a folder, edge (Qdrant's own) or local (qdrant-client's, in Python). hnsw_ef, exact,
    quantization: see qdrant_collections. verify: encode a few passages again and compare.
    """
    if quantization is not None:
        quantization = check_options(
            quantization, _quantization, where="retriever qdrant.quantization"
        )
    params = {"hnsw_ef": hnsw_ef, "exact": exact, "quantization": quantization}
    if url is None:
        return _embedded(corpus, path, engine, params, encoder, hashed)
    if path is not None:
        raise ConfigError("retriever qdrant: give url or path, not both.")
    if encoder is None and corpus is None:
        raise ConfigError(
            "retriever qdrant.encoder: expected the model that the collection was built with."
        )
    made = encoder_of(encoder, hashed, corpus if corpus is not None else [])
    remote = connect(
        url,
        collection,
        api_key=api_key,
        grpc_port=grpc_port if prefer_grpc else None,
        timeout_s=timeout_s,
        tries=tries,
        params=params,
    )
    retriever = QdrantRetriever(made, remote)
    points = remote.sample(_SAMPLED)
    if not points:
        raise DataError(
            f"{url}: the collection '{collection}' is empty. Build it with `rlflow search build "
            "--index qdrant`."
        )
    if verify:
        verify_points(f"{url}, collection '{collection}'", made, points)
    return retriever


def _quantization(
    *, ignore: bool = False, rescore: bool = False, oversampling: float = 1.0
) -> None:
    """Parameters of a search in a quantized collection."""


def _embedded(
    corpus: Sequence[Passage] | None,
    path: str | None,
    engine: str,
    params: Mapping[str, Any],
    encoder: EncoderOption,
    hashed: Mapping[str, Any],
) -> QdrantRetriever:
    folder = None if path is None else Path(path).expanduser()
    if folder is None or not (folder / META).is_file():
        if corpus is None:
            raise ConfigError(
                "retriever qdrant: give url, a path that `rlflow search build --index qdrant` "
                "made, or a corpus."
            )
        made = encoder_of(encoder, hashed, corpus)
        if folder is None:
            opened = open_embedded(engine, None, made.dimensions, params, create=True)
            fill(opened, made, corpus, _silent)
            return QdrantRetriever(made, opened)
        build_folder(corpus, folder, made, engine, _silent)
    meta = read_meta(folder)
    engine = meta.kind.removeprefix("qdrant-")
    if engine not in ENGINES:
        raise ConfigError(
            f"{folder}: an index of kind {meta.kind}. Set retriever.name to torch, faiss or bm25."
        )
    if corpus is not None:
        check_corpus(folder, meta, corpus)
    built = meta.encoder or {}
    # Options that the folder was built from may stand beside it.
    same = built.get("family") == "hashed" and hashed.items() <= built.items()
    made = stored_encoder(folder, meta, encoder, {} if same else hashed)
    check_encoder(folder, meta, made.description)
    return QdrantRetriever(made, open_embedded(engine, folder, meta.dimensions, params))


def _silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""
