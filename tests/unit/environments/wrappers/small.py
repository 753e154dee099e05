"""A small environment to wrap, and episodes of any environment as the rollout would play them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlflow import Environment, Metric, Step, Task
from rlflow.net.calls import CallThreads, call
from rlflow.types import Episode


class Rooms(Environment):
    """Three rooms in a row: "on" goes one further, "out" ends the episode. Plain methods, as most environments have."""

    stop = ("\n",)
    max_turns = 8
    metrics = {
        "room": Metric("count", "the last room"),
        "left": Metric("share", "of episodes that ended", score=True),
    }

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.closed = self.shut = 0

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(f"{split}{number}", f"Walk {number}. ", answer="out")
            for number in range(self.size)
        ]

    def step(self, episode: Episode, response: str) -> Step:
        room = episode.scratch.get("room", 0) + ("on" in response)
        episode.scratch["room"] = room
        ended = "out" in response
        metrics = {"room": float(room), "left": float(ended)}
        return Step(
            f"You are in room {room}.\n",
            float(ended) * room,
            ended,
            metrics,
            rewards={"steps": 1.0},
        )

    async def close(self, episode: Episode) -> None:
        self.closed += 1

    def report(self) -> dict[str, float]:
        return {"rooms/closed": float(self.closed)}

    def shutdown(self) -> None:
        self.shut += 1


async def play(
    environment: Environment,
    responses: Sequence[str],
    turns_left: int | None = None,
    split: str = "train",
) -> list[Step]:
    """The steps of one episode; turns_left: after the last response."""
    task = environment.tasks(split)[0]
    threads = CallThreads(1, "test")
    episode = await call(threads, environment.reset, (task,), 60.0, "reset")
    steps = []
    try:
        for number, response in enumerate(responses, start=1):
            episode.turns += 1
            left = len(responses) - number
            episode.turns_left = left + turns_left if turns_left is not None else None
            steps.append(await call(threads, environment.step, (episode, response), 60.0, "step"))
    finally:
        await call(threads, environment.close, (episode,), 60.0, "close")
        threads.close()
    return steps


def played(
    environment: Environment,
    *responses: str,
    turns_left: int | None = None,
    split: str = "train",
) -> list[Step]:
    return asyncio.run(play(environment, responses, turns_left, split))
