"""The search environment: questions that are answered by looking things up in a corpus, in the
Search-R1 protocol."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow_environments.retrieval.coalescer import CoalescedSearch
    from rlflow_environments.retrieval.corpus import Corpus, Passage
    from rlflow_environments.retrieval.indices import Retriever, make_retriever
    from rlflow_environments.search.environment import SearchEnvironment
    from rlflow_environments.search.protocols.text import (
        INVALID_ACTION,
        format_observation,
        parse_action,
    )
    from rlflow_environments.search.rewards.scoring import searchr1_em

_HOMES = {
    "SearchEnvironment": "rlflow_environments.search.environment",
    "CoalescedSearch": "rlflow_environments.retrieval.coalescer",
    "Corpus": "rlflow_environments.retrieval.corpus",
    "Passage": "rlflow_environments.retrieval.corpus",
    "Retriever": "rlflow_environments.retrieval.indices",
    "make_retriever": "rlflow_environments.retrieval.indices",
    "INVALID_ACTION": "rlflow_environments.search.protocols.text",
    "format_observation": "rlflow_environments.search.protocols.text",
    "parse_action": "rlflow_environments.search.protocols.text",
    "searchr1_em": "rlflow_environments.search.rewards.scoring",
}

__all__ = [
    "SearchEnvironment",
    "CoalescedSearch",
    "Corpus",
    "Passage",
    "Retriever",
    "make_retriever",
    "INVALID_ACTION",
    "format_observation",
    "parse_action",
    "searchr1_em",
]


def __getattr__(name: str) -> Any:
    """The public name from its module (PEP 562), so that the command line stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
