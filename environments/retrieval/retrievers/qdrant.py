"""Vectors in a collection of Qdrant."""

from __future__ import annotations

from rlflow_environments.retrieval.indices.qdrant import qdrant_retriever

RETRIEVER = qdrant_retriever
