"""The turns of an episode with tools: calls are read from responses, results come as messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.environment import Environment
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Message, Step, Task
from rlflow_environments.common.text import well_formed
from rlflow_environments.common.tool_calls import (
    TextCall,
    read_calls,
    reader_of,
    tool_message,
)

MOST_CALLS = 16  # of one response
MOST_CHARACTERS = 8_000  # of one result
TOOL_METRICS = {
    "tool_calls": Metric("per episode", "calls of tools", shown="tools {:.2f}"),
    "tool_errors": Metric("per episode", "calls that were answered with an error"),
    "no_calls": Metric(
        "share",
        "of episodes without a call that could be read",
        alarm=0.99,
        advice="nearly no episode calls a tool: does the model's chat template show them, and does "
        "the model write calls in a form that is read (docs/write_an_environment.md)?",
    ),
}


class ToolCallError(Exception):
    """The policy called a tool wrongly; its text is the call's result."""


@dataclass(frozen=True)
class RuleScore:
    """What a finished episode is worth. rewards, metrics: as those of a Step."""

    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]


class ToolEnvironment(Environment):
    """Calls are made in the order of a response. One without a call, or the last of an episode,
    ends it and is scored; the calls of the last one are made before, as they may leave something
    behind. What the policy did wrong is a result that says so; whatever else fails aborts."""

    metrics: Mapping[str, Metric] = TOOL_METRICS
    _tasks: Mapping[str, Sequence[Task]]
    """Split -> tasks."""

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    @abstractmethod
    async def call(self, episode: Episode, call: TextCall) -> str:
        """The result of a call of a tool that is there. Raises ToolCallError."""

    @abstractmethod
    async def score(self, episode: Episode, messages: Sequence[Message]) -> RuleScore:
        """What the episode is worth. messages: all of it, the prompt and the last response too."""

    async def step(self, episode: Episode, response: str) -> Step:
        state = episode.scratch
        messages = state.setdefault("messages", list(episode.task.prompt))
        counts = state.setdefault(
            "counts", {"tool_calls": 0.0, "tool_errors": 0.0, "no_calls": 1.0}
        )
        messages.append({"role": "assistant", "content": response})
        calls = read_calls(response, reader_of(episode), self.tools)
        results = [await self._result(episode, call, counts) for call in calls[:MOST_CALLS]]
        for _ in calls[MOST_CALLS:]:
            results.append(f"Error: at most {MOST_CALLS} calls in one response.")
        answer = [tool_message(result) for result in results]
        over = self.is_over(episode)
        if calls and not over and episode.turns_left != 0:
            messages += answer
            return Step(answer, metrics=dict(counts))
        score = await self.score(episode, messages)
        return Step(
            answer,
            score.reward,
            over or (not calls and not episode.cut),
            {**counts, **score.metrics},
            rewards=score.rewards,
        )

    def is_over(self, episode: Episode) -> bool:
        """Whether something other than the policy ends the episode now."""
        return False

    async def _result(
        self, episode: Episode, call: TextCall | str, counts: dict[str, float]
    ) -> str:
        known = [tool["function"]["name"] for tool in self.tools]
        try:
            if isinstance(call, str):
                raise ToolCallError(call)
            if call.name not in known:
                raise ToolCallError(f"Error: the tools are {', '.join(known)}.")
            counts["tool_calls"] += 1
            counts["no_calls"] = 0.0
            return shortened(await self.call(episode, call))
        except ToolCallError as problem:
            counts["tool_errors"] += 1
            return shortened(str(problem))


def shortened(text: str) -> str:
    """The text in UTF-8, without the middle of a long one."""
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return well_formed(text)


def texts_of(arguments: dict[str, Any], *names: str) -> list[str]:
    """The values of arguments that must be texts. Raises ToolCallError."""
    for name in names:
        if not isinstance(arguments.get(name), str):
            raise ToolCallError(f"Error: '{name}' is missing, or no text.")
    return [arguments[name] for name in names]


def as_messages(prompt: str | list[Message], system: str | None = None) -> list[Message]:
    """A prompt for the chat template, behind the system's message."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*([{"role": "system", "content": system}] if system else []), *asked]
