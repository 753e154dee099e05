"""Words, scored as Lucene does."""

from __future__ import annotations

from rlflow_environments.retrieval.indices.lexical import bm25_retriever

RETRIEVER = bm25_retriever
