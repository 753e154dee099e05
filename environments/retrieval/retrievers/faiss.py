"""Vectors in an index of faiss."""

from __future__ import annotations

from rlflow_environments.retrieval.indices.dense import faiss_retriever

RETRIEVER = faiss_retriever
