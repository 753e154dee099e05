"""The life of a run: checked and built in the order in which least is lost where it fails, closed in any case."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.early_scores import EarlyScores, Stage
from rlflow.algorithms.teachers.base import Classroom
from rlflow.components import CURATOR
from rlflow.config.schema import RunConfig
from rlflow.errors import RLFlowError
from rlflow.report.findings import Watch
from rlflow.report.live import LivePage
from rlflow.report.metrics import save_registered
from rlflow.report.sinks import read_metrics
from rlflow.report.terminal import Progress
from rlflow.report.timer import Clock, PhaseTimer
from rlflow.run.assemble import (
    fitting_tasks,
    make_groups,
    make_metrics,
    make_probe,
    make_trainer,
    open_directory,
    trainable,
)
from rlflow.run.checkpoints import Saver
from rlflow.run.directory import explain_unwritable
from rlflow.run.evaluate import EvaluationSchedule
from rlflow.run.interrupt import InterpreterWatch, Interrupt, Watchdog
from rlflow.run.log import RunLog
from rlflow.run.origin import fetch_models
from rlflow.run.preflight import check_start
from rlflow.run.recorder import Recorder
from rlflow.run.resume import check_continuation, chosen_checkpoint, resume
from rlflow.run.run import Run
from rlflow.run.workers import make_run_rollout
from rlflow.types import Task

logger = logging.getLogger(__name__)


@contextmanager
def open_run(config: RunConfig) -> Iterator[Run]:
    """A run at its first step, or at the checkpoint that it resumes from. Signals end it at once until it is open, between
    steps from then on. On an error the save under way is ended first, unless the user wants out at once.

    Raises RLFlowError where it cannot start; StorageError for a disk that is full, broken or gone, whenever that is met."""
    with ExitStack() as stack:
        run = _start(config, stack)
        parts = stack.pop_all()
    run.interrupt.graceful = True
    run.timer.take()
    try:
        yield run
    except BaseException as error:
        if isinstance(error, Exception):
            _end_save(run)
        with suppress(OSError):  # a sink that cannot write its last lines; what went wrong first says more
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
    interrupt = stack.enter_context(Interrupt())  # first: a signal while ranks start must end them too
    log = stack.enter_context(RunLog())
    stack.enter_context(InterpreterWatch(config.rollout.faults.call_s))
    check_continuation(config)
    progress, page = _displays(config, clock, stack)
    timer.on_enter = progress.phase
    progress.phase("preparing", "environment and engine")
    rollout = trainable(stack.enter_context(make_run_rollout(config)))
    progress.registered, rollout.on_episode = rollout.environment.metrics, progress.episode
    train_tasks, dropped = fitting_tasks(rollout, config.data.train_split, config)
    val_tasks, _ = fitting_tasks(rollout, config.data.val_split, config)
    algorithm = Algorithm.from_config(config, rollout.response_budget, rollout=rollout)
    stack.callback(algorithm.close)
    progress.phase("loading", "the trainer")
    trainer = make_trainer(config)
    stack.callback(trainer.close)
    if "reference" in algorithm.needs:
        trainer.snapshot("reference")  # the starting policy; a checkpoint that holds its own replaces it
    _open_teacher(algorithm, Classroom(trainer, rollout.tokenizer, rollout.prompt_tokens, config.rollout.temperature), stack)
    # Only now: a start that fails has neither taken a directory nor thrown away what `overwrite` is to replace.
    directory = stack.enter_context(open_directory(config))
    log.write_to(directory.log)
    if page is not None:
        page.run = directory.path
        stack.callback(page.write, directory.report)
    told = "run %s: model %s, environment %s, %d steps"
    logger.info(told, config.run.name, config.model.path, config.environment["name"], config.run.steps)
    save_registered(directory.environment_metrics, rollout.environment.metrics)
    source = CURATOR.build(config.data.curator, "data.curator", tasks=train_tasks, seed=config.run.seed)
    run = Run(
        config,
        directory=directory,
        algorithm=algorithm,
        rollout=rollout,
        trainer=trainer,
        source=source,
        evaluation=_schedule(val_tasks, config),
        saver=Saver(trainer, directory.saved, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous),
        recorder=Recorder(directory, rollout.tokenizer, config.metrics.trajectories_per_step),
        progress=progress,
        interrupt=interrupt,
        clock=clock,
        timer=timer,
        probe=make_probe(rollout, trainer, train_tasks, config.model.dtype),
        upcoming=stack.enter_context(closing(make_groups(config, rollout, source, train_tasks, algorithm.max_rounds))),
        watch=Watch(rollout.environment.metrics),
        prompts_dropped=dropped,
    )
    _accompany(run, stack)
    resume(run)
    run.metrics = stack.enter_context(make_metrics(config, directory, run.saved_step, run.evaluation.made(run.saved_step)))
    _recall(run)
    return run


def _displays(
    config: RunConfig, clock: Clock, stack: ExitStack
) -> tuple[Progress, LivePage | None]:
    """What the run tells how it goes, and the page where one is wanted."""
    checkpoint = chosen_checkpoint(config)
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
    """Who works beside the steps: what starts engines again, what scores groups early, the watchdog of a trainer in here."""
    run.rollout.outlive(run.restart_engines)
    if run.config.asynchrony.score_early:
        _score_early(run)
    if run.config.cluster.ranks == 0:
        stack.enter_context(Watchdog(run.timer, run.config.cluster.stall_timeout_s))


def _score_early(run: Run) -> None:
    """Lets what is frozen score groups as they end. A live policy as teacher, and the log-probs of the policy itself, are those
    of the step."""
    algorithm, stages = run.algorithm, dict[str, Stage]()
    if "reference" in algorithm.needs:
        stages["reference"] = lambda batch, tasks: batch.replace(
            reference_logprobs=run.trainer.score(batch, model="reference")["logprobs"]
        )
    if algorithm.teacher is not None and algorithm.teacher.frozen:
        stages["teacher"] = algorithm.teacher.fill
    if not stages:
        logger.info("rollout.asynchronous.score_early: neither a reference nor a frozen teacher is there to score early")
        return
    algorithm.early = EarlyScores(stages)
    run.rollout.on_group = algorithm.early.take


def _open_teacher(algorithm: Algorithm, classroom: Classroom, stack: ExitStack) -> None:
    if algorithm.teacher is not None:
        stack.callback(algorithm.teacher.close)
        algorithm.teacher.open(classroom)


def _schedule(tasks: Sequence[Task], config: RunConfig) -> EvaluationSchedule:
    section = config.evaluation
    return EvaluationSchedule(
        tasks,
        every_steps=section.every_steps,
        at_start=section.at_start,
        questions=section.questions,
        final_questions=section.final_questions,
    )


def _recall(run: Run) -> None:
    """Tells displays and watch what earlier sessions of a resumed run logged; what they warned of is not said again."""
    records = read_metrics(run.directory.metrics)
    run.progress.restore(records)
    run.watch.recall(records)


def _end_save(run: Run) -> None:
    try:
        run.saver.finish()
    except RLFlowError as failure:
        logger.warning("the checkpoint that was being written is lost: %s", failure)
