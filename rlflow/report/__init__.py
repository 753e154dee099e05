"""Reports of a run while it goes on: metrics, sinks, episodes, the terminal, alarms."""

from __future__ import annotations

BUILT_IN = {
    "tensorboard": "rlflow.report.sinks:TensorBoardSink",
    "wandb": "rlflow.report.sinks:WandbSink",
}
"""Sinks: name -> `module:Name`."""
