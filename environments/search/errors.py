"""What can go wrong in a search environment beside retrieval."""

from __future__ import annotations

from rlflow.errors import RLFlowError


class JudgeError(RLFlowError):
    """The judge's endpoint failed, after all attempts: the episode is aborted, neither right nor wrong."""
