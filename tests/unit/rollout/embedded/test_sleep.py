"""The embedded engine gives its keys and values back while a trainer works, and goes on as if it had not."""

from __future__ import annotations

import asyncio
import os
import struct
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model

from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling

PROMPTS = [[(place * (7 + row)) % 290 + 5 for place in range(400)] for row in range(6)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose keys and values weigh something: 8 KiB per token and layer."""
    return tiny_model(tmp_path_factory.mktemp("wide"), "qwen3", head_dim=256, num_key_value_heads=4)


def engine_over(path: Path) -> EmbeddedEngine:
    return EmbeddedEngine(path, max_concurrency=6, max_tokens=512, device="cpu", sleep=True)


async def sampled(engine: EmbeddedEngine, tokens: int) -> list[Completion]:
    calls = [
        engine.generate(prompt, Sampling(tokens, seed=row), f"episode {row}")
        for row, prompt in enumerate(PROMPTS)
    ]
    return list(await asyncio.gather(*calls))


def resident_bytes(start: int, end: int) -> int:
    """Resident memory in a range of addresses (proc(5), pagemap). That of its mapping, or of the
    process, moves with other tests."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * (start // page))
        entries = file.read(8 * (-(-end // page) - start // page))
    return page * sum(value >> 63 for (value,) in struct.iter_unpack("Q", entries))


def addresses(engine: EmbeddedEngine) -> tuple[int, int]:
    """Where its keys and values lie."""
    pool = engine._scheduler._cache._pool
    return pool.data_ptr(), pool.data_ptr() + pool.nbytes


def fall_and_come_back(wide: Path) -> None:
    async def play() -> None:
        engine = engine_over(wide)
        pool = engine._scheduler._cache._pool
        held = (
            pool.element_size() * pool[:, 0].numel() * len(PROMPTS) * (400 // 32)
        )  # of full blocks alone
        del pool
        place = addresses(engine)
        before = await sampled(engine, 4)
        awake = resident_bytes(*place)
        freed = await engine.sleep()
        assert held > 20 * 2**20 and freed > 0.7 * held
        assert resident_bytes(*place) < awake - 0.7 * held
        assert await engine.sleep() == 0  # it sleeps already
        await engine.wake()
        after = await sampled(engine, 4)
        # Not when: malloc may give what is filled already
        assert resident_bytes(*addresses(engine)) > 0.7 * held
        assert after == before

    asyncio.run(play())


def test_resident_memory_falls_and_comes_back_with_the_same_log_probs(wide: Path) -> None:
    """In a process of its own: malloc keeps what it may give again to other tests."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(fall_and_come_back, wide).result(120)


def test_what_is_in_flight_waits_and_goes_on_with_the_weights_that_came(wide: Path) -> None:
    async def play() -> tuple[list[Completion], list[Completion]]:
        undisturbed = await sampled(engine_over(wide), 12)
        engine = engine_over(wide)
        running = asyncio.ensure_future(sampled(engine, 12))
        while engine.statistics.decoded < 20:
            await asyncio.sleep(0)
        await engine.sleep()
        steps = engine.statistics.steps
        late = asyncio.ensure_future(engine.generate(PROMPTS[0], Sampling(3, seed=0)))
        await asyncio.sleep(0.05)
        assert engine.statistics.steps == steps and not running.done() and not late.done()
        await engine.load_weights(iterate_weights(wide), 1)
        await asyncio.sleep(0.05)
        assert engine.statistics.steps == steps, (
            "it sampled before it had memory for keys and values"
        )
        await engine.wake()
        assert (await late).versions == [1, 1, 1]
        return undisturbed, await running

    undisturbed, disturbed = asyncio.run(play())
    assert [one.tokens for one in disturbed] == [one.tokens for one in undisturbed]
    for one, other in zip(disturbed, undisturbed):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)  # other batches, other sums
        assert set(one.versions) == {0, 1}


@pytest.mark.gpu
def test_a_gpu_gets_the_memory_of_keys_and_values_back(wide: Path) -> None:
    async def play() -> None:
        engine = EmbeddedEngine(
            wide, max_concurrency=6, max_tokens=512, device="cuda", cuda_graphs=True
        )
        before, awake = await sampled(engine, 8), torch.cuda.mem_get_info()[0]
        held = engine._scheduler._cache._pool.nbytes
        freed = await engine.sleep()
        assert freed >= held and torch.cuda.mem_get_info()[0] >= awake + held
        await engine.wake()
        assert torch.cuda.mem_get_info()[0] < awake + held
        assert await sampled(engine, 8) == before

    asyncio.run(play())
