"""Metrics, episodes and pages for people: names with units, reductions, phase timers, peak memory, and the sinks that a run writes to."""

from __future__ import annotations

BUILT_IN = {"tensorboard": "rlflow.report.sinks:TensorBoardSink", "wandb": "rlflow.report.sinks:WandbSink"}
"""Sinks: name -> `module:Name`."""
