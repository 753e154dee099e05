"""An environment over another one: it answers as that does, and changes the rewards."""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rlflow.components import ENVIRONMENT
from rlflow.environment import Environment, awaited, last_step
from rlflow.errors import ConfigError, PolicyError, Problems, RLFlowError
from rlflow.report.metrics import scores
from rlflow.types import Episode, Step, Task
from rlflow.values import Component
from rlflow_environments.common.transcript import Transcript, as_text

Base = Component | Environment
"""An environment as a component ({name: ..., ...}), or one that was made."""


@dataclass(frozen=True)
class Played(Transcript):
    """An episode so far. metrics: the latest that the base gave. returned: the sum of its
    rewards."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    returned: float = 0.0


@dataclass
class Seen:
    """What a wrapper remembers of an episode; `own` is its subclass's."""

    responses: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    returned: float = 0.0
    own: dict[str, Any] = field(default_factory=dict)

    def played(self, task: Task) -> Played:
        return Played(
            task,
            tuple(self.responses),
            tuple(self.observations),
            dict(self.metrics),
            self.returned,
        )


class Wrapper(Environment):
    """Everything but the rewards is the base's: tasks, prompts, observations, stop strings, turn
    limit, tools, metrics (a wrapper adds its own), report, shutdown. A plain method of the base
    runs in a thread of the rollout, as it would without the wrapper; `rewarded` gets its step, in
    the event loop.

    An episode's state stands in its scratch under a key of the wrapper's own, so that wrappers can
    be stacked.
    """

    def __init__(self, base: Base) -> None:
        """Raises ConfigError where the base is no environment or has a metric of the wrapper's
        name."""
        made = (
            base if isinstance(base, Environment) else ENVIRONMENT.build(base, "environment.base")
        )
        if not isinstance(made, Environment):
            raise ConfigError(
                f"environment.base: expected an environment, found {type(made).__name__}."
            )
        self.base: Environment = made
        self._component = None if isinstance(base, Environment) else base
        self.stop = made.stop
        self.max_turns = made.max_turns
        self.tools = made.tools
        self.frame = made.frame
        self.depth: int = made.depth + 1 if isinstance(made, Wrapper) else 0
        self._key = f"wrapper {self.depth}"
        self.metrics = made.metrics
        self.add_metrics(type(self).metrics)

    @classmethod
    def rehearse(cls, **options: Any) -> tuple[Environment | None, list[RLFlowError]] | None:
        """See Environment: the base is rehearsed, and the wrapper made over it."""
        base: Base = options.pop("base")
        if isinstance(base, Environment):
            return None
        problems = Problems()
        known = problems.attempt(ENVIRONMENT.check, base, (), "environment.base")
        if known is None:
            return None, problems
        target, keywords = known
        rehearsal = (
            target.rehearse(**keywords)
            if isinstance(target, type) and issubclass(target, Environment)
            else None
        )
        if rehearsal is None:
            return None
        under, wrong = rehearsal
        problems.note(*wrong)
        return (None if under is None else problems.attempt(cls, base=under, **options)), problems

    def add_metrics(self, own: Mapping[str, Any]) -> None:
        """Registers metrics beside the base's. Raises ConfigError for a name that is taken."""
        if taken := sorted(set(own) & set(self.metrics)):
            raise ConfigError(
                f"environment: {type(self).__name__} reports {', '.join(taken)}, and so does its "
                f"base {type(self.base).__name__}; expected names of its own, or one such wrapper "
                "only."
            )
        self.metrics = {**self.metrics, **own}

    @functools.cached_property
    def held_out(self) -> frozenset[str]:
        """Ids of the tasks of `val`, for wrappers that remember tasks; none where there is no such
        split."""
        with contextlib.suppress(ConfigError):
            return frozenset(task.id for task in self.base.tasks("val"))
        return frozenset()

    def tasks(self, split: str) -> Sequence[Task]:
        return self.base.tasks(split)

    def task_problem(self, task: Task) -> str:
        return self.base.task_problem(task)

    def task_from_text(self, text: str) -> Task:
        return self.base.task_from_text(text)

    @property
    def takes_questions(self) -> bool:
        return self.base.takes_questions

    def reset(self, task: Task) -> Coroutine[Any, Any, Episode]:
        return self._begun(self.base.reset(task))

    def step(self, episode: Episode, response: str) -> Any:
        try:
            answer = self.base.step(episode, response)
        except PolicyError as fault:  # of a plain method, which runs in a thread: not here
            answer = _raised(fault)
        return self._answered(episode, response, answer)

    async def overflow(self, episode: Episode) -> Step | None:
        try:
            step = await self.base.overflow(episode)
        except PolicyError as fault:
            await self._faulted(episode, fault)
        answers = step is not None and episode.turns  # no prompt, which is nobody's observation
        return await self._taken(episode, step) if answers else step

    def sampled_at(self, temperature: float) -> None:
        self.base.sampled_at(temperature)

    def close(self, episode: Episode) -> Coroutine[Any, Any, None]:
        return awaited(self.base.close(episode))

    def report(self) -> dict[str, float]:
        return self.base.report()

    def worker_options(self) -> dict[str, Any]:
        own = self.base.worker_options()
        return {"base": {**self._component, **own}} if own and self._component else {}

    def shutdown(self) -> None:
        self.base.shutdown()

    @abstractmethod
    async def rewarded(self, episode: Episode, seen: Seen, step: Step) -> Step:
        """The base's step with the wrapper's rewards; `seen` holds it already. A PolicyError ends
        the episode as a wrong one; what else it raises aborts it."""

    async def _begun(self, begun: Any) -> Episode:
        episode: Episode = await awaited(begun)
        if isinstance(episode, Episode):  # the rollout says what is wrong with anything else
            # A score that an episode never reports is 0
            unseen = dict.fromkeys(scores(self.base.metrics), 0.0)
            episode.scratch[self._key] = Seen(metrics=unseen)
        return episode

    async def _answered(self, episode: Episode, response: str, answer: Any) -> Step:
        seen: Seen = episode.scratch[self._key]
        try:
            step: Step = await awaited(answer)
        except PolicyError as fault:
            seen.responses.append(response)
            return await self._faulted(episode, fault)
        if not isinstance(step, Step):
            return step
        seen.responses.append(response)
        return await self._taken(episode, step)

    async def _faulted(self, episode: Episode, fault: PolicyError) -> NoReturn:
        """Raises the base's fault with what the wrapper makes of the base's last step."""
        seen: Seen = episode.scratch[self._key]
        step = await self._taken(episode, last_step(self.base, fault, seen.metrics))
        raise PolicyError(str(fault), step.reward, step.metrics, step.rewards) from fault

    async def _taken(self, episode: Episode, step: Step) -> Step:
        seen: Seen = episode.scratch[self._key]
        seen.observations.append(as_text(step.observation))
        seen.metrics |= step.metrics
        seen.returned += float(step.reward)
        try:
            return await self.rewarded(episode, seen, step)
        except PolicyError as fault:
            metrics = {**step.metrics, **fault.metrics}
            raise PolicyError(str(fault), fault.reward, metrics, fault.rewards) from fault


async def _raised(fault: PolicyError) -> NoReturn:
    raise fault


def over(episode: Episode, step: Step) -> bool:
    """Whether no response follows, as far as an environment can know: a token limit may also end
    the episode after this step."""
    return step.terminated or episode.turns_left == 0
