"""Opens a run: checks and builds it, cheap parts first, and closes it in any case."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.base import Curator
from rlflow.algorithms.early_scores import EarlyScores, Stage
from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.cluster.placement import Placement
from rlflow.components import CURATOR
from rlflow.config.loading import to_dict
from rlflow.config.schema import (
    DataSection,
    MetricsSection,
    RolloutSection,
    RunConfig,
    RunSection,
)
from rlflow.errors import RLFlowError
from rlflow.preflight.estimates import RunSizes, run_sizes
from rlflow.preflight.gpu_memory import gpu_table
from rlflow.preflight.start import check_start, policy_architecture
from rlflow.report.alarms import Watch
from rlflow.report.recorder import Recorder
from rlflow.report.sinks import PAGE, PageSink, make_display, read_metrics
from rlflow.report.terminal import Progress, RunLog
from rlflow.report.timer import Clock, PhaseTimer
from rlflow.rollout.groups import Groups
from rlflow.rollout.rollout import Rollout
from rlflow.run.assemble import (
    fitting_tasks,
    make_engine_keeper,
    make_groups,
    make_metrics,
    make_trainer,
    open_directory,
    require_trainable,
    write_resolved_config,
)
from rlflow.run.checkpoints import Saver
from rlflow.run.directory import RunDirectory, explain_unwritable, run_path
from rlflow.run.evaluate import EvaluationSchedule
from rlflow.run.export import check_own_family
from rlflow.run.gpus import make_placement, store_bytes
from rlflow.run.interrupt import InterpreterWatch, Interrupt, Watchdog
from rlflow.run.origin import fetch_models
from rlflow.run.resume import check_continuation, chosen_checkpoint, resume
from rlflow.run.rollout_workers import make_run_rollout
from rlflow.run.run import Run
from rlflow.run.step_log import StepLog
from rlflow.trainer.base import Trainer
from rlflow.types import Task

logger = logging.getLogger(__name__)


@contextmanager
def open_run(config: RunConfig) -> Iterator[Run]:
    """A run at its first step, or at the checkpoint that it resumes from.

    Signals end it at once until it is open, then between steps. An error first ends the save under
    way, unless the user wants out at once. Raises RLFlowError where it cannot start, and
    StorageError for a disk that is full, broken or gone."""
    with ExitStack() as stack:
        run = _start(config, stack)
        gc.collect()
        gc.freeze()  # what is there by now stays: no collection need look at it again
        stack.callback(gc.unfreeze)
        parts = stack.pop_all()
    run.interrupt.graceful = True
    run.timer.take()
    try:
        yield run
    except BaseException as error:
        if isinstance(error, Exception):
            _end_save(run)
        with suppress(OSError):  # of a sink's last lines; the first error says more
            parts.close()
        explain_unwritable(error, run.directory)
        raise
    try:
        parts.close()
    except OSError as error:
        explain_unwritable(error, run.directory)
        raise


def _start(config: RunConfig, stack: ExitStack) -> Run:
    """Builds a run, what is cheap and fails first; `stack` closes it."""
    clock, timer = Clock(), PhaseTimer()
    fetch_models(config.model, config.algorithm)
    check_start(config)
    # First, to end ranks that are starting too
    interrupt = stack.enter_context(Interrupt())
    log_file = stack.enter_context(RunLog())
    stack.enter_context(InterpreterWatch(config.rollout.faults.call_s))
    check_continuation(config)
    progress, page = _displays(config.run, config.metrics, clock, stack)
    timer.on_enter = progress.phase

    sizes = run_sizes(config, policy_architecture(config.model.path))
    lora = config.trainer.lora
    stored = partial(store_bytes, config.model, sizes.engine, lora)
    placement = _open_placement(sizes, stored, progress, stack)
    rollout = _open_rollout(config, placement, progress, stack)
    tasks = _read_tasks(config.data, rollout)
    config.count_steps(len(tasks.train))
    progress.steps = config.run.steps
    algorithm = Algorithm.from_config(config, rollout.response_budget, rollout=rollout)
    stack.callback(algorithm.close)
    progress.phase("loading", "the trainer")
    trainer = _open_trainer(config, algorithm, rollout, placement, stack)
    evaluation = EvaluationSchedule(tasks.val, config.evaluation)
    progress.tasks_after = partial(evaluation.tasks_after, steps=config.run.steps)
    progress.message(_plan(config.run, config.rollout, len(tasks.train), len(evaluation.tasks())))
    source, groups = _open_groups(
        config.run, config.rollout, config.data, rollout, tasks.train, algorithm.max_rounds, stack
    )
    engines = make_engine_keeper(
        config.rollout, config.model.dtype, lora, rollout, trainer, tasks.train
    )

    # Only now: a failed start takes no directory, and `overwrite` throws nothing away
    directory = _open_files(config.run, log_file, page, stack)
    _log_start(config.run, config.model.path, config.environment["name"])
    recorder = Recorder(directory, rollout.tokenizer, config.metrics.trajectories_per_step)
    run = Run(
        config,
        directory=directory,
        algorithm=algorithm,
        rollout=rollout,
        trainer=trainer,
        source=source,
        upcoming=groups,
        evaluation=evaluation,
        saver=Saver(
            trainer, directory.saved, config.checkpoint.keep, config.checkpoint.asynchronous
        ),
        log=StepLog(recorder, progress, Watch(rollout.environment.metrics)),
        engines=engines,
        interrupt=interrupt,
        clock=clock,
        timer=timer,
        prompts_dropped=tasks.dropped,
    )
    _accompany(run, stack)
    resume(run)
    _begin_log(run, page, stack)
    return run


def _open_rollout(
    config: RunConfig, placement: Placement | None, progress: Progress, stack: ExitStack
) -> Rollout:
    """Engines and environment, whose episodes the terminal shows."""
    progress.phase("preparing", "environment and engine")
    rollout = stack.enter_context(make_run_rollout(config, placement))
    require_trainable(rollout)
    progress.registered = rollout.environment.metrics
    rollout.on_episode = progress.episode
    return rollout


@dataclass(frozen=True)
class _Tasks:
    """Those whose prompts fit. dropped: number of training tasks whose prompts are too long."""

    train: list[Task]
    val: list[Task]
    dropped: int


def _read_tasks(section: DataSection, rollout: Rollout) -> _Tasks:
    train, dropped = fitting_tasks(rollout, section.train_split, section.max_prompt_tokens)
    val, _ = fitting_tasks(rollout, section.val_split, section.max_prompt_tokens)
    return _Tasks(train, val, dropped)


def _open_groups(
    run: RunSection,
    section: RolloutSection,
    data: DataSection,
    rollout: Rollout,
    tasks: Sequence[Task],
    max_rounds: int,
    stack: ExitStack,
) -> tuple[Curator, Groups]:
    """What says which tasks come next, and the groups of attempts at them."""
    offered = {
        "tasks": tasks,
        "seed": run.seed,
        "samples": section.samples_per_prompt,
    }
    source = CURATOR.build(data.curator, "data.curator", **offered)
    groups = make_groups(section, run.steps, rollout, source, tasks, max_rounds=max_rounds)
    return source, stack.enter_context(closing(groups))


def _begin_log(run: Run, page: PageSink | None, stack: ExitStack) -> None:
    """Opens the metrics from the step on that the run resumes from. Only now: a refused resume
    leaves the old files as they are."""
    metrics = run.registered
    write_resolved_config(run.config, run.directory, metrics)
    evaluations = run.evaluation.made(run.saved_step)
    config = run.config
    log = make_metrics(
        config.metrics,
        config.run.name,
        to_dict(config),
        run.directory,
        run.saved_step,
        evaluations,
        page,
    )
    run.log.metrics = stack.enter_context(log)
    # No warning of earlier sessions is said again
    run.log.watch.recall(read_metrics(run.directory.metrics))


def _plan(run: RunSection, section: RolloutSection, tasks: int, asked: int) -> str:
    """What the run is about to do, and where it writes. asked: tasks of an evaluation."""
    each = f"{section.prompts_per_step} tasks x {section.samples_per_prompt} attempts"
    return (
        f"{run.steps:,} steps of {each}, from {tasks:,} tasks; evaluated on {asked:,}\n"
        f"all numbers, episodes and checkpoints: {run_path(run)}"
    )


def _open_trainer(
    config: RunConfig,
    algorithm: Algorithm,
    rollout: Rollout,
    placement: Placement | None,
    stack: ExitStack,
) -> Trainer:
    """The trainer, with the reference and the teacher that the algorithm needs."""
    trainer = make_trainer(config, placement)
    stack.callback(trainer.close)
    check_own_family(trainer, config.model.path, config.model.dtype)
    if "reference" in algorithm.needs:
        # The starting policy, unless the checkpoint holds another
        trainer.snapshot("reference")
    if algorithm.teacher is not None:
        temperature = config.rollout.temperature
        stack.callback(algorithm.teacher.close)
        algorithm.teacher.open(
            Classroom(trainer, rollout.tokenizer, rollout.prompt_tokens, temperature)
        )
    return trainer


def _open_files(
    section: RunSection, log: RunLog, page: PageSink | None, stack: ExitStack
) -> RunDirectory:
    """The run's directory, with its log, shown on the page."""
    directory = stack.enter_context(open_directory(section))
    log.write_to(directory.log)
    if page is not None:
        page.open(directory.path)
    return directory


def _log_start(run: RunSection, model: str, environment: str) -> None:
    line = "run %s: model %s, environment %s, %d steps"
    logger.info(line, run.name, model, environment, run.steps)


def _open_placement(
    sizes: RunSizes, stored: Callable[[], int], progress: Progress, stack: ExitStack
) -> Placement | None:
    """The ranks' places, for as long as the run is open, told with the engines' before anything is
    loaded. stored: bytes that Ray's object store holds."""
    placement = make_placement(sizes.cluster, sizes.engine, stored)
    if placement is not None:
        stack.callback(placement.close)
    for line in gpu_table(sizes, placement):
        logger.info("%s", line)
        progress.message(line)
    return placement


def _displays(
    run: RunSection, metrics: MetricsSection, clock: Clock, stack: ExitStack
) -> tuple[Progress, PageSink | None]:
    """The run's progress, and the page where one is wanted and can be had."""
    checkpoint = chosen_checkpoint(run)
    progress = Progress(
        metrics.progress,
        steps=run.steps,
        title=run.name,
        first_step=checkpoint[0] if checkpoint else 0,
        clock=clock,
    )
    stack.callback(progress.close)
    if not metrics.page:
        return progress, None
    page: PageSink | None = make_display(PAGE, "metrics.page", progress=progress)
    if page is not None:
        stack.callback(page.stop)
    return progress, page


def _accompany(run: Run, stack: ExitStack) -> None:
    """Starts what works beside the steps: restarts of engines, early scores, a watchdog."""
    run.rollout.outlive(run.restart_engines)
    if run.config.asynchrony.score_early:
        _score_early(run)
    if run.config.cluster.ranks == 0:
        stack.enter_context(Watchdog(run.timer, run.config.cluster.stall_timeout_s))


def _score_early(run: Run) -> None:
    """Lets frozen models score groups as they end; what follows the policy waits for the step."""
    algorithm, stages = run.algorithm, dict[str, Stage]()
    if "reference" in algorithm.needs:
        stages["reference"] = lambda batch, tasks: batch.replace(
            reference_logprobs=run.trainer.score(batch.replace(wanted=batch.trained), "reference")[
                "logprobs"
            ]
        )
    if algorithm.teacher is not None and algorithm.teacher.frozen:
        stages["teacher"] = algorithm.teacher.fill
    if not stages:
        logger.info("rollout.asynchronous.score_early: no reference and no frozen teacher is there")
        return
    algorithm.early = EarlyScores(stages)
    run.rollout.on_group = algorithm.early.take


def _end_save(run: Run) -> None:
    try:
        run.saver.finish()
    except RLFlowError as failure:
        logger.warning("the checkpoint that was being written is lost: %s", failure)
