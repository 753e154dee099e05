"""Attempts that players in this process start and end one by one, and that go on over pauses and new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.sleeping import FIRST_WEIGHTS, FakeEngine
from rlflow.errors import EnvironmentContractError
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.continuation import Continued
from rlflow.rollout.deterministic import TurnSeeds
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.episodes import Attempt
from rlflow.rollout.players import Begun, Ended, Player
from rlflow.types import Episode, Step, Task, Trajectory
from tests.unit.rollout.asking import Asking

NEW_WEIGHTS = {"scale": torch.full((3,), 2.0), "shift": torch.zeros(2)}
PROMPT = [10, 20, 30]


class Slow(Asking):
    """A tool that takes its time, and knows when it was called."""

    def __init__(self, seconds: float = 0.2) -> None:
        super().__init__(turns=2)
        self.seconds = seconds
        self.calls: list[float] = []

    async def step(self, episode: Episode, response: str) -> Step:
        await asyncio.sleep(self.seconds)
        self.calls.append(time.monotonic())
        return await super().step(episode, response)


def over(tokenizer: Tokenizer, environment: Asking, **options: int) -> Rollout:
    return Rollout(FakeEngine(tokenizer, **options), environment, tokenizer, max_response_tokens=12)


def start(rollout: Rollout, player: Player, count: int) -> list[str]:
    names = [f"{number:03d}" for number in range(count)]
    player.start([
        Attempt(Task(f"t{number}", f"Question {number}?"), f"0:t{number}", name, TurnSeeds(rollout.seed, f"0:t{number}", 0), 0,
                f"0:t{number}/0")
        for number, name in enumerate(names)
    ])  # fmt: skip
    return names


def collected(player: Player, count: int) -> dict[str, Trajectory]:
    """The trajectories of the first `count` attempts that end."""
    ended: dict[str, Trajectory] = {}
    deadline = time.monotonic() + 20
    while len(ended) < count:
        assert time.monotonic() < deadline, "nothing comes any more"
        ended |= {
            item.request_id: item.trajectory
            for item in player.events(0.05)
            if isinstance(item, Ended)
        }
    return ended


def test_every_attempt_begins_and_ends_once_as_it_would_in_a_collection(
    tokenizer: Tokenizer,
) -> None:
    with over(tokenizer, Asking(turns=2)) as rollout:
        player, news = rollout.player(), []
        names = start(rollout, player, 9)
        deadline = time.monotonic() + 20
        while sum(isinstance(item, Ended) for item in news) < 9 and time.monotonic() < deadline:
            news += player.events(0.05)
        assert sorted(item.request_id for item in news if isinstance(item, Begun)) == names
        flowed = {item.request_id: item.trajectory for item in news if isinstance(item, Ended)}
        tasks = [Task(f"t{number}", f"Question {number}?") for number in range(9)]
        groups = rollout.collect(tasks, step=0, samples_per_prompt=1)
    assert sorted(flowed) == names
    for name, group in zip(names, groups, strict=True):
        (expected,) = group.trajectories
        assert flowed[name].id == expected.id and flowed[name].reward == expected.reward
        assert torch.equal(flowed[name].segments[0].tokens, expected.segments[0].tokens)


def test_no_more_attempts_play_at_a_time_than_the_engine_says(tokenizer: Tokenizer) -> None:
    environment = Slow(0.05)
    with over(tokenizer, environment, max_concurrency=2) as rollout:
        player = rollout.player()
        start(rollout, player, 6)
        time.sleep(0.04)
        assert sum(isinstance(item, Begun) for item in player.events()) == 2
        collected(player, 6)


def test_a_cancelled_attempt_is_cleaned_up_and_never_heard_of(tokenizer: Tokenizer) -> None:
    environment = Slow(30.0)
    with over(tokenizer, environment) as rollout:
        player = rollout.player()
        names = start(rollout, player, 3)
        while len(environment.episodes) < 3:
            time.sleep(0.01)
        player.cancel(names[:2])
        assert [environment.closed[id(episode)] for episode in environment.episodes] == [1, 1, 0]
        assert {item.request_id for item in player.events(0.1)} <= {names[2]}
        player.close()
        assert sorted(environment.closed.values()) == [1, 1, 1]


def test_tools_go_on_while_the_engine_is_paused_and_nothing_is_sampled(
    tokenizer: Tokenizer,
) -> None:
    environment = Slow(0.15)
    with over(tokenizer, environment) as rollout:
        (engine,) = rollout.engines
        player = rollout.player()
        start(rollout, player, 2)
        while engine.steps == 0:
            time.sleep(0.005)
        time.sleep(0.05)  # both tools run
        rollout.pause("keep")
        paused, steps = time.monotonic(), engine.steps
        time.sleep(0.4)
        assert engine.steps == steps and any(call > paused for call in environment.calls)
        rollout.load_weights(NEW_WEIGHTS.items(), version=1)
        ended = collected(player, 2)
    versions = [one.segments[0].versions[one.segments[0].loss_mask] for one in ended.values()]
    assert all(
        found.tolist() == sorted(found.tolist()) and set(found.tolist()) == {0, 1}
        for found in versions
    )


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_weight_update_in_the_middle_costs_no_episode(mode: str, tokenizer: Tokenizer) -> None:
    """Tokens come from the seed alone in this engine, so they are what they are without an update; log-probs are the weights'."""
    tasks = [Task(f"t{number}", f"Question {number}?") for number in range(4)]
    with over(tokenizer, Asking(turns=3)) as rollout:
        calm = rollout.collect(tasks, step=0, samples_per_prompt=1)
    with over(tokenizer, Asking(turns=3)) as rollout:
        player = rollout.player()
        start(rollout, player, 4)
        while rollout.engines[0].steps < 10:
            pass
        rollout.pause(mode)
        rollout.load_weights(NEW_WEIGHTS.items(), version=1)
        ended = collected(player, 4)
    for one, group in zip([ended[name] for name in sorted(ended)], calm, strict=True):
        (segment,), (expected,) = one.segments, group.trajectories[0].segments
        assert one.usable and torch.equal(segment.tokens, expected.tokens)
        sampled = segment.loss_mask
        scale = torch.where(segment.versions == 1, 2.0, 1.0)
        assert torch.allclose(
            segment.logprobs[sampled], (expected.logprobs * scale)[sampled], rtol=1e-5
        )


def test_who_has_more_turns_behind_goes_first_and_an_evaluation_before_all(
    tokenizer: Tokenizer,
) -> None:
    class Listening(FakeEngine):
        heard: list[tuple[str, int]] = []

        async def generate(
            self,
            tokens: Sequence[int],
            sampling: Sampling,
            request_id: str | None = None,
            priority: int = 0,
        ) -> Completion:
            self.heard.append((request_id or "", priority))
            return await super().generate(tokens, sampling, request_id, priority)

    with Rollout(
        Listening(tokenizer), Asking(turns=3), tokenizer, max_response_tokens=4
    ) as rollout:
        player = rollout.player()
        (name,) = start(rollout, player, 1)
        collected(player, 1)
        trained = [priority for request, priority in Listening.heard if request == name]
        rollout.collect([Task("e", "Question?")], step=-1, samples_per_prompt=1)
    assert trained == sorted(trained, reverse=True) and len(set(trained)) == 3
    assert {priority for request, priority in Listening.heard if request != name} == {0} and min(
        trained
    ) > 0


def test_a_mistake_of_the_set_up_reaches_whoever_asks_for_events(tokenizer: Tokenizer) -> None:
    class Wrong(Asking):
        async def step(self, episode: Episode, response: str) -> Step:
            return "no step"  # type: ignore[return-value]

    with over(tokenizer, Wrong()) as rollout:
        player = rollout.player()
        start(rollout, player, 1)
        with pytest.raises(EnvironmentContractError, match=r"expected an rlflow\.Step"):
            for _ in range(100):
                player.events(0.05)


# --- requests that were cut off ---------------------------------------------------------------------------------------


class Cutting(FakeEngine):
    """Ends each request as paused after so many tokens; the weights change with each time."""

    def __init__(self, cuts: list[int], tokenizer: Tokenizer | None = None) -> None:
        super().__init__(tokenizer)
        self.cuts, self.limits = cuts, []

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        self.limits.append(sampling.max_tokens)
        whole = await super().generate(tokens, sampling, request_id, priority)
        if not self.cuts:
            return whole
        count = self.cuts.pop(0)
        await self.load_weights(FIRST_WEIGHTS.items(), self.version + 1)
        return Completion(
            whole.tokens[:count], whole.logprobs[:count], whole.versions[:count], "paused"
        )


def test_what_was_cut_off_goes_on_with_the_tokens_that_it_has_and_the_versions_that_sampled_them() -> (
    None
):
    free = asyncio.run(FakeEngine().generate(PROMPT, Sampling(9, seed=5)))
    engine = Cutting([4, 0, 3])
    done = asyncio.run(Continued(engine, str).generate(PROMPT, Sampling(9, seed=5), "a"))
    assert done.tokens == free.tokens and done.stop == "length" and engine.limits == [9, 5, 5, 2]
    assert done.versions == [0] * 4 + [2] * 3 + [3] * 2 and len(done.logprobs) == 9


class Letters:
    """A letter per token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_string_is_found_on_both_sides_of_an_interruption(cut: int) -> None:
    """Three letters, of which `cut` were sampled when it came; with all three the request had ended before."""
    letters: Any = Letters()
    text = letters.decode(asyncio.run(FakeEngine().generate(PROMPT, Sampling(30, seed=2))).tokens)
    sampling = Sampling(30, stop=("never", text[12:15]), seed=2)
    assert text.index(text[12:15]) == 12
    cuts = [12 + cut] if cut < 3 else []
    done = asyncio.run(
        Continued(Cutting(cuts, letters), letters.decode).generate(PROMPT, sampling, "a")
    )
    assert (letters.decode(done.tokens), done.stop) == (text[:15], "stop")
    assert done.versions == [0] * (12 + cut) + [1] * (3 - cut)  # nothing was drawn twice
    assert len(done.logprobs) == 15


def test_what_only_looks_like_a_stop_string_stays_as_it_was_drawn() -> None:
    letters: Any = Letters()
    free = asyncio.run(FakeEngine().generate(PROMPT, Sampling(30, seed=2)))
    text = letters.decode(free.tokens)
    engine = Cutting([13], letters)
    sampling = Sampling(30, stop=(text[12] + "\x00", text[11:13] + "\x00\x00"), seed=2)
    done = asyncio.run(Continued(engine, letters.decode).generate(PROMPT, sampling, "a"))
    assert (done.tokens, done.stop) == (free.tokens, "length") and engine.limits == [30, 4, 13]
    assert done.versions == [0] * 13 + [1] * 17


@pytest.mark.parametrize(("count", "routed", "oldest"), [(0, True, 1), (2, False, 1), (2, True, 0)])
def test_a_part_without_tokens_or_routes_does_not_date_those_of_the_whole(
    count: int, routed: bool, oldest: int
) -> None:
    """A request that was cut while its prompt was prefilled, one that had lost its blocks, and any other."""

    class Routed(Cutting):
        async def generate(self, tokens: list[int], *rest: Any) -> Completion:
            version, cut = self.version, bool(self.cuts)
            part = await super().generate(tokens, *rest)
            if routed or not cut:
                part.routes = torch.full(
                    (len(tokens) + max(len(part.tokens), 1) - 1, 1, 1), version
                )
                part.routes_version = version
            return part

    whole = asyncio.run(Continued(Routed([count]), str).generate(PROMPT, Sampling(4, seed=5), "a"))
    assert whole.routes is not None and len(whole.routes) == len(PROMPT) + 3
    assert whole.routes_version == oldest == int(whole.routes.min())
