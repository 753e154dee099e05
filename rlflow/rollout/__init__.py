"""Rollout and what it stands on: engines, tokenizer, episodes."""

from __future__ import annotations

from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.rollout import Rollout
from rlflow.rollout.tokenizer import Tokenizer

__all__ = ["Completion", "Engine", "Rollout", "Sampling", "Tokenizer"]

BUILT_IN = {"embedded": "rlflow.rollout.embedded.engine:EmbeddedEngine"}
"""Engines: name -> `module:Name`."""
