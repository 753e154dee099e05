"""Rewards by name: functions of an episode's transcript. Those of rules are always logged, side by
side, as `score_<name>`."""

from __future__ import annotations

from rlflow_environments.common.transcript import Transcript
from rlflow_environments.search.rewards.make import (
    RULE_SCORES,
    RULES,
    Reward,
    Score,
    make_reward,
    rule_scores,
)

__all__ = ["RULES", "RULE_SCORES", "Reward", "Score", "Transcript", "make_reward", "rule_scores"]

BUILT_IN = {
    **{name: f"{rule.__module__}:{rule.__name__}" for name, rule in RULES.items()},
    "judge": "rlflow_environments.search.rewards.judge:Judge",
}
"""Rewards: name -> `module:Name`."""
