"""Rewards by name, as functions of transcripts: `reward:` of a configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.components import Kind
from rlflow_environments.common.threads import beside_the_loop
from rlflow_environments.common.transcript import Transcript
from rlflow_environments.search.rewards.asearcher import (
    asearcher_compat,
    asearcher_em,
    asearcher_f1,
)
from rlflow_environments.search.rewards.searchr1 import (
    searchr1_em,
    searchr1_em_format,
    searchr1_f1_plus,
    searchr1_subem,
)


@dataclass(frozen=True)
class Score:
    """What a reward gives for an episode, and what there is to say about it."""

    value: float
    metrics: dict[str, float] = field(default_factory=dict)


Rule = Callable[..., float]
Reward = Callable[[Transcript], Awaitable[Score]]

RULES: dict[str, Rule] = {
    "searchr1_em": searchr1_em,
    "searchr1_subem": searchr1_subem,
    "searchr1_em_format": searchr1_em_format,
    "searchr1_f1_plus": searchr1_f1_plus,
    "asearcher_f1": asearcher_f1,
    "asearcher_em": asearcher_em,
    "asearcher_compat": asearcher_compat,
}
"""Name -> (transcript, **options) -> reward."""
RULE_SCORES = tuple(f"score_{name}" for name in RULES)
"""Names of the metrics that `rule_scores` gives."""
REWARD = Kind("reward", "rlflow_environments.search.rewards", call=1)
"""A rule, (transcript, **options) -> reward, or a class of options whose objects are a `Reward`."""


def make_reward(component: str | Mapping[str, Any]) -> Reward:
    """A reward by name and options: {"name": "searchr1_em_format", "structure": 0.2}, or just the
    name.

    Names: those of RULES, judge (an LLM; options: those of `judge.Judge`), those of installed
    packages, `package.module:Name` and `file.py:Name`. Raises ConfigError for an unknown name or
    option.
    """
    made = REWARD.build(component, "environment.reward")
    if not isinstance(made, functools.partial) or inspect.iscoroutinefunction(made.func):
        return made

    async def reward(transcript: Transcript) -> Score:
        length = sum(map(len, (*transcript.responses, *transcript.observations)))
        return Score(await beside_the_loop(length, lambda: made(transcript)))

    return reward


def rule_scores(transcript: Transcript) -> dict[str, float]:
    """`score_<name>` of every rule, with its default options."""
    return {name: rule(transcript) for name, rule in zip(RULE_SCORES, RULES.values(), strict=True)}
