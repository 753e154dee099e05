"""One training run between its steps: what it is made of, remembers and writes. `open_run` makes
it; the loop is in `loop.py`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.base import Curator
from rlflow.config.loading import to_dict
from rlflow.config.schema import RunConfig
from rlflow.errors import CheckpointError, ConfigError, RolloutError
from rlflow.report.metrics import Metrics, leading_score
from rlflow.report.records import write_trajectories
from rlflow.report.reductions import rollout_metrics, scores_by_set, staleness_metrics, step_shares
from rlflow.report.timer import Clock, PhaseTimer, highest
from rlflow.rollout import Rollout
from rlflow.rollout.groups import Groups
from rlflow.run import arrival
from rlflow.run.arrival import Effect
from rlflow.run.checkpoints import CONFIG, Saver
from rlflow.run.directory import RunDirectory
from rlflow.run.engine_keeper import EngineKeeper
from rlflow.run.evaluate import EvaluationSchedule, evaluate, recorded_loss
from rlflow.run.export import export_adapter, export_files, export_policy
from rlflow.run.interrupt import Interrupt
from rlflow.run.step_log import StepLog
from rlflow.storage.files import write_json
from rlflow.storage.redaction import redact
from rlflow.storage.states import load_states, states
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Group
from rlflow.values import NonNegativeFloat, NonNegativeInt, checked

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Run:
    """The parts of a run, and what happens between steps. step: steps done. saved_step: that of the
    newest checkpoint, -1 before there is one. prompts_dropped: training tasks that were left out
    because their prompts are too long."""

    config: RunConfig
    directory: RunDirectory
    algorithm: Algorithm
    rollout: Rollout
    trainer: Trainer
    source: Curator
    upcoming: Groups
    evaluation: EvaluationSchedule
    saver: Saver
    log: StepLog
    engines: EngineKeeper
    interrupt: Interrupt
    clock: Clock
    timer: PhaseTimer
    prompts_dropped: int = 0
    step: int = 0
    saved_step: int = -1
    _sampled: list[Group] = field(default_factory=list)  # of the step, before any filter
    _effect: Effect | None = None  # of the adapters on what engines sampled in the step
    _before_step: dict[str, Any] | None = None  # the state, while a step's groups are waited for

    @property
    def registered(self) -> Metrics:
        """The metrics that the environment registers."""
        return self.rollout.environment.metrics

    def should_stop(self) -> bool:
        """Whether a signal came, the time is up, or the target is reached."""
        if self.interrupt.requested:
            return True
        limit, target, last = (
            self.config.run.max_minutes,
            self.config.run.target,
            self.evaluation.last,
        )
        if limit is not None and self.clock.seconds > limit * 60:
            logger.info("stopping: run.max_minutes = %g is over", limit)
            return True
        score = last.get(f"eval/{leading_score(self.registered, last, 'eval')}")
        return target is not None and score is not None and score >= target

    def groups(self) -> Iterator[list[Group]]:
        """The groups of one step after another, as long as the run should go on; sampled when they
        are asked for."""
        while self.step < self.config.run.steps and not self.should_stop():
            self.directory.confirm()
            self._sampled.clear()
            if self.engines.may_end:
                self._before_step = self.state_dict()
            with self.timer.phase("rollout"):
                groups = self.upcoming.step(self.step, self._admit)
                self._before_step = None
                self.rollout.take_report()
                self.rollout.report |= self.rollout.counts()  # those of an evaluation too
                if groups:
                    groups = self.algorithm.complete(groups)
                    self.engines.rest(self.upcoming.in_flight)
            if not groups:
                logger.info("stopping: data.curator has no more tasks after step %d", self.step)
                return
            yield groups

    def _admit(self, groups: list[Group]) -> list[Group]:
        self.source.observe(groups)
        self._sampled += groups
        return self.algorithm.admit(groups)

    def observe(self, batch: Batch, groups: Sequence[Group]) -> None:
        """Told of a step's batch, with advantages, before the first update. Raises RolloutError
        where engines do not apply the adapters."""
        with self.timer.phase("score"):
            self.log.observe(batch, groups, self.trainer)
            self._effect = None
            if self.engines.adapters_alone and arrival.is_due(self.step):
                self._effect = arrival.measured(batch, self.trainer, self.step)
            if self._effect is not None:
                self._effect.check(self.engines.spacing)

    def sync_weights(self, version: int) -> None:
        """Gives the engines the trainer's weights under that version; see `EngineKeeper.sync`."""
        with self.timer.phase("sync"):
            self.engines.sync(version, self.upcoming.in_flight)

    def restart_engines(self) -> None:
        """Starts engines that have ended again, with the present weights. Raises RolloutError where
        that was done too often, when a checkpoint is written."""
        try:
            self.engines.load(self.rollout.version)
        except RolloutError:
            if self.saved_step != self.step:
                self.save(self._before_step)
            raise

    def finish_step(self, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Counts the step, takes the snapshots anew that are due, and writes its metrics and some
        of its trajectories."""
        self.directory.confirm()
        self.step += 1
        self._refresh_snapshots()
        self.log.step(self.step, self._step_metrics(metrics, groups), groups)
        self.saver.poll()
        if self.engines.lost is not None:
            self.save()
            raise self.engines.lost

    def _refresh_snapshots(self) -> None:
        for name, steps in self.algorithm.refreshes.items():
            if self.step % steps == 0:
                self.trainer.snapshot(name)
                if self.algorithm.early is not None:
                    self.algorithm.early.forget()

    def _step_metrics(self, trained: dict[str, float], groups: Sequence[Group]) -> dict[str, float]:
        """What every part says of the step, beside the metrics of its training. Those of episodes
        are about all that were sampled, whether or not a filter let them into the update."""
        sampled = self._sampled or groups
        trajectories = [trajectory for group in sampled for trajectory in group.trajectories]
        on_ranks = {
            f"memory/{phase}_gib": peak for phase, peak in self.trainer.peak_memory().items()
        }
        metrics = {
            **trained,
            **rollout_metrics(trajectories, self.registered),
            **self.rollout.report,
            **{f"train/{name}": value for name, value in self.source.report().items()},
            **self.algorithm.report(),
            **staleness_metrics(groups, version=self.step - 1),
            **self.upcoming.report(),
            **highest([self.timer.take(), on_ranks]),
            **self.engines.metrics(),
            **self.rollout.synced.metrics(),
        }
        if self._effect is not None:
            metrics["sync/adapters_applied"] = self._effect.share
        metrics["data/prompts_dropped"] = float(self.prompts_dropped)
        metrics["data/epoch"] = self.source.epoch
        metrics |= step_shares(metrics, self.registered)
        metrics |= scores_by_set(sampled, self.registered, "train")
        metrics["speed/tokens_per_s"] = metrics["train/fed_tokens"] / metrics["time/step_s"]
        metrics["time/run_s"] = self.clock.seconds
        return metrics

    def evaluation_due(self) -> bool:
        """Whether the schedule asks for an evaluation now; none is begun once a signal came, nor
        after the last step: `finish` makes that one."""
        last = self.step >= self.config.run.steps
        return self.evaluation.due(self.step) and not self.interrupt.requested and not last

    def evaluate(self, final: bool = False) -> None:
        """Evaluates the tasks of the schedule, or those of the last evaluation; writes metrics
        and trajectories."""
        section, tasks = self.config.evaluation, self.evaluation.tasks(final)
        with self.timer.phase("evaluate"):
            result = evaluate(
                self.rollout,
                tasks,
                step=self.step,
                samples_per_prompt=section.samples_per_prompt,
                temperature=section.temperature,
            )
            if self.rollout.recorded:
                rows = self.config.rollout.prompts_per_step
                result.metrics = {
                    **{name: one for name, one in result.metrics.items() if "reward" not in name},
                    **recorded_loss(self.trainer, result.groups, rows),
                }
        self.directory.confirm()
        self.evaluation.record(self.step, result.metrics, final)
        elapsed = {**self.timer.take_phase("evaluate"), "time/run_s": self.clock.seconds}
        by_set = scores_by_set(result.groups, self.registered, "eval")
        self.log.evaluation(self.step, {**result.metrics, **elapsed}, by_set)
        self.directory.confirm()
        write_trajectories(self.directory.evaluations(self.step), result.groups)
        if self.saved_step == self.step:
            self.log.metrics.sync()
            self.saver.update_state(self.step, self.state_dict())

    def checkpoint_due(self) -> bool:
        """Whether the schedule asks for a checkpoint now."""
        every = self.config.checkpoint.every_steps
        return every > 0 and self.step % every == 0

    def save(self, state: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint of the present step, or begins to; a kill leaves the one before.
        state: another one than now's."""
        with self.timer.phase("checkpoint"):
            self.directory.confirm()
            self.log.metrics.sync()
            self.saver.save(self.step, dict(state or self.state_dict()))
        self.saved_step = self.step
        logger.info("checkpoint of step %d", self.step)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the trainer's part: state.json of a checkpoint."""
        config = {CONFIG: redact(to_dict(self.config))}
        return {"step": self.step, "seconds": self.clock.seconds, **states(self._parts()), **config}

    def load_state_dict(self, state: Mapping[str, Any], where: object = "") -> None:
        """Restores `state_dict`, which a checkpoint held. where: the file that it is from. Raises
        CheckpointError for a state of another form."""
        try:
            step = checked(NonNegativeInt, state["step"], "step")
            seconds = checked(NonNegativeFloat, state["seconds"], "seconds")
        except ConfigError as problem:
            raise CheckpointError(f"{where}: {problem}" if where else str(problem)) from None
        load_states(self._parts(), state, where)
        self.step = self.saved_step = step
        self.clock.before_s = seconds

    def _parts(self) -> dict[str, object]:
        return {
            "source": self.source,
            "groups": self.upcoming,
            "rollout": self.rollout,
            "evaluation": self.evaluation,
            "algorithm": self.algorithm,
        }

    def finish(self) -> dict[str, Any]:
        """Saves; unless a signal ended the run, evaluates and exports; draws. Writes and returns
        the summary."""
        self.upcoming.stop()  # the last evaluation has the engines for itself
        if self.saved_step != self.step:
            self.save()
        self.saver.finish()
        interrupted, export_gap = self.interrupt.requested, None
        if not interrupted and self.evaluation.final_due(self.step):
            self.evaluate(final=True)
        if not interrupted and self.config.checkpoint.export and self.trainer.exports:
            self.log.progress.phase("exporting")
            self.directory.confirm()
            model = self.config.model
            texts = export_files(
                self.config, self.rollout, self.evaluation, self.step, self.directory.export
            )
            export_gap = export_policy(
                self.trainer, self.directory.export, model.path, model.dtype, texts
            )
            adapters = self.config.trainer.lora
            if adapters is not None:
                written = self.directory.adapter, self.directory.export
                export_adapter(self.trainer, *written, model.path, adapters, model.dtype)
        self.directory.confirm()
        summary = self._summary(interrupted, export_gap)
        write_json(self.directory.summary, summary)
        self.log.progress.finished(summary)
        return summary

    def _summary(self, interrupted: str | None, export_gap: float | None) -> dict[str, Any]:
        """How the run ended, what it reached, and what it wrote where. interrupted: the signal that
        ended it. export_gap: nats between export and trainer; None: nothing was exported."""
        directory, evaluation = self.directory, self.evaluation
        tasks = evaluation.tasks(final=True)
        written = {
            "run": directory.path,
            "metrics": directory.metrics,
            "checkpoint": directory.saved.path(self.step),
        }
        if export_gap is not None:
            written["export"] = directory.export
            if directory.adapter.is_dir():
                written["adapter"] = directory.adapter
        written |= self.log.metrics.report_files()
        return {
            "status": f"interrupted by {interrupted}" if interrupted else "finished",
            "steps": self.step,
            "seconds": round(self.clock.seconds, 1),
            "first_evaluation_step": evaluation.first_step,
            "first_evaluation": evaluation.first,
            "last_evaluation_step": evaluation.last_step,
            "last_evaluation": evaluation.last,
            "export_logprob_difference": export_gap,
            "recorded": self.rollout.recorded,
            "takes_questions": self.rollout.environment.takes_questions,
            "example_question": next(
                (task.metadata["question"] for task in tasks if "question" in task.metadata), None
            ),
            "written": {name: str(path) for name, path in written.items()},
        }
