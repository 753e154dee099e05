"""Passages by chance: a baseline."""

from __future__ import annotations

from rlflow_environments.retrieval.indices.make import random_retriever

RETRIEVER = random_retriever
