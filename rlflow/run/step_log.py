"""What the steps of a run leave: metrics, episodes and warnings, in files and on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rlflow.report.alarms import Watch
from rlflow.report.recorder import Recorder
from rlflow.report.sinks import MetricsLog
from rlflow.report.terminal import Progress
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Group

logger = logging.getLogger(__name__)


class StepLog:
    """Writes what happened in each step, and shows it.

    metrics: opened once it is known from which step on they are kept."""

    metrics: MetricsLog

    def __init__(self, recorder: Recorder, progress: Progress, watch: Watch) -> None:
        self.recorder = recorder
        self.progress = progress
        self.watch = watch

    def observe(self, batch: Batch, groups: Sequence[Group], trainer: Trainer) -> None:
        """Told of a step's batch, with advantages, before the first update."""
        self.recorder.observe(batch, groups, trainer)

    def step(self, step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Writes the metrics of a step and some of its trajectories, and warns of what they
        show."""
        self.metrics.log(step, metrics)
        self.progress.step(step, metrics)
        for fault in self.watch.observe(step, metrics):
            logger.warning("step %d: %s", step, fault.text)
        self.recorder.write(step, groups)

    def evaluation(
        self, step: int, metrics: Mapping[str, float], by_set: Mapping[str, float]
    ) -> None:
        """Writes the metrics of an evaluation. by_set: scores of each set of tasks, for the files
        alone."""
        self.metrics.log(step, {**metrics, **by_set})
        self.progress.evaluated(step, dict(metrics))
