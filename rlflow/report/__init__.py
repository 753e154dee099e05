"""Metrics, episodes and pages: names with units, reductions, timers, memory, sinks, and what people look at."""

from __future__ import annotations

BUILT_IN = {"tensorboard": "rlflow.report.sinks:TensorBoardSink", "wandb": "rlflow.report.sinks:WandbSink"}
"""Sinks: name -> `module:Name`."""
