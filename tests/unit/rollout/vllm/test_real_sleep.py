"""vLLM asleep while a trainer works: the order of the calls, and what was in flight.

On a CPU vLLM's workers answer these calls and free nothing; the states of its engine are those of a GPU."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest

from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.engine import Completion, Sampling
from tests.unit.rollout.engine_contract import PROMPT, run, start
from tests.unit.rollout.vllm.real import (
    LONG,
    LONG_PROMPT,
    NEEDS_VLLM,
    Started,
    counters,
    gap,
    some_tokens,
)

pytestmark = NEEDS_VLLM
CHANGES = re.compile(r"It took \S+ seconds to (fall asleep|wake up tags [^]]+])")


@pytest.fixture(scope="module")
def asleep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("sleeping"), tied=True, sleep=True, dtype="bfloat16")
    yield started
    started.close()


def test_weights_come_before_keys_and_values_and_what_was_in_flight_goes_on(
    asleep: Started,
) -> None:
    """In bfloat16, which vLLM's attention in AMX tiles does not survive: the plug-in keeps it from being chosen."""

    async def play() -> list[Completion]:
        engine = asleep.borrow(sleeps=True, dtype="bfloat16")
        running = [
            start(engine, prompt, LONG, seed) for seed, prompt in enumerate((PROMPT, LONG_PROMPT))
        ]
        await some_tokens(engine)
        assert engine.sleeps and abs(await engine.sleep()) < 64 * 2**20  # a CPU frees nothing
        late = asyncio.ensure_future(engine.generate(PROMPT, Sampling(3, seed=5)))
        await engine.load_weights(iterate_weights(asleep.others[0]), 1)
        seen = await asyncio.to_thread(counters, engine.server)
        await asyncio.sleep(0.5)
        now = await asyncio.to_thread(counters, engine.server)
        assert now == seen and not late.done(), (
            "it sampled before it had memory for keys and values"
        )
        await engine.wake()
        return [*await asyncio.gather(*running), await late]

    completions = run(play())
    scorers = {0: asleep.score(asleep.path), 1: asleep.score(asleep.others[0])}
    for done, prompt in zip(completions, (PROMPT, LONG_PROMPT, PROMPT)):
        assert gap(done, prompt, scorers, 1.0) < 0.2  # bfloat16 against float64
    assert [set(done.versions) for done in completions] == [{0, 1}, {0, 1}, {1}]
    log = asleep.server.served.child.log.read_text()
    assert CHANGES.findall(log) == [
        "fall asleep",
        "wake up tags ['weights']",
        "wake up tags ['kv_cache']",
    ]


def test_a_platform_without_sleep_mode_is_told(
    asleep: Started, caplog: pytest.LogCaptureFixture
) -> None:
    engine = asleep.borrow(sleeps=True)
    with caplog.at_level(logging.WARNING):
        engine.wait_until_ready()
    assert "cannot sleep" in caplog.text
