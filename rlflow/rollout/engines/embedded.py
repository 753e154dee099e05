"""In this process, on a CPU or one GPU."""

from __future__ import annotations

from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine

ENGINE = EmbeddedEngine
