"""Rewards by a rubric: weighted criteria, some of which may be gates."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.environment import awaited
from rlflow.errors import ConfigError, EnvironmentContractError, PolicyError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step
from rlflow.values import checked
from rlflow_environments.common.judge import make_judge
from rlflow_environments.common.threads import beside_the_loop
from rlflow_environments.wrappers.criteria import CRITERION, CriterionError
from rlflow_environments.wrappers.wrapper import Base, Played, Seen, Wrapper, over

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Criterion:
    """One line of a rubric. gate: the least score with which the others count at all; None: it is
    no gate."""

    name: str
    score: Callable[[Played], Any]
    weight: float
    gate: float | None


class RubricRewards(Wrapper):
    """When an episode ends, its reward is the weighted sum of its criteria's scores, in place of
    the base's rewards.

        reward = sum of weight * score, and 0 where a gate's score is below its least

    Every criterion is a named reward too, without its weight, for advantages that weigh them
    (`gdpo`); behind a gate that was not passed the others are 0, and not asked. Metrics:
    `rubric_<name>`, the score of each criterion that was judged. A criterion that cannot be judged
    raises: the episode is aborted and left out of loss and baseline; where the policy caused it
    (PolicyError), the criterion has its worst score. Source of the forms: OpenEnv
    (`WeightedSum`, `Gate`, `LLMJudge`), verifiers (`Rubric`). An episode that a token limit ends
    between two turns got no rewards.
    """

    def __init__(
        self,
        base: Base,
        criteria: Mapping[str, Any],
        *,
        judge: Mapping[str, Any] | None = None,
    ) -> None:
        """criteria: name -> {name: ..., weight: 1, gate: none, options}; names: pattern, metric,
        base_return, judge, functions (played, **options) -> number as `package.module:Name` or
        `file.py:Name`. judge: url, model and further options of JudgeEndpoint. Raises ConfigError,
        MissingPackageError.
        """
        super().__init__(base)
        if not criteria:
            raise ConfigError("environment.criteria: expected at least one criterion, found none.")
        self._judge = None if judge is None else make_judge(judge, "environment.judge")
        self._criteria = [self._criterion(str(name), given) for name, given in criteria.items()]
        self.add_metrics(
            {
                f"rubric_{one.name}": Metric("score", f"criterion {one.name} of the rubric")
                for one in self._criteria
            }
        )

    def _criterion(self, name: str, given: Any) -> Criterion:
        where = f"environment.criteria.{name}"
        component = CRITERION.component(given, where)
        weight = checked(float, component.pop("weight", 1.0), f"{where}.weight")
        gate = checked(float | None, component.pop("gate", None), f"{where}.gate")
        return Criterion(name, CRITERION.build(component, where, judge=self._judge), weight, gate)

    async def rewarded(self, episode: Episode, seen: Seen, step: Step) -> Step:
        """The base's step, without its reward until the last, which has the rubric's."""
        if not over(episode, step):
            return dataclasses.replace(step, reward=0.0)
        scores, passed = await self._scores(seen.played(episode.task))
        total = (
            math.fsum(one.weight * scores[one.name] for one in self._criteria) if passed else 0.0
        )
        named = {one.name: scores.get(one.name, 0.0) for one in self._criteria}
        if taken := sorted(set(named) & set(step.rewards)):
            raise EnvironmentContractError(
                "environment.criteria: expected names that no reward of the base has, found "
                f"{', '.join(taken)}; rename them."
            )
        metrics = {f"rubric_{name}": score for name, score in scores.items()}
        return dataclasses.replace(
            step,
            reward=total,
            rewards={**step.rewards, **named},
            metrics={**step.metrics, **metrics},
        )

    async def _scores(self, played: Played) -> tuple[dict[str, float], bool]:
        """(the scores of all criteria, True), or (those up to the first gate that was not passed,
        False)."""
        scores: dict[str, float] = {}
        for one in self._criteria:
            if one.gate is not None:
                scores[one.name] = await _score(one, played)
                if scores[one.name] < one.gate:
                    return scores, False
        others = [one for one in self._criteria if one.gate is None]
        found = await asyncio.gather(*(_score(one, played) for one in others))
        return {
            **scores,
            **dict(zip((one.name for one in others), found, strict=True)),
        }, True

    def shutdown(self) -> None:
        """Ends the judge and the base."""
        if self._judge is not None:
            self._judge.close()
        super().shutdown()


async def _score(criterion: Criterion, played: Played) -> float:
    """Raises CriterionError for anything but a finite number, and what the criterion raises; where
    that blames the policy, the worst score of a judge's: 0, or 1 where more is worse."""
    length = sum(map(len, (*played.responses, *played.observations)))
    try:
        score = await beside_the_loop(length, lambda: criterion.score(played))
        score = await awaited(score)
    except PolicyError as fault:
        logger.info("criterion %s of task %s: %s", criterion.name, played.task.id, fault)
        return float(criterion.weight < 0)
    if isinstance(score, bool):
        return float(score)
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise CriterionError(
            f"criterion {criterion.name}: expected a finite number, found {score!r}."
        )
    return float(score)


WRAPPER = RubricRewards
