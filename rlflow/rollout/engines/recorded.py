"""No engine: what the environment's tasks hold is imitated."""

from __future__ import annotations

from rlflow.rollout.recorded import RecordedEngine

ENGINE = RecordedEngine
