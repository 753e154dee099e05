"""Where a Qdrant index lies in its folder, and whether its points are those of the corpus."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow_environments.retrieval.corpus import make_passage
from rlflow_environments.retrieval.encoders import Encoder
from rlflow_environments.retrieval.indices import qdrant_collections as collections
from rlflow_environments.retrieval.indices.opening import verify_encoder

SHARD, STORAGE, LOCAL_COLLECTION = "shard", "storage", "corpus"


def verify_points(where: str, encoder: Encoder, points: Sequence[collections.Point]) -> None:
    """Raises DataError where stored vectors are not what the encoder makes of their payloads."""
    passages = [make_passage(point.payload, point.id) for point in points]
    verify_encoder(where, encoder, passages, lambda row, _: points[row].vector, range(len(points)))
