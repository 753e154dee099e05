"""Reports of a run: metrics, episodes, charts, the page, the terminal, findings."""

from __future__ import annotations

BUILT_IN = {
    "page": "rlflow.report.live:LivePage",
    "picture": "rlflow.report.charts:Picture",
    "tensorboard": "rlflow.report.sinks:TensorBoardSink",
    "wandb": "rlflow.report.sinks:WandbSink",
}
"""Sinks: name -> `module:Name`."""
