"""A configuration's episodes, micro-batches, ranks and evaluations as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlflow.config.schema import (
    AlgorithmSection,
    Asynchrony,
    CheckpointSection,
    EvaluationSection,
    RolloutSection,
    RunConfig,
    RunSection,
)
from rlflow.trainer.options import TrainerOptions


def batch_plan(config: RunConfig) -> str:
    """A table of what a step samples and trains, and on which ranks."""
    trajectories = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    longest_prompt = min(config.data.max_prompt_tokens, config.rollout.max_total_tokens - 1)
    lines = [
        *_sampling_lines(config.rollout, longest_prompt, config.environment),
        *_training_lines(config.rollout, config.algorithm, config.trainer, config.cluster.ranks),
        *_run_lines(config.run, trajectories),
        *_schedule_lines(config.evaluation, config.checkpoint),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _sampling_lines(
    rollout: RolloutSection, longest_prompt: int, environment: Mapping[str, Any]
) -> list[tuple[str, str]]:
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    trajectories, budget = prompts * samples, rollout.max_total_tokens
    turns = f"at most {_count(rollout.max_turns, 'response')}"
    # In its own sense, which is known once it is made
    if "max_turns" in environment:
        turns = "environment.max_turns: responses"
    episode = f"{turns} of {rollout.max_response_tokens:,} tokens; {budget:,} tokens"
    tokens = f"at most {trajectories * budget:,} per step"
    return [
        (
            "prompts",
            f"{prompts:,} per step; over {longest_prompt:,} tokens they are dropped and counted",
        ),
        ("samples", f"{samples:,} per prompt"),
        (
            "trajectories",
            f"{trajectories:,} per step = {prompts:,} prompts x {samples:,} samples",
        ),
        ("episode", f"{episode} with prompt and observations"),
        *_ahead_lines(rollout.asynchronous, prompts),
        ("tokens", f"{tokens} = {trajectories:,} trajectories x {budget:,} tokens"),
    ]


def _ahead_lines(asynchrony: Asynchrony, prompts: int) -> list[tuple[str, str]]:
    if not asynchrony.on:
        return []
    groups = (asynchrony.ahead + 1) * prompts
    age = _count(asynchrony.max_staleness, "update")
    told = f"at most {groups:,} prompts under way or waiting; no trained token older than {age}"
    return [("asynchronous", told)]


def _training_lines(
    rollout: RolloutSection, algorithm: AlgorithmSection, trainer: TrainerOptions, actors: int
) -> list[tuple[str, str]]:
    """actors: ranks that are processes of their own; 0 for a trainer in this one."""
    ranks, layout = max(actors, 1), trainer.layout
    data = layout.data_parallel(ranks)
    context = f" x {layout.context_parallel} context" if layout.context_parallel > 1 else ""
    chunks = f" ({layout.virtual_pipeline} chunks each)" if layout.virtual_pipeline > 1 else ""
    rows = rollout.prompts_per_step * rollout.samples_per_prompt // algorithm.minibatches_per_step
    packed = trainer.packing or layout.virtual_pipeline > 1
    counted = "sum of the rows' lengths" if packed else "rows x longest row"
    rows_per_microbatch = max(trainer.tokens_per_microbatch // rollout.max_total_tokens, 1)
    microbatches = math.ceil(rows / data / rows_per_microbatch)
    updates = algorithm.minibatches_per_step * algorithm.epochs_per_step
    where = "a Ray actor each" if actors else "in this process"
    fed = f"{algorithm.minibatches_per_step:,} of {rows:,} trajectories"
    epochs = _count(algorithm.epochs_per_step, "epoch")
    size = f"of {trainer.tokens_per_microbatch:,} tokens ({counted})"
    split = f"{layout.tensor_parallel} tensor x {layout.pipeline_parallel} pipeline"
    split += f"{chunks}{context} x {data} data parallel; {trainer.backend} trainer"
    rank = "mini-batch and data-parallel rank"
    return [
        (
            "mini-batches",
            f"{fed} x {epochs} = {_count(updates, 'optimizer update')} per step",
        ),
        ("micro-batches", f"{size}: at most {microbatches:,} per {rank}"),
        ("ranks", f"{ranks:,} ({where}) = {split}"),
    ]


def _run_lines(run: RunSection, trajectories: int) -> list[tuple[str, str]]:
    """trajectories: of a step."""
    minutes = f"; ends after {run.max_minutes:g} minutes" if run.max_minutes else ""
    target = f"; ends when the evaluation reaches {run.target:g}" if run.target is not None else ""
    length = f"{_count(run.steps, 'step')} = {run.steps * trajectories:,} trajectories"
    return [("run", f"{length}{minutes}{target}")]


def _schedule_lines(
    evaluation: EvaluationSection, checkpoint: CheckpointSection
) -> list[tuple[str, str]]:
    asked, last = (
        "all tasks" if count is None else _count(count, "task")
        for count in (evaluation.questions, evaluation.final_questions)
    )
    asked += f", {last} at the end" if last != asked else ""
    start = "at the start, " if evaluation.at_start else ""
    kept = f"the newest {checkpoint.keep:,} are kept"
    return [
        ("evaluation", f"{start}{_every(evaluation.every_steps)}; {asked}"),
        ("checkpoints", f"{_every(checkpoint.every_steps)}; {kept}"),
    ]


def _every(steps: int) -> str:
    return f"every {_count(steps, 'step')}" if steps else "at the end"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
