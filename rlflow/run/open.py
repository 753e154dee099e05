"""Opens a run: checks and builds it, cheap parts first, and closes it in any case."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial

from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.early_scores import EarlyScores, Stage
from rlflow.algorithms.teachers.base import Classroom
from rlflow.cluster.placement import Placement
from rlflow.components import CURATOR
from rlflow.config.schema import RolloutSection, RunConfig, RunSection
from rlflow.errors import RLFlowError
from rlflow.preflight.estimates import run_sizes
from rlflow.preflight.gpu_memory import gpu_table
from rlflow.preflight.start import check_start, policy_architecture
from rlflow.report.findings import Watch
from rlflow.report.live import LivePage
from rlflow.report.recorder import Recorder
from rlflow.report.sinks import read_metrics
from rlflow.report.terminal import Progress, RunLog
from rlflow.report.timer import Clock, PhaseTimer
from rlflow.rollout.rollout import Rollout
from rlflow.run.assemble import (
    fitting_tasks,
    make_groups,
    make_metrics,
    make_probe,
    make_trainer,
    note_start,
    open_directory,
    trainable,
)
from rlflow.run.checkpoints import Saver
from rlflow.run.directory import RunDirectory, explain_unwritable, run_path
from rlflow.run.evaluate import EvaluationSchedule
from rlflow.run.export import check_own_family
from rlflow.run.gpus import make_placement
from rlflow.run.interrupt import InterpreterWatch, Interrupt, Watchdog
from rlflow.run.origin import fetch_models
from rlflow.run.resume import check_continuation, chosen_checkpoint, resume
from rlflow.run.rollout_workers import make_run_rollout
from rlflow.run.run import Run
from rlflow.trainer.base import Trainer

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
    clock, timer = Clock(), PhaseTimer()
    fetch_models(config)
    check_start(config)
    # First, to end ranks that are starting too
    interrupt = stack.enter_context(Interrupt())
    log = stack.enter_context(RunLog())
    stack.enter_context(InterpreterWatch(config.rollout.faults.call_s))
    check_continuation(config)
    progress, page = _displays(config, clock, stack)
    timer.on_enter = progress.phase
    progress.phase("preparing", "environment and engine")
    placement = _open_placement(config, progress, stack)
    rollout = trainable(stack.enter_context(make_run_rollout(config, placement)))
    metrics = progress.registered = rollout.environment.metrics
    rollout.on_episode = progress.episode
    data = config.data
    train_tasks, dropped = fitting_tasks(rollout, data.train_split, data.max_prompt_tokens)
    val_tasks, _ = fitting_tasks(rollout, data.val_split, data.max_prompt_tokens)
    algorithm = Algorithm.from_config(config, rollout.response_budget, rollout=rollout)
    stack.callback(algorithm.close)
    progress.phase("loading", "the trainer")
    trainer = _open_trainer(config, algorithm, rollout, placement, stack)
    evaluation = EvaluationSchedule(val_tasks, config.evaluation)
    progress.tasks_after = partial(evaluation.tasks_after, steps=config.run.steps)
    progress.message(_plan(config.run, config.rollout, len(train_tasks), len(evaluation.tasks())))
    samples = config.rollout.samples_per_prompt
    offered = {"tasks": train_tasks, "seed": config.run.seed, "samples": samples}
    source = CURATOR.build(config.data.curator, "data.curator", **offered)
    groups = make_groups(
        config.rollout, config.run.steps, rollout, source, train_tasks, algorithm.max_rounds
    )
    upcoming = stack.enter_context(closing(groups))
    probe = make_probe(rollout, trainer, train_tasks, config.model.dtype)
    # Only now: a failed start takes no directory, and `overwrite` throws nothing away
    directory = _open_files(config, log, page, stack)
    kept = config.metrics.trajectories_per_step
    saving = config.checkpoint.keep, config.checkpoint.asynchronous
    run = Run(
        config,
        directory=directory,
        algorithm=algorithm,
        rollout=rollout,
        trainer=trainer,
        source=source,
        evaluation=evaluation,
        saver=Saver(trainer, directory.saved, *saving),
        recorder=Recorder(directory, rollout.tokenizer, kept),
        progress=progress,
        interrupt=interrupt,
        clock=clock,
        timer=timer,
        probe=probe,
        upcoming=upcoming,
        watch=Watch(metrics),
        prompts_dropped=dropped,
    )
    _accompany(run, stack)
    resume(run)
    note_start(config, directory, metrics)  # only now: a refused one leaves the old ones
    evaluations = run.evaluation.made(run.saved_step)
    log_of_run = make_metrics(config, directory, run.saved_step, evaluations)
    run.metrics = stack.enter_context(log_of_run)
    # No warning of earlier sessions is said again
    run.watch.recall(read_metrics(run.directory.metrics))
    return run


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
    config: RunConfig, log: RunLog, page: LivePage | None, stack: ExitStack
) -> RunDirectory:
    """The run's directory, with its log; at the end with the page."""
    directory = stack.enter_context(open_directory(config.run))
    log.write_to(directory.log)
    if page is not None:
        page.run = directory.path
        stack.callback(page.write, directory.report)
    logger.info(
        "run %s: model %s, environment %s, %d steps",
        config.run.name,
        config.model.path,
        config.environment["name"],
        config.run.steps,
    )
    return directory


def _open_placement(config: RunConfig, progress: Progress, stack: ExitStack) -> Placement | None:
    """The ranks' places, for as long as the run is open, told with the engines' before anything is
    loaded."""
    placement = make_placement(config)
    if placement is not None:
        stack.callback(placement.close)
    sizes = run_sizes(config, policy_architecture(config.model.path))
    for line in gpu_table(sizes, placement):
        logger.info("%s", line)
        progress.message(line)
    return placement


def _displays(
    config: RunConfig, clock: Clock, stack: ExitStack
) -> tuple[Progress, LivePage | None]:
    """The run's progress, and the page where one is wanted."""
    checkpoint = chosen_checkpoint(config.run)
    progress = Progress(
        config.metrics.progress,
        steps=config.run.steps,
        title=config.run.name,
        first_step=checkpoint[0] if checkpoint else 0,
        clock=clock,
    )
    stack.callback(progress.close)
    if not config.metrics.page:
        return progress, None
    page = LivePage(progress)
    stack.callback(page.close)
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
