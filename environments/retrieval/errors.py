"""Errors between a query and its passages."""

from __future__ import annotations

from rlflow.errors import ConfigError, PolicyError, RLFlowError


class RetrievalError(RLFlowError):
    """The retrieval service failed, after all attempts: the episode is aborted, and no text of this
    reaches the model."""


class QueryRefusedError(RetrievalError, PolicyError):
    """The service, which answered others, refuses what the policy asks for: too long, or empty. The
    episode counts as wrong."""


class QueueFullError(RetrievalError):
    """More searches wait than may wait."""


class ReplayMissError(ConfigError):
    """A search is not in the cache that is replayed strictly. It stops the run: the rollout cannot
    be reproduced."""
