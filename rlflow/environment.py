"""The Environment base class: text in, text out. Tokens are the Rollout's business."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.errors import ConfigError, EnvironmentContractError, PolicyError, RLFlowError
from rlflow.models.calls.reader import CallReader
from rlflow.report.metrics import Metric, scores
from rlflow.texts import wrong_name
from rlflow.types import Episode, Step, Task

MAX_REWARD = 1e18
"""Of a step, either way: statistics square differences of rewards, in float32, which ends at
3.4e38."""
EITHER_WAY = f"at most {MAX_REWARD:g} either way"


@dataclass(frozen=True)
class SaidTokens:
    """A response as tokens, for environments that pass it on to a program. prompt_tokens: fed in
    front of it. logprobs: of its tokens, nats; NaN where the engine knows none. texts: what each
    of its tokens adds, special ones included. calls: reads calls of tools in its text, as the
    model's chat template writes them."""

    prompt_tokens: int
    logprobs: Sequence[float]
    texts: Callable[[], list[str]]
    calls: CallReader = field(default_factory=CallReader)


class Environment(ABC):
    """One shared instance serves many episodes at the same time, so an episode's state lives in
    `episode.scratch`.

    `reset`, `step` and `close` may be plain or `async` methods; plain ones run in a thread. A
    PolicyError of `step` says that the policy is to blame: the episode ends as a wrong one, and
    counts. Any other exception that escapes from them, or a call that takes longer than
    `rollout.faults.call_s`, aborts the episode: it is counted and kept out of loss and group
    baseline."""

    stop: tuple[str, ...] = ()
    """Stop strings of every turn, unless a Step says otherwise. The matched string is part of the
    response."""

    max_turns: int | None = None
    """Most responses of an episode, where the environment sets the limit; it then takes the place
    of `rollout.max_turns`."""

    tools: tuple[dict[str, Any], ...] = ()
    """Tools as JSON schemas of functions, which the model's chat template presents in front of
    every prompt."""

    frame: tuple[str, str] = ("", "")
    """What stands at the least before and after the content of an observation. Where
    `rollout.max_observation_tokens` cuts one that ends with the latter, the end stays; a limit that
    is too small for both is an error at the start."""

    metrics: Mapping[str, Metric] = {}
    """What the numbers of `Step.metrics` (by their names) and of `report` (`section/name`) are: see
    `Metric`. One that is not here is a mean over the episodes that report it."""

    harmless_options: tuple[str, ...] = ()
    """Constructor keywords that `rlflow eval` takes from the run of a stranger, where their value
    is a number, true, false or one word: of those that can name no code, file, program or
    server."""

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        """The constructor keywords with which `tasks("val")` are those of the data at `path`
        (`rlflow eval --data PATH`).

        Raises ConfigError where such an environment takes no data.
        """
        raise ConfigError(
            f"--data: the environment {cls.__name__} takes no data (it has no evaluation_options), "
            f"found {path}; leave --data "
            "out, and set what the environment takes with environment.KEY=VALUE."
        )

    @classmethod
    def rehearse(cls, **options: Any) -> tuple[Environment | None, list[RLFlowError]] | None:
        """For `--dry-run`, with the constructor keywords of the configuration: (an environment that
        can be asked for its tasks, stop strings and tools, though not played; None where there is
        none, all problems that making it would meet). What is expensive is not built, nothing is
        started, nothing is left behind. None, the default: it is made as for a run."""
        return None

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of "train" or "val", in a fixed order."""

    def task_problem(self, task: Task) -> str:
        """Why no response to the task could be right, for `--dry-run`: its own answer, in the form
        that its prompt asks for, would be worth nothing. "", the default: nothing is known."""
        return ""

    def task_from_text(self, text: str) -> Task:
        """The task of a question that somebody types (`rlflow ask`), in the form of its own tasks,
        without an answer.

        Raises ConfigError where the environment makes no task of a text."""
        raise ConfigError(
            f"{type(self).__name__}: it makes no task of a text (it has no task_from_text), found "
            f"'{text[:60]}'; give it one "
            "that returns a Task, or ask in an environment of questions."
        )

    @property
    def takes_questions(self) -> bool:
        """Whether `task_from_text` makes tasks."""
        return type(self).task_from_text is not Environment.task_from_text

    async def reset(self, task: Task) -> Episode:
        """A fresh episode of the task. The prompt that the policy sees is `episode.task.prompt`."""
        return Episode(task)

    @abstractmethod
    def step(self, episode: Episode, response: str) -> Any:  # Step, or an awaitable of one
        """Answers one response of the policy (its text, without special
        tokens but those of its calls) with a Step."""

    async def overflow(self, episode: Episode) -> Step | None:
        """The prompt or the last observation left no room for a response: another Step in its
        place. None, the default, ends the episode as truncated; so does a Step that terminates.
        Where the model cannot be shown it at all, `episode.unshown` says why, and None raises
        that."""
        return None

    async def close(self, episode: Episode) -> None:
        """Called exactly once for every episode that was reset, also when it is aborted."""

    def sampled_at(self, temperature: float) -> None:
        """Told before the first episode: the temperature of training."""

    def report(self) -> dict[str, float]:
        """Numbers about all that happened since the last call, as `section/name`; called once per
        collection."""
        return {}

    def worker_options(self) -> dict[str, Any]:
        """Constructor keywords that differ in the copies of this environment that rollout workers
        make, so that they use what this one has started, a service for one."""
        return {}

    def shutdown(self) -> None:
        """Called when the rollout that used it is closed: frees what outlives episodes (processes,
        connections)."""


def check_episode(environment: Environment, answer: Any) -> None:
    """Raises EnvironmentContractError where `reset` answered no Episode."""
    if not isinstance(answer, Episode):
        raise EnvironmentContractError(
            f"{type(environment).__name__}.reset: expected an Episode as its result, found "
            f"{type(answer).__name__}."
        )


def stop_problem(stop: Any) -> str:
    """What is wrong with stop strings, or ""."""
    if isinstance(stop, (tuple, list)) and all(isinstance(text, str) and text for text in stop):
        return ""
    hint = f"; write ({stop!r},) with its comma" if isinstance(stop, str) and stop else ""
    return f"stop: expected a tuple of non-empty strings, found {stop!r:.60}{hint}"


METHODS = {
    "tasks": ("split",),
    "reset": ("task",),
    "step": ("episode", "response"),
    "overflow": ("episode",),
    "close": ("episode",),
}
"""What the methods of an environment are called with."""


def method_problems(environment: Any) -> dict[str, str]:
    """{method: what is wrong with its signature} of those that cannot be called as they are."""
    problems = {}
    for name, arguments in METHODS.items():
        try:
            signature = inspect.signature(getattr(environment, name))
        except (TypeError, ValueError):  # of no Python function
            continue
        try:
            signature.bind(*arguments)
        except TypeError:
            expected = f"expected {name}(self, {', '.join(arguments)})"
            takes = ", ".join(["self", *map(str, signature.parameters.values())])
            problems[name] = f"{name}: {expected}, found {name}({takes})"
    return problems


def metrics_problem(metrics: Any) -> str:
    """What is wrong with the declared metrics as a whole, or ""."""
    if isinstance(metrics, Mapping):
        return ""
    return f"metrics: expected {{name: rlflow.Metric}}, found {type(metrics).__name__}"


def check_form(environment: Environment) -> None:
    """Raises ConfigError where it is no environment, or its stop strings, its metrics or what its
    methods take are not an environment's."""
    if not isinstance(environment, Environment):
        told = f"expected an Environment, found {environment!r:.80}"
        raise ConfigError(f"{told}; of a class make one.")
    faults = [
        stop_problem(environment.stop),
        metrics_problem(environment.metrics),
        *method_problems(environment).values(),
    ]
    if problem := next(filter(None, faults), ""):
        raise ConfigError(f"environment {type(environment).__name__}: {problem}.")


def step_problem(step: Any) -> tuple[str, str] | None:
    """(kind, text) of the first fault of what `step` answered; None where there is none."""
    if not isinstance(step, Step):
        hint = " (is an `await` or a `return` missing?)" if step is None else ""
        return "step type", f"expected an rlflow.Step, found {type(step).__name__}{hint}"
    if not is_finite(step.reward):
        return "reward", f"reward: expected a finite number, found {step.reward!r}"
    if abs(step.reward) > MAX_REWARD:
        return "reward", f"reward: expected {EITHER_WAY}, found {step.reward!r}"
    for kind in ("rewards", "metrics"):
        if not isinstance(getattr(step, kind), Mapping):
            return kind, f"{kind}: expected {{name: number}}, found {getattr(step, kind)!r}"
    for kind in ("rewards", "metrics"):
        if problem := wrong_name(getattr(step, kind)):
            return kind, f"{kind}: {problem}"
    named = "expected names with finite numbers"
    for name, value in step.rewards.items():
        if not isinstance(name, str) or not is_finite(value) or abs(value) > MAX_REWARD:
            return "rewards", f"rewards: {named}, {EITHER_WAY}, found {name!r}: {value!r}"
    for name, value in step.metrics.items():
        if not isinstance(name, str) or not hasattr(value, "__float__"):
            return "metric", f"metrics: {named}, found {name!r}: {value!r}"
    if not isinstance(step.template_options or {}, Mapping):
        return (
            "template_options",
            f"template_options: expected {{name: value}}, found {step.template_options!r:.60}",
        )
    if not isinstance(step.replace or {}, Mapping):
        return "replace", f"replace: expected {{turn: text}}, found {step.replace!r}"
    for name, whole in (("after", step.after), ("max_tokens", step.max_tokens)):
        if whole is not None and not hasattr(whole, "__index__"):
            return name, f"{name}: expected a whole number or None, found {whole!r}"
    if step.max_tokens is not None and step.max_tokens < 0:
        told = f"expected at least 0 (no limit of its own), found {step.max_tokens!r}"
        return "max_tokens", f"max_tokens: {told}"
    if not is_finite(step.waited_s):
        return "waited_s", f"waited_s: expected a finite number, found {step.waited_s!r}"
    if problem := observation_problem(step.observation):
        return "observation", f"observation {problem}"
    if step.stop is not None and (problem := stop_problem(step.stop)):
        return "stop", problem
    if not isinstance(step.picture, str):
        return "picture", f"picture: expected text, found {type(step.picture).__name__}"
    return None


def observation_problem(observation: Any) -> str:
    """What is wrong with a prompt or observation, or ""."""
    if isinstance(observation, str):
        return ""
    if not isinstance(observation, list):
        return f"must be text or a list of messages, found {type(observation).__name__}"
    for message in observation:
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"has a message without role and content: {message!r}"
    return ""


def is_finite(value: Any) -> bool:
    """Whether it is a finite number, of Python, numpy or torch."""
    return hasattr(value, "__float__") and abs(value) < math.inf


def check_fields(environment: Environment, method: str, step: Any) -> None:
    """Raises EnvironmentContractError where a method answered no Step, or one with a fault."""
    if problem := step_problem(step):
        raise EnvironmentContractError(f"{type(environment).__name__}.{method}: {problem[1]}.")


def check_step(environment: Environment, step: Any, answered: int) -> None:
    """Raises EnvironmentContractError where `step` answered no Step, one with a fault, one that
    replaces anything but texts of the `answered` turns before, or follows a turn that is not
    there."""
    check_fields(environment, "step", step)
    where = f"{type(environment).__name__}.step"
    for turn, text in (step.replace or {}).items():
        known = isinstance(turn, int) and not isinstance(turn, bool) and 0 <= turn < answered
        if not known or not isinstance(text, str):
            raise EnvironmentContractError(
                f"{where}: replace: expected {{turn: text}} of the {answered} turns before, "
                f"counted from 0, found {turn!r}: {type(text).__name__}."
            )
    if step.after is not None and not -1 <= step.after <= answered:
        raise EnvironmentContractError(
            f"{where}: after: expected a turn from 0 to {answered}, or -1, found {step.after!r}."
        )
    beside_prompt = step.tools is not None or step.template_options
    if beside_prompt and step.after != -1:
        raise EnvironmentContractError(
            f"{where}: tools and template_options stand in front of a conversation; expected "
            f"after=-1 beside them, found {step.after!r}."
        )


def most_turns(environment: Environment, task: Task, most: int) -> int:
    """Responses that an episode of the task may have, where the run allows `most`."""
    most = most if environment.max_turns is None else environment.max_turns
    return most if task.most_turns is None else min(most, task.most_turns)


def note_response(episode: Episode, response: str, most: int) -> None:
    """Counts a response that no engine sampled, of an episode of at most so many: it stands for
    one token."""
    episode.turns += 1
    episode.turns_left = max(0, most - episode.turns)
    episode.sampled = SaidTokens(0, [math.nan], lambda: [response])


def last_step(environment: Environment, fault: PolicyError, earlier: Mapping[str, float]) -> Step:
    """The step that ends an episode which the policy made impossible to go on with, or to score.
    earlier: metrics that the episode has reported."""
    missing = {name: 0.0 for name in scores(environment.metrics) if name not in earlier}
    metrics = {**missing, **fault.metrics}
    return Step("", fault.reward, terminated=True, metrics=metrics, rewards=dict(fault.rewards))


async def answered(
    environment: Environment, episode: Episode, response: str, earlier: Mapping[str, float]
) -> Any:
    """What `step` answers, for callers without deadlines; a PolicyError is the last step."""
    try:
        return await awaited(environment.step(episode, response))
    except PolicyError as fault:
        return last_step(environment, fault, earlier)


async def awaited(answer: Any) -> Any:
    """What a method answered, plain or async."""
    return await answer if inspect.isawaitable(answer) else answer


__all__ = ["Environment", "Episode", "SaidTokens", "Step", "Task"]
