"""The engine over real vLLM: the contract, log-probs against transformers, stop strings, updates in flight.

Needs the interpreter of an environment with vLLM in RLFLOW_VLLM_PYTHON; `tests/run.sh --full` makes one where it can."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Tokenizer
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.vllm.buckets import HEAD, WeightNames
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from tests.unit.rollout.engine_contract import PROMPT, EngineContract, Make, Pairs, run, start
from tests.unit.rollout.vllm.real import (
    LONG,
    LONG_PROMPT,
    NEEDS_VLLM,
    Started,
    gap,
    probe,
    rollout_over,
    some_tokens,
)

pytestmark = NEEDS_VLLM


class TestRealVLLM(EngineContract):
    longer = 12

    async def a_while(self, engine: Engine) -> None:
        await some_tokens(engine)

    @pytest.fixture
    def make(self, untied: Started) -> Iterator[Make]:
        made: list[VLLMEngine] = []

        def new(**options: Any) -> VLLMEngine:
            if any(
                engine.version for engine in made
            ):  # a new engine has the weights of its directory
                untied.restore()
                made.clear()
            made.append(untied.borrow(**options))
            return made[-1]

        yield new
        untied.restore()

    @pytest.fixture
    def tokenizer(self, untied: Started) -> Tokenizer:
        return untied.tokenizer

    @pytest.fixture
    def weights(self, untied: Started) -> Pairs:
        return list(iterate_weights(untied.others[0]))


# --- log-probs and stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_log_probs_are_those_of_transformers_at_the_sampling_temperature(
    head: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    vllm: Started = request.getfixturevalue(head)

    async def sample() -> list[Completion]:
        engine = vllm.borrow()
        prompts = (PROMPT, LONG_PROMPT, LONG_PROMPT)  # the third one finds the second in the cache
        return [
            await engine.generate(prompt, Sampling(40, temperature, seed=5)) for prompt in prompts
        ]

    for prompt, done in zip((PROMPT, LONG_PROMPT, LONG_PROMPT), run(sample())):
        assert len(done.tokens) == 40 and set(done.versions) == {0}
        assert gap(done, prompt, {0: vllm.score(vllm.path)}, temperature or 1.0) < 1e-5


def test_a_stop_string_over_several_tokens_ends_where_it_is_complete(untied: Started) -> None:
    async def sample(stop: tuple[str, ...]) -> Completion:
        return await untied.borrow().generate(PROMPT, Sampling(120, seed=2, stop=stop))

    decode = untied.tokenizer.decode
    free = run(sample(()))
    pairs = [(decode([one]), decode([other])) for one, other in zip(free.tokens, free.tokens[1:])]
    strings = {one[-1] + other for one, other in pairs if one and other and (one + other).isascii()}
    assert len(strings) >= 3
    for string in sorted(strings)[:6]:
        ends = next(count for count in range(1, 121) if string in decode(free.tokens[:count]))
        done = run(sample(("\x00never", string)))
        assert (done.stop, done.tokens) == (
            "stop",
            free.tokens[:ends],
        ) and done.logprobs == free.logprobs[:ends]


def test_the_history_of_an_episode_is_not_computed_again(untied: Started) -> None:
    async def turns() -> VLLMEngine:
        engine = untied.borrow()
        first = await engine.generate(LONG_PROMPT, Sampling(4, seed=1))
        await engine.generate([*LONG_PROMPT, *first.tokens, 9, 9], Sampling(4, seed=1))
        return engine

    engine = run(turns())
    assert engine.counts.reused >= 256  # two blocks of 128


def test_prompts_that_are_too_many_for_a_step_and_their_seeds(untied: Started) -> None:
    """On a CPU vLLM ends where a prompt with a seed is computed in parts."""
    prompts = [[(place * (7 + index)) % 290 + 5 for place in range(1500)] for index in range(8)]

    async def sample() -> list[Completion]:
        engine = untied.borrow()
        return list(
            await asyncio.gather(
                *(start(engine, prompt, 20, seed) for seed, prompt in enumerate(prompts))
            )
        )

    for prompt, done in zip(prompts, run(sample())):
        assert gap(done, prompt, {0: untied.score(untied.path)}, 1.0) < 1e-5


# --- updates in flight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_three_updates_in_flight_are_exact_to_the_token(
    head: str, request: pytest.FixtureRequest
) -> None:
    """Each token has the log-prob that the policy of its version gives it after the whole history, as if another one had
    computed nothing before."""
    vllm: Started = request.getfixturevalue(head)

    async def play() -> list[Completion]:
        engine = vllm.borrow()
        requests = [
            start(engine, prompt, LONG, seed)
            for seed, prompt in enumerate((PROMPT, LONG_PROMPT, LONG_PROMPT))
        ]
        for version, path in enumerate(vllm.others, start=1):
            await some_tokens(engine)
            await engine.load_weights(iterate_weights(path), version)
        after = await engine.generate(
            LONG_PROMPT, Sampling(20, seed=3)
        )  # its prompt was cached under older weights
        return [*await asyncio.gather(*requests), after]

    try:
        completions = run(play())
    finally:
        vllm.restore()
    scorers = {version: vllm.score(path) for version, path in enumerate((vllm.path, *vllm.others))}
    for done, prompt in zip(completions, (PROMPT, LONG_PROMPT, LONG_PROMPT, LONG_PROMPT)):
        assert gap(done, prompt, scorers, 1.0) < 1e-5
        assert done.versions == sorted(done.versions)
    assert set(completions[0].versions) == {0, 1, 2, 3} and set(completions[3].versions) == {3}
    assert all(set(done.versions) >= {1, 2, 3} for done in completions[:3])


def test_what_abort_and_pause_leave_can_be_continued_exactly(untied: Started) -> None:
    async def play() -> tuple[Completion, Completion, Completion]:
        engine = untied.borrow()
        requests = [
            start(engine, PROMPT, LONG, 1, request_id="a"),
            start(engine, PROMPT, LONG, 2, request_id="b"),
        ]
        await some_tokens(engine)
        await engine.abort("a")
        await requests[0]
        await engine.load_weights(iterate_weights(untied.others[0]), 4)
        await some_tokens(engine)
        await engine.pause("abort")
        aborted, paused = await asyncio.gather(*requests)
        await engine.resume()
        return (
            aborted,
            paused,
            await engine.generate([*PROMPT, *paused.tokens], Sampling(30, seed=9)),
        )

    try:
        aborted, paused, rest = run(play())
    finally:
        untied.restore()
    scorers = {0: untied.score(untied.path), 4: untied.score(untied.others[0])}
    assert (aborted.stop, paused.stop, rest.stop) == ("aborted", "paused", "length")
    assert (set(aborted.versions), set(paused.versions), set(rest.versions)) == ({0}, {0, 4}, {4})
    assert max(gap(done, PROMPT, scorers, 1.0) for done in (aborted, paused)) < 1e-5
    assert gap(rest, [*PROMPT, *paused.tokens], scorers, 1.0) < 1e-5


def test_a_head_that_stays_old_is_found_by_the_probe(
    tied: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = WeightNames.__init__

    def forgets_the_head(self: WeightNames, path: Path) -> None:
        original(self, path)
        self.tied, self.expected = False, self.expected - {HEAD}

    with rollout_over(tied) as rollout:
        rollout.load_weights(iterate_weights(tied.others[0]), 1, probe(tied.score(tied.others[0])))
    monkeypatch.setattr(WeightNames, "__init__", forgets_the_head)
    with rollout_over(tied) as rollout:
        with pytest.raises(RolloutError, match=r"differ by .* nats on a token of the probe"):
            rollout.load_weights(
                iterate_weights(tied.others[1]), 1, probe(tied.score(tied.others[1]))
            )
        monkeypatch.undo()
