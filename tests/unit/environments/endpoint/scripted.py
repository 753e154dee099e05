"""Episodes of agents without a model: what the policy says is a function of what it was fed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlflow.environment import Environment
from rlflow.net.calls import CallThreads
from rlflow.rollout import Completion, Sampling, Tokenizer
from rlflow.rollout.episodes import Attempt, EpisodeLimits, EpisodePlayer
from rlflow.types import Trajectory
from rlflow_environments.program.program import ProgramEnvironment

LIMITS = {"max_turns": 8, "max_response_tokens": 64, "max_total_tokens": 4096, "max_observation_tokens": None,
          "temperature": 1.0, "chat_template": False}  # fmt: skip
Says = Callable[[str, int], str]


class Fed:
    """`generate` of a policy that says, one byte a token, so that no text is tokenized as it would be, what a function makes
    of the text in front of it and the number of the response."""

    def __init__(self, tokenizer: Tokenizer, says: Says) -> None:
        self.tokenizer, self.says = tokenizer, says
        self.contexts: list[list[int]] = []
        self.said: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.report: dict[str, float] = {}  # the environment's

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, request_id: str
    ) -> Completion:
        text = self.says(self.tokenizer.decode(tokens, skip_special_tokens=False), len(self.said))
        ids = [token for letter in text for token in self.tokenizer.encode(letter)]
        stopped = any(stop in text for stop in sampling.stop)
        ids += [] if stopped else [self.tokenizer.eos_ids[0]]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        self.contexts.append(list(tokens))
        self.said.append(ids)
        self.samplings.append(sampling)
        return Completion(ids, [-0.5] * len(ids), [3] * len(ids), "length" if cut else "stop")


def rows(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return path


HEAD = "import asyncio, openai\n"


def environment(folder: Path, agent: str, **options: Any) -> ProgramEnvironment:
    (folder / "agent.py").write_text(HEAD + agent, encoding="utf-8")
    tasks = rows(folder / "tasks.jsonl", {"prompt": "Hi there", "answer": "secret"})
    return ProgramEnvironment(f"{folder / 'agent.py'}:agent", tasks, **options)


def play(
    environment: Environment, tokenizer: Tokenizer, says: Says, episodes: int = 1, **limits: Any
) -> tuple[list[Trajectory], Fed]:
    """Episodes of the environment's first task, at once, and what the policy was fed."""
    fed = Fed(tokenizer, says)
    threads = CallThreads(4, "test")
    player = EpisodePlayer(environment, tokenizer, EpisodeLimits(**{**LIMITS, **limits}), threads)
    task = environment.tasks("train")[0]

    async def all_of() -> list[Trajectory]:
        attempts = [
            Attempt(task, "g", f"r{number}", lambda turn: 0, number) for number in range(episodes)
        ]
        try:
            return await asyncio.gather(*(player.play(one, fed.generate) for one in attempts))
        finally:
            fed.report = environment.report()
            await asyncio.to_thread(environment.shutdown)

    try:
        return asyncio.run(all_of()), fed
    finally:
        threads.close()


def checked(one: Trajectory, fed: Fed) -> None:
    """Each response is trained once, by the ids that were sampled, behind exactly what was fed."""
    assert one.usable, one.error
    for turn, context, ids in zip(one.turns, fed.contexts, fed.said, strict=True):
        segment = one.segments[turn.segment]
        assert segment.tokens[: turn.stop].tolist() == context + ids and turn.start == len(context)
        assert segment.loss_mask[turn.start : turn.stop].all()
        assert (segment.versions[turn.start : turn.stop] == 3).all()
    assert sum(int(segment.loss_mask.sum()) for segment in one.segments) == sum(map(len, fed.said))
