"""Policies that say what they are told, for the tests of protocols: to the environment, or as tokens to a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.sleeping import FakeEngine
from rlflow.environment import Environment, Step
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.engine import Completion, Sampling
from rlflow.types import Trajectory
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import Retriever


class Shelf(Retriever):
    """Finds the passages of a title; keeps what it was asked."""

    def __init__(self, **passages: str) -> None:
        self.passages = passages
        self.asked: list[str] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.asked += queries
        return [self._find(query)[:top_k] for query in queries]

    def _find(self, query: str) -> list[Passage]:
        titles = [title for title in self.passages if title.lower() in query.lower()]
        return [
            Passage(title, title, f'"{title}"\n{self.passages[title]}', f"doc://{title}")
            for title in titles
        ]


def converse(
    environment: Environment,
    responses: Sequence[str],
    *,
    split: str = "train",
    limit: int | None = None,
) -> list[Step]:
    """The Steps that the first task's episode answers the responses with. limit: of responses, which the environment is told."""

    async def play() -> list[Step]:
        episode = await environment.reset(environment.tasks(split)[0])
        steps = []
        for response in responses:
            episode.turns += 1
            episode.turns_left = None if limit is None else limit - episode.turns
            steps.append(await environment.step(episode, response))
        await environment.close(episode)
        return steps

    return asyncio.run(play())


class ScriptedEngine(FakeEngine):
    """Answers the n-th request of an episode with the n-th text, cut behind its first stop string and `overshoot`, as an engine
    does whose tokens do not end where the string does; a text without a stop string ends with the end-of-sequence token.

    Every sampled token has a log-prob of its own, so that a test can tell which tokens are trained.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], overshoot: str = "") -> None:
        super().__init__(tokenizer)
        self.encoder, self.texts, self.overshoot = tokenizer, texts, overshoot
        self.fed: list[list[int]] = []
        self.stops: list[tuple[str, ...]] = []
        self.sampled: list[int] = []

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        text = self.texts[len(self.fed)]
        self.fed.append(list(tokens))
        self.stops.append(sampling.stop)
        ends = [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]
        if ends:
            ids = self.encoder.encode(text[: min(ends)] + self.overshoot)
        else:
            ids = [*self.encoder.encode(text), self.encoder.eos_ids[0]]
        start = len(self.sampled)
        self.sampled += ids
        logprobs = [-1.0 - number for number in range(start, start + len(ids))]
        return Completion(ids, logprobs, [0] * len(ids), "stop")


def roll_out(
    environment: Environment, tokenizer: Tokenizer, texts: Sequence[str], **options: Any
) -> tuple[Trajectory, ScriptedEngine]:
    """(trajectory, engine) of one scripted attempt at the first training task."""
    engine = ScriptedEngine(tokenizer, texts, options.pop("overshoot", ""))
    limits = {
        "max_turns": 30,
        "max_total_tokens": 10**6,
        "max_response_tokens": 10**4,
        "samples_per_prompt": 1,
    }
    with Rollout(engine, environment, tokenizer, **{**limits, **options}) as rollout:
        (group,) = rollout.collect(environment.tasks("train")[:1])
    return group.trajectories[0], engine
