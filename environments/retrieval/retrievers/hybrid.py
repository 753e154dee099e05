"""Words and vectors, fused."""

from __future__ import annotations

from rlflow_environments.retrieval.indices.make import hybrid_retriever

RETRIEVER = hybrid_retriever
