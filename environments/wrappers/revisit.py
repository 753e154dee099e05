"""Episodes that begin where an earlier one failed."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from rlflow.net.calls import THREADS, CallThreads, call
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Step, Task
from rlflow.values import Share
from rlflow_environments.wrappers.wrapper import Base, Seen, Wrapper, over


class RevisitFailures(Wrapper):
    """A share of the episodes begins in the middle of the latest one of its task that failed:
    return-and-explore of VLAC (arXiv 2509.15937). Rewards are the base's, of the steps from there
    on.

    The way there is played in the base again, response by response, and stands in the prompt as
    text; its turns count as used. It begins from scratch where the base does not go that way twice,
    and where prompt or observations are messages. Each attempt draws for itself, so that an
    advantage that compares attempts (`grpo`) does not go with it. What is remembered is of this
    process, and of no task of the split `val`.
    """

    metrics = {"revisited": Metric("count", "turns of an earlier episode that this one began with")}

    def __init__(
        self, base: Base, share: Share = 0.25, *, success: float = 1.0, seed: int = 0
    ) -> None:
        """share: of the episodes of tasks that failed before. success: the least return that is
        none. seed: of the draws. Raises ConfigError."""
        super().__init__(base)
        self._share, self._success = share, success
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._threads = CallThreads(THREADS, "rlflow-revisit")
        self._failed: dict[str, list[str]] = {}  # the responses of the latest failure, by task

    def reset(self, task: Task) -> Coroutine[Any, Any, Episode]:
        return self._from_a_failure(task, super().reset(task))

    async def rewarded(self, episode: Episode, seen: Seen, step: Step) -> Step:
        """The base's step; an episode that ends as a failure is remembered, and what it began with
        too."""
        way: list[str] = seen.own.get("way", [])
        if way and step.replace:  # of the prompt nothing can be rewritten
            turns = {turn - len(way): text for turn, text in step.replace.items()}
            step.replace = {turn: text for turn, text in turns.items() if turn >= 0} or None
        if over(episode, step) and episode.task.id not in self.held_out:
            with self._lock:
                if seen.returned < self._success:
                    self._failed[episode.task.id] = [*way, *seen.responses]
                elif not way:
                    self._failed.pop(episode.task.id, None)
        return dataclasses.replace(step, metrics={**step.metrics, "revisited": float(len(way))})

    async def _from_a_failure(self, task: Task, begun: Coroutine[Any, Any, Episode]) -> Episode:
        episode = await begun
        with self._lock:
            said = self._failed.get(task.id, [])
            if (
                len(said) < 2
                or not isinstance(episode.task.prompt, str)
                or self._draw.random() >= self._share
            ):
                return episode
            way = said[: self._draw.randint(1, len(said) - 1)]
        text = episode.task.prompt
        try:
            for response in way:
                episode.turns += 1
                step = await self._aside("step", self.base.step, episode, response)
                if step.terminated or step.replace or not isinstance(step.observation, str):
                    break
                text += response + step.observation
            else:
                seen: Seen = episode.scratch[self._key]
                seen.own["way"] = way
                episode.task = dataclasses.replace(episode.task, prompt=text)
                opening = episode.opening or Step()
                episode.opening = dataclasses.replace(
                    opening, stop=step.stop, max_tokens=step.max_tokens
                )
                return episode
        except BaseException:
            await self._aside("close", self.base.close, episode)
            raise
        await self._aside("close", self.base.close, episode)
        again: Episode = await self._aside("reset", super().reset, task)
        return again

    async def _aside(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """What a method of the base answers, within the reset's deadline: a plain one may take its
        time."""
        return await call(self._threads, method, arguments, math.inf, name, name)

    def shutdown(self) -> None:
        self._threads.close()
        super().shutdown()


WRAPPER = RevisitFailures
