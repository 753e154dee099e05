"""One training run: what it is made of, what it remembers between steps, and what it writes. The loop itself is in `loop.py`."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from logging.handlers import MemoryHandler
from types import TracebackType
from typing import Any

from rlflow_tools.ckpt_convert.export_model import write_model

from rlflow.config.loading import redact, save_config, to_dict
from rlflow.config.schema import RunConfig
from rlflow.errors import DamagedCheckpointError, RLFlowError, StorageError
from rlflow.metrics.memory import highest
from rlflow.metrics.sinks import MetricsLog, make_sinks
from rlflow.metrics.timer import PhaseTimer
from rlflow.rollout import Rollout
from rlflow.run.assemble import fitting_tasks, make_rollout, make_trainer
from rlflow.run.checkpoints import TRAINER, read_state
from rlflow.run.directory import RunDirectory
from rlflow.run.evaluate import Evaluation
from rlflow.run.export import check_export
from rlflow.run.interrupt import Interrupt
from rlflow.run.picture import render_picture
from rlflow.run.preflight import check_start, run_path
from rlflow.run.progress import make_progress
from rlflow.run.saver import Saver
from rlflow.run.trajectories import write_trajectories
from rlflow.storage.files import write_json
from rlflow.trainer.base import Trainer
from rlflow.types import Group, Task

logger = logging.getLogger(__name__)

EXPORT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Nats, by model.dtype: log-probs of the export (transformers, float32) against the trainer's. A bfloat16 trainer rounds its
activations and logits too; a tensor in the wrong place costs several nats."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Run:
    """A context: entering checks everything and builds environment, engine and trainer; leaving closes them in any case."""

    rollout: Rollout
    trainer: Trainer
    saver: Saver

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.step = 0
        self.timer = PhaseTimer()
        self.interrupt = Interrupt()
        self.last_evaluation: dict[str, float] = {}
        self.first_evaluation: dict[str, float] = {}
        self._evaluated_step = -1
        self._saved_step = -1
        self._seconds_before = 0.0  # of earlier sessions of a resumed run
        self._started = time.monotonic()
        self._stack = ExitStack()

    # ------------------------------------------------------------ life

    def __enter__(self) -> Run:
        from rlflow.run.algorithm import Algorithm

        config = self.config
        check_start(config)
        with ExitStack() as stack:
            self.algorithm = Algorithm.from_config(config)
            stack.enter_context(self.interrupt)  # first: a signal while ranks start must end them too
            log = stack.enter_context(_log())
            saved = RunDirectory(run_path(config)).saved
            chosen = saved.choose(config.run.resume_step) if config.run.resume else None
            self.progress = make_progress(
                config.metrics.progress,
                steps=config.run.steps,
                title=config.run.name,
                first_step=chosen[0] if chosen else 0,
            )
            stack.callback(self.progress.close)
            self.timer.on_enter = self.progress.phase
            self._build_rollout(stack)
            self._build_trainer(stack)
            # Only now: a start that fails has neither taken a directory nor thrown away what `overwrite` is to replace.
            self._open_directory(stack, log)
            self._resume()
            self._open_metrics(stack)
            section = config.checkpoint
            self.saver = Saver(self.trainer, self.directory.saved, keep=section.keep, asynchronous=section.asynchronous)
            self._stack = stack.pop_all()
        self.interrupt.graceful = True
        self.timer.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends a save that is under way, unless the user wants out at once. Raises StorageError for a full disk."""
        if isinstance(error, Exception):
            try:
                self.saver.finish()
            except RLFlowError as failure:
                logger.warning("the checkpoint that was being written is lost: %s", failure)
        try:
            self._stack.close()
        except OSError as failure:  # a sink that cannot write its last lines; what went wrong first says more
            if error is None:
                raise self._disk_full(failure) if failure.errno in DISK_FULL else failure from None
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise self._disk_full(error) from error

    def _disk_full(self, error: OSError) -> StorageError:
        latest = self.directory.latest_checkpoint()
        left = "there is no checkpoint yet" if latest is None else f"the newest checkpoint is that of step {latest[0]}"
        where = error.filename or self.directory.path
        return StorageError(f"{where}: {error.strerror}; {left}. Free some space and continue with --resume")

    def _build_rollout(self, stack: ExitStack) -> None:
        self.progress.phase("preparing", "data, search index and engine")
        self.rollout = make_rollout(self.config)
        stack.callback(self.rollout.close)
        self.train_tasks, self.prompts_dropped = fitting_tasks(self.rollout, self.config.data.train_split, self.config)
        self.val_tasks, _ = fitting_tasks(self.rollout, self.config.data.val_split, self.config)

    def _build_trainer(self, stack: ExitStack) -> None:
        self.progress.phase("loading", "the trainer")
        self.trainer = make_trainer(self.config)
        stack.callback(self.trainer.close)

    def _open_directory(self, stack: ExitStack, log: MemoryHandler) -> None:
        section = self.config.run
        opened = RunDirectory.create(run_path(self.config), resume=section.resume, overwrite=section.overwrite)
        self.directory = stack.enter_context(opened)
        stack.push(lambda kind, *_: self.directory.discard_unless_begun() if kind else None)
        file = _LogFile(self.directory.log, encoding="utf-8")
        stack.callback(file.close)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.setTarget(file)
        stack.callback(log.setTarget, None)
        log.flush()
        log.flushLevel = logging.DEBUG  # from now on every record is written at once
        save_config(self.config, self.directory.config)

    def _resume(self) -> None:
        if self.algorithm.loss.needs_reference:
            self.trainer.snapshot("reference")  # the starting policy; a checkpoint that holds its own replaces it
        chosen = self.directory.saved.choose(self.config.run.resume_step) if self.config.run.resume else None
        if chosen is None:
            return
        self.step, path = chosen
        try:
            state = read_state(path)
            self.trainer.load(path / TRAINER)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{error} {self.directory.saved.advice(self.step)}") from error
        self.rollout.load_state_dict(state["rollout"])
        self.first_evaluation, self.last_evaluation = state["first_evaluation"], state["last_evaluation"]
        self._evaluated_step, self._seconds_before = state["evaluated_step"], state["seconds"]
        self._saved_step = self.step
        self.rollout.load_weights(self.trainer.weights(), version=self.step)
        for aside in self.directory.saved.set_aside_after(self.step):
            logger.warning("resume: the newer checkpoint is set aside as %s; remove it when it is not needed", aside)
        logger.info("resumed after step %d from %s", self.step, path)

    def _open_metrics(self, stack: ExitStack) -> None:
        # Without a checkpoint nothing is kept, the evaluation before the first step included: it is made again.
        resumed_step = self.step if self._saved_step >= 0 else -1
        sinks = make_sinks(
            self.directory.path,
            self.config.metrics.sinks,
            run_name=self.config.run.name,
            config=redact(to_dict(self.config)),
            resumed_step=resumed_step,
        )
        self.metrics = stack.enter_context(MetricsLog(self.directory.path, sinks, resumed_step=resumed_step))

    # ------------------------------------------------------------ between steps

    def next_tasks(self) -> list[Task]:
        """The tasks of the present step: each epoch is a permutation of the training tasks, a function of seed and epoch."""
        count, total = self.config.rollout.prompts_per_step, len(self.train_tasks)
        places = [divmod(self.step * count + offset, total) for offset in range(count)]
        orders = {epoch: self._order(epoch) for epoch in {epoch for epoch, _ in places}}
        return [self.train_tasks[orders[epoch][index]] for epoch, index in places]

    def _order(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self.train_tasks)))
        if self.config.data.shuffle:
            random.Random(f"{self.config.run.seed}/{epoch}").shuffle(order)
        return order

    def should_stop(self) -> bool:
        """Whether a signal came, the time is up, or the target is reached."""
        limit, target = self.config.run.max_minutes, self.config.run.target
        if self.interrupt.requested:
            return True
        if limit is not None and self._seconds() > limit * 60:
            logger.info("stopping: run.max_minutes = %g is over", limit)
            return True
        score = self.last_evaluation.get("eval/exact_match", self.last_evaluation.get("eval/reward"))
        return target is not None and score is not None and score >= target

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def finish_step(self, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        """Counts the step and writes its metrics and some of its trajectories."""
        self.step += 1
        elsewhere = {f"memory/{phase}_gib": peak for phase, peak in self.trainer.peak_memory().items()}
        measured = highest([self.timer.take(), elsewhere])
        metrics = {**metrics, **measured, "data/prompts_dropped": float(self.prompts_dropped)}
        position = self.step * self.config.rollout.prompts_per_step
        metrics["data/epoch"] = position / len(self.train_tasks)
        if "time/search_s" in metrics:
            metrics["time/search_share"] = metrics["time/search_s"] / metrics["time/step_s"]
        metrics["speed/tokens_per_s"] = metrics["train/fed_tokens"] / metrics["time/step_s"]
        self.metrics.log(self.step, metrics)
        self.progress.step(self.step, metrics)
        self.saver.poll()
        if self.config.metrics.trajectories_per_step:
            limit = self.config.metrics.trajectories_per_step
            write_trajectories(self.directory.trajectories(self.step), groups, limit=limit)

    def evaluation_due(self) -> bool:
        """Whether to evaluate now: before the first step with `at_start`, and every `every_steps`; never twice at a step."""
        section = self.config.evaluation
        every = section.at_start if self.step == 0 else section.every_steps and self.step % section.every_steps == 0
        return bool(every) and self._evaluated_step != self.step and not self.interrupt.requested

    def evaluate(self, evaluate: Callable[..., Evaluation], questions: int | None = None) -> None:
        """Evaluates the first `questions` validation tasks (None: evaluation.questions) and writes metrics and trajectories."""
        section = self.config.evaluation
        count = self._questions(section.questions) if questions is None else questions
        with self.timer.phase("evaluate"):
            result = evaluate(self.rollout, self.val_tasks[:count], step=self.step,
                              samples_per_prompt=section.samples_per_prompt, temperature=section.temperature)  # fmt: skip
        self.first_evaluation = self.first_evaluation or result.metrics
        self.last_evaluation, self._evaluated_step = result.metrics, self.step
        taken = self.timer.take()
        measured = {name: taken[name] for name in ("time/evaluate_s", "memory/evaluate_gib")}
        self.metrics.log(self.step, {**result.metrics, **measured})
        self.progress.evaluated(self.step, result.metrics)
        write_trajectories(self.directory.evaluations(self.step), result.groups)
        if self.config.metrics.picture:
            self._draw()

    def _questions(self, limit: int | None) -> int:
        return len(self.val_tasks) if limit is None else min(limit, len(self.val_tasks))

    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every_steps
        return every > 0 and self.step % every == 0

    def save(self) -> None:
        """Writes a checkpoint of the present step, or begins to; a kill leaves the one before."""
        with self.timer.phase("checkpoint"):
            self.saver.save(self.step, self._state())
        self._saved_step = self.step

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rollout": self.rollout.state_dict(),
            "first_evaluation": self.first_evaluation,
            "last_evaluation": self.last_evaluation,
            "evaluated_step": self._evaluated_step,
            "seconds": self._seconds(),
        }

    # ------------------------------------------------------------ the end

    def finish(self, evaluate: Callable[..., Evaluation]) -> dict[str, Any]:
        """Saves; unless a signal ended the run, evaluates, exports and draws. Writes and returns the summary."""
        interrupted, section = self.interrupt.requested, self.config.evaluation
        if self._saved_step != self.step:
            self.save()  # first: the last evaluation may take long, and a kill in it must not cost a step
        self.saver.finish()
        final, usual = (self._questions(limit) for limit in (section.final_questions, section.questions))
        if not interrupted and (self._evaluated_step != self.step or final != usual):
            self.evaluate(evaluate, questions=final)
            self.saver.update_state(self.step, self._state())
        written = {"run": self.directory.path, "metrics": self.directory.metrics,
                   "checkpoint": self.directory.checkpoint_path(self.step)}  # fmt: skip
        export_gap = None
        if not interrupted and self.config.checkpoint.export:
            export_gap = self._export()
            written["export"] = self.directory.export
        if self.config.metrics.picture and self._draw():
            written["picture"] = self.directory.picture
        summary = {
            "status": f"interrupted by {interrupted}" if interrupted else "finished",
            "steps": self.step,
            "seconds": round(self._seconds(), 1),
            "first_evaluation": self.first_evaluation,
            "last_evaluation": self.last_evaluation,
            "export_logprob_difference": export_gap,
            "written": {name: str(path) for name, path in written.items()},
        }
        write_json(self.directory.summary, summary)
        self.progress.finished(summary)
        return summary

    def _export(self) -> float:
        """Writes the HuggingFace directory and compares its log-probs with the trainer's."""
        self.progress.phase("exporting")
        weights = self.trainer.weights()
        write_model(self.directory.export, weights, reference=self.config.model.path, overwrite=True)
        gap = check_export(self.trainer, self.directory.export, tolerance=EXPORT_TOLERANCE[self.config.model.dtype])
        logger.info("export: log-probs within %.1e of the trainer's", gap)
        return gap

    def _draw(self) -> bool:
        return render_picture(self.directory.metrics, self.directory.picture, title=self.config.run.name)


class _LogFile(logging.FileHandler):
    """A log that a full disk cuts short without a word: what needs the disk more stops the run and says why."""

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def _log() -> Iterator[MemoryHandler]:
    """rlflow's log, kept until its handler has a file to write to."""
    handler = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL)
    logging.getLogger("rlflow").addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger("rlflow").removeHandler(handler)
        handler.close()
