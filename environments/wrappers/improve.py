"""Prompts that show an earlier solution and what came of it, and ask for a better one."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Coroutine
from typing import Any

from rlflow.report.metrics import Metric
from rlflow.types import Episode, Observation, Step, Task
from rlflow.values import Share
from rlflow_environments.wrappers.wrapper import Base, Seen, Wrapper, over

LONGEST_TEXT = 4_000  # characters of a solution and of its output, the last ones

PROMPT = """{prompt}

An earlier solution:
{response}

What came of it:
{observation}

Write a better one."""


class ImprovePrompts(Wrapper):
    """A share of the episodes begins with an earlier solution of the same task and its output, and
    asks to improve it (RL for machine-learning-engineering agents, arXiv 2509.01684); the others
    begin from scratch. Rewards are the base's.

    The earlier solution is the last response of the best episode of its task so far, or of the
    `latest` one, with the base's observation. Each attempt draws for itself, so that attempts of a
    group may begin differently: an advantage that compares them (`grpo`) does not go with it, one
    attempt per prompt does, as in the paper. What is remembered is of this process, and of no task
    of the split `val`: observations may tell the answer.
    """

    metrics = {
        "improving": Metric("share", "of episodes that began with an earlier solution"),
        "improvement": Metric(
            "reward", "of such an episode, less that of the solution which it was shown"
        ),
    }

    def __init__(
        self, base: Base, share: Share = 0.5, *, latest: bool = False, seed: int = 0
    ) -> None:
        """share: of the episodes of tasks that have an earlier solution. seed: of the draws. Raises
        ConfigError."""
        super().__init__(base)
        self._share, self._latest = share, latest
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._known: dict[
            str, tuple[float, str, str]
        ] = {}  # (return, response, observation) by task

    def reset(self, task: Task) -> Coroutine[Any, Any, Episode]:
        return self._from_a_solution(super().reset(task))

    async def rewarded(self, episode: Episode, seen: Seen, step: Step) -> Step:
        """The base's step; the last one of an episode is remembered."""
        shown = seen.own.get("shown")
        metrics = {**step.metrics, "improving": float(shown is not None)}
        if over(episode, step):
            if shown is not None:
                metrics["improvement"] = seen.returned - shown
            response, observation = (
                seen.responses[-1][-LONGEST_TEXT:],
                seen.observations[-1][-LONGEST_TEXT:],
            )
            with self._lock:
                best = self._known.get(episode.task.id)
                better = best is None or self._latest or seen.returned > best[0]
                if better and episode.task.id not in self.held_out:
                    self._known[episode.task.id] = seen.returned, response, observation
        return dataclasses.replace(step, metrics=metrics)

    async def _from_a_solution(self, begun: Coroutine[Any, Any, Episode]) -> Episode:
        episode = await begun
        with self._lock:
            known = self._known.get(episode.task.id)
            if known is None or self._draw.random() >= self._share:
                return episode
        returned, response, observation = known
        seen: Seen = episode.scratch[self._key]
        seen.own["shown"] = returned
        prompt = improved(episode.task.prompt, response, observation)
        episode.task = dataclasses.replace(episode.task, prompt=prompt)
        return episode


def improved(prompt: Observation, response: str, observation: str) -> Observation:
    """The prompt, or its last message, with an earlier solution and what came of it."""
    if isinstance(prompt, str):
        return PROMPT.format(prompt=prompt, response=response, observation=observation)
    *before, last = prompt
    return [*before, {**last, "content": improved(last["content"], response, observation)}]


WRAPPER = ImprovePrompts
