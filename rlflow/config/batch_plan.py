"""What a configuration amounts to: episodes, micro-batches, ranks and evaluations, as text for
people."""

from __future__ import annotations

import math

from rlflow.config.schema import RunConfig


def batch_plan(config: RunConfig) -> str:
    """The step as a table: what is sampled, what is trained, on which ranks; every number with its
    unit."""
    lines = [*_sampling_lines(config), *_training_lines(config), *_run_lines(config)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _sampling_lines(config: RunConfig) -> list[tuple[str, str]]:
    rollout = config.rollout
    prompts, samples, budget = (
        rollout.prompts_per_step,
        rollout.samples_per_prompt,
        rollout.max_total_tokens,
    )
    trajectories = prompts * samples
    limited = "max_turns" in config.environment  # in its own sense, which is known once it is made
    turns = (
        "environment.max_turns: responses"
        if limited
        else f"at most {_count(rollout.max_turns, 'response')}"
    )
    return [
        (
            "prompts",
            f"{prompts:,} per step; those over {min(config.data.max_prompt_tokens, budget - 1):,} tokens are dropped and counted",
        ),
        ("samples", f"{samples:,} per prompt"),
        ("trajectories", f"{trajectories:,} per step = {prompts:,} prompts x {samples:,} samples"),
        (
            "episode",
            f"{turns} of {rollout.max_response_tokens:,} tokens; "
            f"{budget:,} tokens with prompt and observations",
        ),
        *_ahead_lines(config),
        (
            "tokens",
            f"at most {trajectories * budget:,} per step = {trajectories:,} trajectories x {budget:,} tokens",
        ),
    ]


def _ahead_lines(config: RunConfig) -> list[tuple[str, str]]:
    asynchrony = config.asynchrony
    if not asynchrony.on:
        return []
    groups = (asynchrony.ahead + 1) * config.rollout.prompts_per_step
    age = _count(asynchrony.max_staleness, "update")
    return [
        (
            "asynchronous",
            f"at most {groups:,} prompts under way or waiting; no trained token older than {age}",
        )
    ]


def _training_lines(config: RunConfig) -> list[tuple[str, str]]:
    rollout, algorithm, trainer = config.rollout, config.algorithm, config.trainer
    ranks, layout = max(config.cluster.ranks, 1), trainer.layout
    data = layout.data_parallel(ranks)
    context = f" x {layout.context_parallel} context" if layout.context_parallel > 1 else ""
    chunks = f" ({layout.virtual_pipeline} chunks each)" if layout.virtual_pipeline > 1 else ""
    rows = rollout.prompts_per_step * rollout.samples_per_prompt // algorithm.minibatches_per_step
    packed = trainer.packing or layout.virtual_pipeline > 1
    counted = "sum of the rows' lengths" if packed else "rows x longest row"
    rows_per_microbatch = max(trainer.tokens_per_microbatch // rollout.max_total_tokens, 1)
    microbatches = math.ceil(rows / data / rows_per_microbatch)
    updates = algorithm.minibatches_per_step * algorithm.epochs_per_step
    where = "in this process" if config.cluster.ranks == 0 else "a Ray actor each"
    return [
        (
            "mini-batches",
            f"{algorithm.minibatches_per_step:,} of {rows:,} trajectories x {_count(algorithm.epochs_per_step, 'epoch')} "
            f"= {_count(updates, 'optimizer update')} per step",
        ),
        (
            "micro-batches",
            f"of {trainer.tokens_per_microbatch:,} tokens ({counted}): at most {microbatches:,} "
            "per mini-batch and data-parallel rank",
        ),
        (
            "ranks",
            f"{ranks:,} ({where}) = {layout.tensor_parallel} tensor x {layout.pipeline_parallel} pipeline{chunks}{context} x "
            f"{data} data parallel; {trainer.backend} trainer",
        ),
    ]


def _run_lines(config: RunConfig) -> list[tuple[str, str]]:
    run, evaluation, checkpoint = config.run, config.evaluation, config.checkpoint
    trajectories = run.steps * config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    minutes = f"; ends after {run.max_minutes:g} minutes" if run.max_minutes else ""
    target = f"; ends when the evaluation reaches {run.target:g}" if run.target is not None else ""
    questions = (
        "all tasks" if evaluation.questions is None else _count(evaluation.questions, "task")
    )
    return [
        ("run", f"{_count(run.steps, 'step')} = {trajectories:,} trajectories{minutes}{target}"),
        (
            "evaluation",
            f"{'at the start, ' if evaluation.at_start else ''}{_every(evaluation.every_steps)}; {questions}",
        ),
        (
            "checkpoints",
            f"{_every(checkpoint.every_steps)}; the newest {checkpoint.keep:,} are kept",
        ),
    ]


def _every(steps: int) -> str:
    return f"every {_count(steps, 'step')}" if steps else "at the end"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
