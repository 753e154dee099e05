"""Run directories as the library itself writes them, from episodes that a test makes up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlflow.report.metrics import Metric, save_registered
from rlflow.report.recorder import TokenTexts, mean_advantage, segment_tokens
from rlflow.report.records import trajectory_record, write_trajectories
from rlflow.report.tokens import SegmentTokens, write_tokens
from rlflow.rollout import Tokenizer
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import write_json_lines
from rlflow.types import Group, Segment, StopReason, Task, Trajectory, Turn, stamp
from tests.fixtures import tiny_tokenizer
from tests.unit.rollout.chat_templates import QWEN3, Talk, dressed, played, user

REGISTERED = {
    "exact_match": Metric("share", "of questions answered", score=True, shown="EM {:.3f}")
}


def task(name: str, question: str = "", answer: str = "Vasmere", **metadata: Any) -> Task:
    question = question or f"Where was {name} born?"
    return Task(name, f"Question: {question}\n", [answer], {"question": question, **metadata})


def attempt(
    tokenizer: Tokenizer,
    of: Task,
    number: int,
    turns: Sequence[tuple[str, str]],
    *,
    step: int = 0,
    solved: bool = True,
    stop: StopReason = StopReason.TERMINATED,
    version: int = 0,
) -> Trajectory:
    """An episode of (response, observation) turns, tokenized as a rollout does it."""
    tokens, mask = tokenizer.encode(str(of.prompt)), [False] * len(tokenizer.encode(str(of.prompt)))
    played = []
    for place, (response, observation) in enumerate(turns):
        said, shown = tokenizer.encode(response), tokenizer.encode_text(observation)
        last = place == len(turns) - 1
        reward = float(solved and last)
        played.append(
            Turn(0, len(tokens), len(tokens) + len(said), reward, 0.25, response, observation)
        )
        tokens, mask = tokens + said, mask + [True] * len(said)
        if not last:
            tokens, mask = tokens + shown, mask + [False] * len(shown)
    sampled = torch.tensor(mask)
    noise = torch.rand(len(tokens), generator=torch.Generator().manual_seed(1000 * step + number))
    logprobs = torch.where(sampled, -3 * noise, torch.zeros(()))
    versions = torch.where(sampled, version, -1)
    segment = Segment(torch.tensor(tokens), sampled, logprobs, versions)
    group = f"{step}:{of.id}"
    metrics = {"exact_match": float(solved)}
    return Trajectory(of.id, group, [segment], played, float(solved), stop, metrics, attempt=number, prompt=str(of.prompt),
                      id=f"{group}/{number}")  # fmt: skip


def group_of(of: Task, attempts: Sequence[Trajectory]) -> Group:
    stamp(attempts)
    return Group(attempts[0].group_id, of, list(attempts))


def scored(trajectory: Trajectory, gap: float, advantage: float) -> list[SegmentTokens]:
    """Columns of a trainer that disagrees with the engine by `gap` nats per token."""
    found = []
    for segment in trajectory.segments:
        assert segment.logprobs is not None
        columns = {
            "logprobs": segment.logprobs,
            "trainer_logprobs": segment.logprobs - gap,
            "entropy": torch.full((len(segment),), 0.5),
            "advantages": torch.full((len(segment),), advantage),
        }
        found.append(segment_tokens(segment, columns, segment.loss_mask))
    return found


def write_step(
    path: Path,
    tokenizer: Tokenizer,
    step: int,
    groups: Sequence[Group],
    *,
    gap: float = 1e-6,
    tokens: bool = True,
) -> None:
    """The training episodes of a step, and their tokens."""
    directory = RunDirectory(path)
    rows, records = [], []
    for group in groups:
        rewards = np.array([trajectory.reward for trajectory in group.trajectories])
        for place, trajectory in enumerate(group.trajectories):
            segments = scored(trajectory, gap, float(rewards[place] - rewards.mean()))
            rows.append((trajectory, segments))
            records.append(
                {**trajectory_record(group, place), "advantage": mean_advantage(segments)}
            )
    write_json_lines(directory.trajectories(step), records)
    if tokens:
        write_tokens(directory.tokens(step), rows, TokenTexts(tokenizer).of)


def write_evaluation(path: Path, step: int, groups: Sequence[Group]) -> None:
    write_trajectories(RunDirectory(path).evaluations(step), groups)


def write_frame(
    path: Path, metrics: Sequence[dict[str, Any]], config: str = "run: {name: crafted}\n"
) -> Path:
    """What is in a run's directory beside its episodes."""
    path.mkdir(parents=True, exist_ok=True)
    directory = RunDirectory(path)
    directory.config.write_text(config)
    directory.metrics.write_text("".join(json.dumps(record) + "\n" for record in metrics))
    save_registered(directory.environment_metrics, REGISTERED)
    return path


def evaluated(step: int, score: float) -> dict[str, Any]:
    return {"step": step, "eval/exact_match": score, "eval/exact_match_low": score - 0.1, "eval/exact_match_high": score + 0.1,
            "eval/questions": 10.0}  # fmt: skip


def trained(
    step: int, score: float = 0.5, gap: float = 1e-6, seconds: float = 10.0
) -> dict[str, Any]:
    return {"step": step, "train/reward": score, "train/exact_match": score, "train/logprob_gap": gap, "time/step_s": seconds,
            "train/tokens": 1000.0}  # fmt: skip


SEARCHED = [
    (
        "<think>Look it up.</think><search>birthplace</search>",
        "\n<information>He came from Vasmere.</information>\n",
    ),
    ("<answer>Vasmere</answer>", ""),
]
GUESSED = [
    ("<search>birthplace</search>", "\n<information>Nothing of use.</information>\n"),
    ("<answer>Vasmere</answer>", ""),
]


def small_run(path: Path, tokenizer: Tokenizer) -> Path:
    """Two training steps of two groups each, evaluations at the start and the end in which one question changes."""
    names = ("Orvan", "Telmik")
    write_frame(path, [evaluated(0, 0.5), trained(1), trained(2), evaluated(2, 1.0)])
    for step in (1, 2):
        groups = []
        for hops, name in enumerate(names, start=1):
            of = task(name, hops=hops)
            attempts = [
                attempt(
                    tokenizer,
                    of,
                    number,
                    SEARCHED,
                    step=step - 1,
                    solved=number == 0,
                    version=step - 1,
                )
                for number in range(2)
            ]
            groups.append(group_of(of, attempts))
        write_step(path, tokenizer, step, groups)
    for step in (0, 2):
        groups = []
        for hops, name in enumerate(names, start=1):
            of = task(name, hops=hops)
            won = step == 2 or name == "Orvan"
            groups.append(
                group_of(of, [attempt(tokenizer, of, 0, SEARCHED, step=-1 - step, solved=won)])
            )
        write_evaluation(path, step, groups)
    return path


def forked_run(path: Path) -> Path:
    """A training step with an episode whose template forgets the first turn's thought at the second."""
    chat = dressed(tiny_tokenizer(path / "tokenizer"), QWEN3)
    of = task("Orvan")
    said = [chat.encode(text) for text in ("<think>\nhm\n</think>\n\nPark.", "Vasmere.")]
    one, _ = played(chat, [user(str(of.prompt))], said, Talk([[user("No.")]]))
    group, metrics = f"1:{of.id}", {**one.metrics, "exact_match": 0.0}
    one = dataclasses.replace(one, id=f"{group}/0", task_id=of.id, group_id=group, metrics=metrics)
    write_frame(path, [trained(1)])
    write_step(path, chat, 1, [group_of(of, [one])])
    return path
