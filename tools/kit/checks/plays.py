"""Episodes that the contract check played, and what they say of the environment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.environment import Environment, metrics_problem
from rlflow.errors import did_you_mean
from rlflow.report.metrics import Metrics, scores
from rlflow.types import Task

from .report import ContractReport


@dataclass
class Play:
    """A played episode. steps: (observation, reward, terminated) per turn; said: (response,
    observation); rewards: names of the named ones."""

    task: Task
    steps: list[tuple[Any, float, bool]] = field(default_factory=list)
    said: list[tuple[str, Any]] = field(default_factory=list)
    terminated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: set[str] = field(default_factory=set)
    failed: bool = False

    @property
    def reward(self) -> float:
        return math.fsum(reward for _, reward, _ in self.steps)


def check_metrics(report: ContractReport, declared: Metrics, names: Sequence[str]) -> None:
    """Looks for declared metrics that no episode reports, perhaps under another name."""
    strange = [name for name in names if name not in declared]
    silent = [name for name in declared if "/" not in name and name not in names]
    for name in silent:
        told = f"metrics['{name}'] is declared, but no episode reported it"
        alike = [one for one in strange if did_you_mean(one, [name])]
        if alike:
            report.breach(f"{told}; '{alike[0]}' was reported: did you mean '{name}' there?")
        elif strange and declared[name].score:
            report.breach(f"{told}; reported and not declared: {', '.join(strange)}")
        else:
            report.note(told)


def describe(
    report: ContractReport,
    environment: Environment,
    plays: Sequence[Play],
    max_turns: int,
    sets_stop: bool,
) -> None:
    """Adds the facts and notes of all plays. sets_stop: whether a Step had stop strings."""
    done = [play for play in plays if not play.failed and play.steps]
    if not done:
        return
    rewards = [play.reward for play in done]
    ended = sum(play.terminated for play in done)
    if ended == 0:
        report.note(f"no episode terminated within {max_turns} turns: all would be truncated")
    if min(rewards) == max(rewards):
        report.note(f"every episode returned {rewards[0]:g}: these agents found no other reward")
    turns = sum(len(play.steps) for play in done) / len(done)
    names = sorted({name for play in done for name in play.metrics})
    declared = {} if metrics_problem(environment.metrics) else environment.metrics
    check_metrics(report, declared, names)
    if not (environment.stop or sets_stop) and isinstance(done[0].task.prompt, str):
        report.note(
            "stop is empty: a response to a prompt of text ends where the model ends it, or at "
            "rollout.max_response_tokens; set stop, or rollout.chat_template=true"
        )
    for name in names:
        reporting = sum(name in play.metrics for play in done)
        if reporting < len(done) and name not in scores(declared):
            told = f"reported by {reporting} of {len(done)} episodes: its mean is over those"
            report.note(f"metric '{name}' is {told}")
    report.facts += [
        f"{len(done)} episodes: {ended} terminated, {turns:.1f} turns on average",
        f"returns from {min(rewards):g} to {max(rewards):g}",
        f"metrics: {', '.join(names) or 'none'}",
    ]
    named = sorted({name for play in done for name in play.rewards})
    if named:
        report.fact(f"named rewards: {', '.join(named)}")


def describe_player(report: ContractReport, plays: Sequence[Play], max_turns: int) -> None:
    """Adds the facts of a scripted player's plays, and a note where none came to an end."""
    done = [play for play in plays if not play.failed]
    if not done:
        return
    ended = sum(play.terminated for play in done)
    mean = statistics.fmean(play.reward for play in done)
    report.fact(f"the player: {len(done)} episodes, {ended} terminated, mean return {mean:g}")
    if ended == 0:
        report.note(f"the player ended no episode within {max_turns} turns")
