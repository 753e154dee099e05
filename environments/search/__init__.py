"""The search environment: questions that are answered by looking things up in a corpus, in the Search-R1 protocol."""

from __future__ import annotations

from rlflow_environments.search.environment import SearchEnvironment
from rlflow_environments.search.formats import Corpus, Passage
from rlflow_environments.search.retrievers import Retriever, make_retriever

__all__ = ["SearchEnvironment", "Corpus", "Passage", "Retriever", "make_retriever"]
