"""What an encoder is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rlflow_environments.retrieval.corpus import Passage


class Encoder(Protocol):
    """Texts to vectors: (N, dimensions) float32. A text's vector does not depend on the other texts of its batch, bit for bit for
    queries. A zero row: the text holds nothing to encode."""

    dimensions: int

    @property
    def unit_vectors(self) -> bool:
        """Whether every vector has length 1 (or 0)."""

    @property
    def description(self) -> dict[str, Any]:
        """What an index records: `family`, `sha256` of all that decides a vector, and what a person wants to know."""

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray: ...

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray: ...
