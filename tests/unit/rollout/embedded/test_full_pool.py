"""A pool of keys and values that is too small for all: who waits, who gives way, and that nobody's tokens change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.errors import ConfigError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.embedded.block_manager import BLOCK_SIZE
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.embedded.scheduler import FIRST_WIDTH
from rlflow.rollout.engine import Completion, Sampling
from tests.rounding import margin
from tests.unit.rollout.asking import Asking, all_trajectories
from tests.unit.rollout.embedded.test_engine import assert_logprobs, random_rows, run


def free_tokens(engine: EmbeddedEngine) -> int:
    return engine._scheduler.block_manager.free * BLOCK_SIZE


def seed_of(index: int, turn: int) -> int:
    return 2000 + 10 * index + turn


async def three_turns(engine: EmbeddedEngine, index: int, temperature: float) -> list[Completion]:
    """An episode: its history grows by a response and an observation a turn; lengths are skewed."""
    tokens = random_rows([10 + 7 * (index % 5)], seed=index)[0]
    completions = []
    for turn in range(3):
        sampling = Sampling(
            5 + 40 * (index % 3 == 0) + turn, temperature, seed=seed_of(index, turn)
        )
        completions.append(await engine.generate(tokens, sampling, f"episode {index}"))
        tokens += completions[-1].tokens + random_rows([20], seed=100 * index + turn)[0]
        await asyncio.sleep(0)
    engine.release(f"episode {index}")
    return completions


Episodes = list[list[Completion]]


def play(engine: EmbeddedEngine, temperature: float) -> Episodes:
    async def together() -> Episodes:
        return await asyncio.gather(
            *(three_turns(engine, index, temperature) for index in range(12))
        )

    return asyncio.run(together())


@pytest.fixture(scope="module", params=[0.0, 1.0])
def temperature(request: pytest.FixtureRequest) -> float:
    return request.param


@pytest.fixture(scope="module")
def in_a_large_pool(qwen: Path, temperature: float) -> Episodes:
    large = EmbeddedEngine(qwen, max_concurrency=12)
    episodes = play(large, temperature)
    assert (large.statistics.preempted, large.statistics.evicted) == (0, 0)
    return episodes


def requests(episodes: Episodes) -> Iterator[tuple[list[int], Completion, int]]:
    """(prompt, completion, seed) of every turn."""
    for index, completions in enumerate(episodes):
        prompt = random_rows([10 + 7 * (index % 5)], seed=index)[0]
        for turn, completion in enumerate(completions):
            yield prompt, completion, seed_of(index, turn)
            prompt = prompt + completion.tokens + random_rows([20], seed=100 * index + turn)[0]


def test_no_token_of_these_episodes_depends_on_rounding(
    in_a_large_pool: Episodes, qwen: Path, temperature: float
) -> None:
    """Batches of other shapes round differently. That they choose the same tokens all the same is due to these seeds."""
    for prompt, completion, seed in requests(in_a_large_pool):
        assert margin(qwen, prompt, completion.tokens, temperature, seed) > 1


@pytest.mark.parametrize(
    "kv_tokens",
    [256, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (320, 512))],
)
def test_a_small_pool_gives_exactly_the_tokens_of_a_large_one(
    in_a_large_pool: Episodes, qwen: Path, temperature: float, kv_tokens: int
) -> None:
    """And their log-probs up to rounding."""
    small = EmbeddedEngine(qwen, max_concurrency=12, kv_tokens=kv_tokens, prefill_tokens=50)
    found = play(small, temperature)
    assert small.statistics.preempted > 0
    for (prompt, one, _), (_, other, _) in zip(
        requests(in_a_large_pool), requests(found), strict=True
    ):
        assert (one.tokens, one.stop) == (other.tokens, other.stop)
        assert_logprobs(qwen, prompt, other, temperature)
    assert free_tokens(small) == kv_tokens


def test_deterministic_collections_under_preemption_are_equal_bit_for_bit(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    def bits(kv_tokens: int) -> tuple[list[object], int]:
        engine = EmbeddedEngine(
            qwen, tokenizer, max_concurrency=8, kv_tokens=kv_tokens, deterministic=True
        )
        options = {
            "samples_per_prompt": 4,
            "max_response_tokens": 40,
            "max_total_tokens": 256,
            "deterministic": True,
        }
        with Rollout(engine, Asking(), tokenizer, **options) as rollout:
            groups = rollout.collect(Asking().tasks("train"))
        found = [
            (t.segments[0].tokens.tolist(), t.segments[0].logprobs.tolist())
            for t in all_trajectories(groups)
        ]
        return found, engine.statistics.preempted + engine.statistics.evicted

    first, gave_way = bits(320)
    assert gave_way > 0
    assert bits(320)[0] == first
    assert [tokens for tokens, _ in bits(8192)[0]] == [tokens for tokens, _ in first]


def test_deterministic_slots_are_freed_where_a_round_begins_whenever_their_episodes_ended(
    qwen: Path,
) -> None:
    """Else an environment's time would decide which blocks the next ones find, and those round as the batch that made them."""
    engine = EmbeddedEngine(qwen, max_concurrency=4, kv_tokens=320, deterministic=True)
    first, second = random_rows([40, 40])
    run(engine.generate(first, Sampling(4, seed=1), "a"))
    left = free_tokens(engine)
    engine.release("a")
    assert free_tokens(engine) == left < 320
    run(engine.generate(second, Sampling(4, seed=1), "b"))
    assert free_tokens(engine) == left


def test_a_group_larger_than_the_pool_could_hold_alone_shares_the_blocks_of_its_prompt(
    qwen: Path,
) -> None:
    (prompt,) = random_rows([6 * BLOCK_SIZE])
    engine = EmbeddedEngine(
        qwen, max_concurrency=8, kv_tokens=6 * BLOCK_SIZE + 8 * 2 * BLOCK_SIZE
    )  # 8 prompts: 48 blocks
    completions = run(*(engine.generate(prompt, Sampling(12, seed=seed)) for seed in range(8)))
    assert engine.statistics.preempted == 0
    assert engine.statistics.prefilled <= 6 * BLOCK_SIZE + 7
    for completion in completions:
        assert_logprobs(qwen, prompt, completion)


def test_prompts_with_a_common_beginning_compute_it_once(qwen: Path) -> None:
    common, *rests = random_rows([3 * BLOCK_SIZE + 5, 10, 20, 30])
    engine = EmbeddedEngine(qwen)
    completions = run(*(engine.generate(common + rest, Sampling(5, seed=1)) for rest in rests))
    assert engine.statistics.prefilled == len(common) + 10 + 20 + 30
    for rest, completion in zip(rests, completions):
        assert_logprobs(qwen, common + rest, completion)


def test_no_forward_pass_exceeds_the_budget_of_prompt_tokens(qwen: Path) -> None:
    prompts = random_rows([300, 20, 130, 77])
    engine = EmbeddedEngine(qwen, prefill_tokens=48)
    completions = run(
        *(engine.generate(prompt, Sampling(5, seed=1), f"{i}") for i, prompt in enumerate(prompts))
    )
    assert engine.statistics.largest_prefill == 48
    assert engine.statistics.prefilled == 300 + 20 + 130 + 77
    assert engine.statistics.steps >= 527 / 48
    for prompt, completion in zip(prompts, completions):
        assert_logprobs(qwen, prompt, completion)


def test_those_that_decode_go_on_while_a_long_prompt_is_prefilled(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, prefill_tokens=32)
    short, long = random_rows([10, 640])

    async def order() -> list[str]:
        ended: list[str] = []

        async def ask(name: str, prompt: list[int], count: int) -> None:
            await engine.generate(prompt, Sampling(count, seed=1))
            ended.append(name)

        await asyncio.gather(ask("short", short, 15), ask("long", long, 1))
        return ended

    assert asyncio.run(order()) == ["short", "long"]


def test_a_prompt_that_can_never_fit_is_one_clear_error_and_others_are_served(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, kv_tokens=4 * BLOCK_SIZE)
    assert engine.max_tokens == 4 * BLOCK_SIZE
    long, short = random_rows([4 * BLOCK_SIZE, 3 * BLOCK_SIZE])

    async def ask() -> list[Completion | BaseException]:
        requests = [
            engine.generate(prompt, Sampling(500, seed=1)) for prompt in (long, short, short)
        ]
        return await asyncio.gather(*requests, return_exceptions=True)

    refused, second, third = asyncio.run(ask())
    assert isinstance(refused, RolloutError)
    assert "a prompt of 128 tokens leaves no room in the 128 tokens" in str(refused)
    assert "engine.kv_tokens" in str(refused)
    for completion in (second, third):  # each fills the pool alone: they take turns
        assert (len(completion.tokens), completion.stop) == (BLOCK_SIZE, "length")
    assert engine.statistics.steps > 2 * (BLOCK_SIZE - 2)


@pytest.mark.parametrize("owner", [None, "episode"])
def test_an_aborted_or_cancelled_request_gives_its_memory_back(
    qwen: Path, owner: str | None
) -> None:
    engine = EmbeddedEngine(qwen, kv_tokens=16 * BLOCK_SIZE)
    prompts = random_rows([100, 90])

    async def leave_both() -> None:
        requests = [
            asyncio.ensure_future(engine.generate(prompts[0], Sampling(100), owner)),
            asyncio.ensure_future(engine.generate(prompts[1], Sampling(100), "waits")),
        ]
        while engine.statistics.decoded < 8:
            await asyncio.sleep(0)
        assert free_tokens(engine) < 16 * BLOCK_SIZE
        requests[0].cancel()
        await engine.abort("waits")
        await asyncio.gather(*requests, return_exceptions=True)

    asyncio.run(leave_both())
    for name in ("episode", "waits"):
        engine.release(name)
    assert free_tokens(engine) == 16 * BLOCK_SIZE


def test_histories_of_idle_episodes_give_way_and_are_computed_again(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, kv_tokens=8 * BLOCK_SIZE)
    history, other = random_rows([5 * BLOCK_SIZE, 6 * BLOCK_SIZE])
    (first,) = run(engine.generate(history, Sampling(4, seed=1), "idle"))
    run(engine.generate(other, Sampling(4, seed=2), "other"))
    assert engine.statistics.evicted == 1
    turn = history + first.tokens + other[:9]
    (second,) = run(engine.generate(turn, Sampling(4, seed=3), "idle"))
    assert_logprobs(qwen, turn, second)


def test_the_more_urgent_keeps_its_blocks_though_it_came_later(qwen: Path) -> None:
    prompts = random_rows([30, 40])

    async def order(priorities: tuple[int, int]) -> list[int]:
        engine = EmbeddedEngine(qwen, kv_tokens=5 * BLOCK_SIZE)  # both together grow to 7 blocks
        ended: list[int] = []

        async def ask(index: int) -> None:
            done = await engine.generate(
                prompts[index], Sampling(60, seed=index), f"{index}", priorities[index]
            )
            assert_logprobs(qwen, prompts[index], done)
            ended.append(index)

        first = asyncio.ensure_future(ask(0))
        while engine.statistics.decoded < 3:
            await asyncio.sleep(0)
        await asyncio.gather(first, ask(1))
        assert engine.statistics.preempted == 1
        return ended

    assert asyncio.run(order((0, 0))) == [0, 1]
    assert asyncio.run(order((0, -1))) == [1, 0]


def test_an_urgent_prompt_takes_its_blocks_from_those_that_run(qwen: Path) -> None:
    prompts = random_rows([70, 60])

    async def order(priority: int) -> list[int]:
        engine = EmbeddedEngine(
            qwen, kv_tokens=4 * BLOCK_SIZE
        )  # the first grows to 4 blocks, the second starts with 2
        ended: list[int] = []

        async def ask(index: int, count: int, urgency: int) -> None:
            done = await engine.generate(prompts[index], Sampling(count, seed=index), None, urgency)
            assert_logprobs(qwen, prompts[index], done)
            ended.append(index)

        first = asyncio.ensure_future(ask(0, 50, 0))
        while engine.statistics.decoded < 3:
            await asyncio.sleep(0)
        await asyncio.gather(first, ask(1, 20, priority))
        return ended

    assert asyncio.run(order(0)) == [0, 1]
    assert asyncio.run(order(-1)) == [1, 0]


def test_a_preempted_request_whose_tokens_fill_the_tables_goes_on(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=2, kv_tokens=480)
    completions = run(
        *(
            engine.generate(prompt, Sampling(40, seed=seed))
            for seed, prompt in enumerate(random_rows([200, 231]))
        )
    )
    assert engine.statistics.preempted > 0
    assert [len(completion.tokens) for completion in completions] == [40, 40]


def test_a_request_whose_tokens_fill_the_tables_is_prefilled_again_after_new_weights(
    qwen: Path,
) -> None:
    weights = list(iterate_weights(qwen))
    (prompt,) = random_rows([FIRST_WIDTH - 3])

    async def load_after(count: int) -> Completion:
        engine = EmbeddedEngine(qwen)
        request = asyncio.ensure_future(engine.generate(prompt, Sampling(8, seed=1)))
        while engine.statistics.decoded < count:
            await asyncio.sleep(0)
        await engine.load_weights(weights, version=1)
        return await request

    for count in (2, 3, 4):
        assert len(asyncio.run(load_after(count)).tokens) == 8


def test_a_pool_of_less_than_a_block_is_refused(qwen: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_tokens: expected at least 32, found 31"):
        EmbeddedEngine(qwen, kv_tokens=31)
