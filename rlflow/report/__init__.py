"""Reports of a run: metrics, episodes, charts, the page, the terminal, findings."""

from __future__ import annotations

BUILT_IN = {
    "tensorboard": "rlflow.report.sinks:TensorBoardSink",
    "wandb": "rlflow.report.sinks:WandbSink",
}
"""Sinks: name -> `module:Name`."""
