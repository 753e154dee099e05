"""Rollout and what it stands on: engines, tokenizer, episodes."""

from __future__ import annotations

from rlflow.rollout.codec import Response, Transcripts, transcribe
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.rollout import Rollout
from rlflow.rollout.tasks import TaskSource
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.rollout.weight_sync import WeightProbe, WeightSync

__all__ = [
    "Completion",
    "Engine",
    "Response",
    "Rollout",
    "Sampling",
    "TaskSource",
    "Tokenizer",
    "Transcripts",
    "WeightProbe",
    "WeightSync",
    "transcribe",
]
