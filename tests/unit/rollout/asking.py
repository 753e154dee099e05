"""An environment that asks on, and an engine that remembers: for the tests of collections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.environment import Environment
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling
from rlflow.types import Episode, Step, Task, Trajectory

OBSERVATION = "\n\n<information>Doc 1(Title: Orvan Telmik) é☃</information>\n\n"


class Asking(Environment):
    """Answers every response with a text, `turns` times; the reward is the share of vowels, also by name. Keeps count of its
    calls."""

    stop = ("e", "a", "i", "o", " ", "\n", "s", "t")

    def __init__(self, turns: int = 3, observation: Any = OBSERVATION) -> None:
        self.turns = turns
        self.observation = observation
        self.closed: Counter[int] = Counter()
        self.episodes: list[Episode] = []

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"t{index}", f"Question {index}: who wrote it?") for index in range(4)]

    async def reset(self, task: Task) -> Episode:
        episode = Episode(task)
        self.episodes.append(episode)
        return episode

    async def step(self, episode: Episode, response: str) -> Step:
        reward = sum(response.count(vowel) for vowel in "aeiou") / len(response or "x")
        named = {"vowels": reward}
        if episode.turns == self.turns:
            return Step("", reward, True, {"answered": 1.0}, rewards={**named, "patience": 1.0})
        return Step(
            self.observation,
            reward,
            metrics={"answered": 0.0, "searches": float(episode.turns)},
            rewards=named,
        )

    async def close(self, episode: Episode) -> None:
        self.closed[id(episode)] += 1


class RecordingEngine(EmbeddedEngine):
    """An embedded engine that keeps what it was fed and what it answered."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.calls: list[tuple[str, list[int], Sampling, Completion]] = []

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        completion = await super().generate(tokens, sampling, request_id, priority)
        self.calls.append((request_id or "", list(tokens), sampling, completion))
        return completion


def make(path: Path, tokenizer: Tokenizer, environment: Environment, **options: Any) -> Rollout:
    defaults = {"samples_per_prompt": 4, "max_response_tokens": 40, "max_turns": 4}
    return Rollout(
        RecordingEngine(path, tokenizer), environment, tokenizer, **{**defaults, **options}
    )


def all_trajectories(groups: Sequence[Any]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]
