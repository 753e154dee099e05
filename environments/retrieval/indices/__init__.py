"""Retrievers behind one interface, `search(queries, top_k) -> list[list[Passage]]`, made by name.

A result depends on the query and the corpus alone: not on the batch that it was searched in, and
ties go to the earlier row.
"""

from __future__ import annotations

from rlflow_environments.retrieval.indices.base import CorpusRetriever, Index, Ranking, Retriever
from rlflow_environments.retrieval.indices.make import brings_documents, make_retriever

__all__ = ["CorpusRetriever", "Index", "Ranking", "Retriever", "brings_documents", "make_retriever"]
