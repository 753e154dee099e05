"""What stands under `reward:` in a configuration, as a function of transcripts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlflow.errors import ConfigError, did_you_mean
from rlflow.types import Task
from rlflow_environments.common.options import check_options
from rlflow_environments.search.rewards.asearcher import asearcher_compat, asearcher_em, asearcher_f1
from rlflow_environments.search.rewards.score import Score
from rlflow_environments.search.rewards.searchr1 import searchr1_em, searchr1_em_format, searchr1_subem
from rlflow_environments.search.rewards.strict import strict_em
from rlflow_environments.search.rewards.transcript import Transcript

Rule = Callable[..., float]
Reward = Callable[[Transcript], Awaitable[Score]]

RULES: dict[str, Rule] = {
    "searchr1_em": searchr1_em,
    "searchr1_subem": searchr1_subem,
    "searchr1_em_format": searchr1_em_format,
    "asearcher_f1": asearcher_f1,
    "asearcher_em": asearcher_em,
    "asearcher_compat": asearcher_compat,
    "strict_em": strict_em,
}
"""Name -> (transcript, **options) -> reward."""
RULE_SCORES = tuple(f"score_{name}" for name in RULES)
"""Names of the metrics that `rule_scores` gives."""
JUDGE = "judge"
_PROBE = Transcript(Task("", "", answer=[""]), ("",))


def make_reward(component: str | Mapping[str, Any]) -> Reward:
    """A reward by name and options: {"name": "searchr1_em_format", "structure": 0.2}, or just the name.

    Names: those of RULES, and judge (an LLM; options: those of `judge.Judge`). Raises ConfigError for an unknown name or option.
    """
    options = {"name": component} if isinstance(component, str) else dict(component)
    name = options.pop("name", None)
    if name == JUDGE:
        from rlflow_environments.search.rewards.judge import Judge

        check_options("reward judge", options, (Judge,))
        return Judge(**_complete("reward judge", options, Judge))
    if name not in RULES:
        known = [*RULES, JUDGE]
        raise ConfigError(
            f"environment.reward: expected one of {', '.join(known)}, found {name!r}.{did_you_mean(str(name), known)}"
        )
    rule = RULES[name]
    check_options(f"reward {name}", options, (rule,))
    scored = functools.partial(rule, **options)
    scored(_PROBE)  # a wrong value of an option is found now, not in the first episode

    async def reward(transcript: Transcript) -> Score:
        return Score(scored(transcript))

    return reward


def rule_scores(transcript: Transcript) -> dict[str, float]:
    """`score_<name>` of every rule, with its default options."""
    return {name: rule(transcript) for name, rule in zip(RULE_SCORES, RULES.values(), strict=True)}


def _complete(where: str, options: Mapping[str, Any], schema: Callable[..., Any]) -> dict[str, Any]:
    """The options, if none that is required is missing. Raises ConfigError."""
    for name, parameter in inspect.signature(schema).parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(f"{where}: the option '{name}' is missing.")
    return dict(options)
