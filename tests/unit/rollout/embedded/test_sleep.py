"""The embedded engine gives its keys and values back while a trainer works, and goes on as if it had not."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from fixtures import tiny_model

from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling

PROMPTS = [[(place * (7 + row)) % 290 + 5 for place in range(400)] for row in range(6)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values weigh something: 8 KiB per token and layer."""
    return tiny_model(tmp_path_factory.mktemp("wide"), "qwen2", hidden_size=1024, num_key_value_heads=4)


def engine_over(path: Path) -> EmbeddedEngine:
    return EmbeddedEngine(path, max_concurrency=6, max_tokens=512, device="cpu", sleep=True)


async def sampled(engine: EmbeddedEngine, tokens: int) -> list[Completion]:
    calls = [
        engine.generate(prompt, Sampling(tokens, seed=row), f"episode {row}") for row, prompt in enumerate(PROMPTS)
    ]
    return list(await asyncio.gather(*calls))


def resident_bytes(start: int, end: int) -> int:
    """Resident memory of the mappings in a range of addresses. The whole process's moves with other tests."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) < end and start < int(match[2], 16)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def addresses(engine: EmbeddedEngine) -> tuple[int, int]:
    """Where its keys and values lie."""
    pool = engine._scheduler._cache._pool
    return pool.data_ptr(), pool.data_ptr() + pool.nbytes


def test_resident_memory_falls_and_comes_back_with_the_same_log_probs(wide: Path) -> None:
    async def play() -> None:
        engine = engine_over(wide)
        pool = engine._scheduler._cache._pool
        held = pool.element_size() * pool[:, 0].numel() * len(PROMPTS) * (400 // 32)  # of full blocks alone
        del pool
        place = addresses(engine)
        before = await sampled(engine, 4)
        awake = resident_bytes(*place)
        freed = await engine.sleep()
        assert held > 20 * 2**20 and freed > 0.7 * held
        assert resident_bytes(*place) < awake - 0.7 * held
        assert await engine.sleep() == 0  # it sleeps already
        await engine.wake()
        place = addresses(engine)
        empty = resident_bytes(*place)
        assert empty < awake - 0.7 * held  # on a CPU the memory comes as it is filled
        after = await sampled(engine, 4)
        assert resident_bytes(*place) > empty + 0.7 * held
        assert after == before

    asyncio.run(play())


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
        assert engine.statistics.steps == steps, "it sampled before it had memory for keys and values"
        await engine.wake()
        assert (await late).versions == [1, 1, 1]
        return undisturbed, await running

    undisturbed, disturbed = asyncio.run(play())
    assert [one.tokens for one in disturbed] == [one.tokens for one in undisturbed]
    for one, other in zip(disturbed, undisturbed):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)  # other batches, other sums
        assert set(one.versions) == {0, 1}
