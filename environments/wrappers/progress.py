"""Dense rewards: how much closer to the goal each step came, as a pair-wise critic judges it."""

from __future__ import annotations

import dataclasses

from rlflow.environment import awaited
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step
from rlflow.values import Component
from rlflow_environments.common.threads import beside_the_loop
from rlflow_environments.common.transcript import as_text
from rlflow_environments.wrappers.critics import CRITIC, Pair, delta_and_done
from rlflow_environments.wrappers.progress_values import (
    Backward,
    negative_rate,
    next_value,
    value_order_correlation,
)
from rlflow_environments.wrappers.wrapper import Base, Seen, Wrapper


class ProgressRewards(Wrapper):
    """reward = outcome * base reward + progress * c(o_t, o_t+1), c in [-1, 1]      (VLAC, arXiv
    2509.15937)

    o_0 is the prompt, later ones the base's observations. A step that shows nothing, or the same
    again, is not asked about: c is 0. The critic's `done` ends the episode, as the base's own end
    does. Both terms are named rewards, `outcome` and `progress`, without their coefficients. A
    critic that cannot be asked raises, which aborts the episode.
    """

    metrics = {
        "progress_value": Metric(
            "share",
            "of the work that is done in the end: v + c (1 - v) after each step",
        ),
        "progress_order": Metric(
            "1",
            "value-order correlation (VOC): Spearman's of an episode's values with time",
        ),
        "progress_negative": Metric("share", "of an episode's steps that went back (NR)"),
        "progress_done": Metric("share", "of episodes that the critic says are done"),
    }

    def __init__(
        self,
        base: Base,
        critic: Component,
        *,
        progress: float = 1.0,
        outcome: float = 1.0,
        ends: bool = True,
        backward: Backward = "paper",
    ) -> None:
        """critic: {name: endpoint, url: ..., model: ...}, or a function (pair, **options) -> delta
        or (delta, done). progress, outcome: coefficients of the critic's reward and of the base's.
        ends: whether the critic's `done` ends the episode. backward: what a step back does to
        progress_value. Raises ConfigError, MissingPackageError.
        """
        super().__init__(base)
        self._critic = CRITIC.build(critic, "environment.critic")
        self._progress = progress
        self._outcome = outcome
        self._ends = ends
        self._backward = backward

    async def rewarded(self, episode: Episode, seen: Seen, step: Step) -> Step:
        """The base's step with the reward of its progress."""
        if not seen.own:
            prompt = as_text(episode.task.prompt).strip()
            seen.own = {"task": prompt, "last": prompt, "done": False}
            seen.own |= {"deltas": [], "values": [0.0]}
        own = seen.own
        delta, done = 0.0, False
        if own["last"] != seen.observations[-1].strip() != "":
            pair = Pair(own["task"], own["last"], seen.observations[-1].strip())
            own["last"] = pair.after
            length = sum(map(len, vars(pair).values()))
            answer = await beside_the_loop(length, lambda: self._critic(pair))
            delta, done = delta_and_done(await awaited(answer))
        own["deltas"].append(delta)
        own["values"].append(next_value(own["values"][-1], delta, self._backward))
        own["done"] = own["done"] or done
        metrics = {
            "progress_value": own["values"][-1],
            "progress_order": value_order_correlation(own["values"]),
            "progress_negative": negative_rate(own["deltas"]),
            "progress_done": float(own["done"]),
        }
        return dataclasses.replace(
            step,
            reward=self._outcome * step.reward + self._progress * delta,
            rewards={**step.rewards, "outcome": float(step.reward), "progress": delta},
            terminated=step.terminated or (self._ends and done),
            metrics={**step.metrics, **metrics},
        )

    def shutdown(self) -> None:
        """Ends the critic and the base."""
        if hasattr(self._critic, "close"):
            self._critic.close()
        super().shutdown()


WRAPPER = ProgressRewards
