"""Servers that run already."""

from __future__ import annotations

from rlflow_environments.retrieval.client.client import HttpRetriever

RETRIEVER = HttpRetriever
