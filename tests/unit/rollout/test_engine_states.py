"""Every call of the engine protocol in any order: nothing hangs, nothing is lost, nothing comes from half-loaded weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from benchmarks.sleeping import FIRST_WEIGHTS, FakeEngine
from rlflow.errors import RLFlowError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Tokenizer
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Engine, Sampling

Pairs = list[tuple[str, Tensor]]
LIMIT_S = 20.0
EXAMPLES = 10  # some hundreds found nothing more
MOST = 40  # tokens of a completion
IDS = ("a", "b", "c", None, None)
LENGTHS = (3, 40, 90)


def prompt(length: int) -> list[int]:
    return [5 + place % 200 for place in range(length)]


class EngineMachine(RuleBasedStateMachine):
    """The engine beside the little that its caller must know of it: whether it is stopped, closed, or has no weights."""

    def __init__(
        self, make: Callable[[], Engine], good: Pairs, other: Pairs, known: dict[Any, list[int]]
    ) -> None:
        super().__init__()
        self.make, self.good, self.other, self.known = make, good, other, known
        self.loop = asyncio.new_event_loop()
        self.fails = False  # whether the load under way must fail
        self.requests: dict[asyncio.Task[Completion], tuple[str | None, int, int, int]] = {}
        self.pauses: list[asyncio.Task[None]] = []
        self.load: asyncio.Task[None] | None = None
        self.mode, self.broken, self.version, self.tried = "open", False, 0, 0

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, LIMIT_S))

    @initialize()
    def start(self) -> None:
        self.engine = self.make()

    # --- requests ---

    @rule(owner=st.sampled_from(IDS), length=st.sampled_from(LENGTHS), count=st.integers(1, MOST), seed=st.integers(0, 2),
          priority=st.integers(0, 1))  # fmt: skip
    def generate(
        self, owner: str | None, length: int, count: int, seed: int, priority: int
    ) -> None:
        refused = (
            self.broken or self.mode == "closed" or (owner is not None and owner in self.owners())
        )
        task = self.loop.create_task(
            self.engine.generate(prompt(length), Sampling(count, seed=seed), owner, priority)
        )
        self.step(1)
        if refused:
            assert isinstance(task.exception(), RolloutError)
        else:
            self.requests[task] = owner, length, count, seed

    @rule(count=st.sampled_from([1, 2, 5, 15]))
    def step(self, count: int) -> None:
        async def turn() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.do(turn())
        self.look()

    @rule(owner=st.sampled_from(IDS[:3]))
    def abort(self, owner: str) -> None:
        mine = [
            task for task, (name, *_) in self.requests.items() if name == owner and not task.done()
        ]
        self.do(self.engine.abort(owner))
        self.step(2)
        assert all(task.done() for task in mine)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(list(self.requests)))
        cancelled = task.cancel()  # False where it has ended
        self.requests.pop(task)
        self.step(2)
        assert task.cancelled() == cancelled

    @rule(owner=st.sampled_from(IDS[:3]))
    def release(self, owner: str) -> None:
        self.engine.release(owner)

    # --- states ---

    @rule(mode=st.sampled_from(["keep", "abort", "wait"]))
    def pause(self, mode: Any) -> None:
        self.pauses.append(self.loop.create_task(self.engine.pause(mode)))
        self.step(2)
        if self.mode != "closed":
            self.mode = "draining" if mode == "wait" else "paused"
        if mode == "abort":
            assert not self.owners()

    @rule()
    def resume(self) -> None:
        self.do(self.engine.resume())
        self.mode = "closed" if self.mode == "closed" else "open"

    @rule()
    def wait_for_a_pause(self) -> None:
        if self.load is not None:
            self.finish_load()
        self.do(self.engine.pause("wait"))
        self.mode = "closed" if self.mode == "closed" else "paused"
        self.step(1)

    @precondition(lambda self: self.load is None)
    @rule(kind=st.sampled_from(["whole", "whole", "half", "raises", "slow", "slow half"]))
    def load_weights(self, kind: str) -> None:
        pairs = (
            self.good if kind in ("whole", "slow") else self.other[: max(1, len(self.other) // 2)]
        )
        self.tried += 1

        async def stream() -> AsyncIterator[tuple[str, Tensor]]:
            for pair in pairs:
                await asyncio.sleep(0)
                yield pair
            if kind == "raises":
                raise ConnectionError("gone")

        given: Any = stream() if kind in ("raises", "slow", "slow half") else pairs
        self.load = self.loop.create_task(self.engine.load_weights(given, self.tried))
        self.fails = self.mode == "closed" or kind not in ("whole", "slow")
        if not kind.startswith("slow"):
            self.finish_load()
        else:
            self.step(1)

    @precondition(lambda self: self.load is not None)
    @rule(cancelled=st.booleans())
    def finish_load(self, cancelled: bool = False) -> None:
        load, self.load = self.load, None
        assert load is not None
        if cancelled and not load.done():
            load.cancel()
        self.do(asyncio.wait([load], timeout=LIMIT_S))
        failed = load.cancelled() or load.exception() is not None
        assert cancelled or failed == self.fails
        if self.mode != "closed" or not failed:
            self.broken = failed
            self.version = self.version if failed else self.tried
        self.step(2)
        if failed and self.mode != "closed":
            assert not self.owners()

    @precondition(lambda self: self.load is not None and not self.load.done())
    @rule()
    def load_while_loading(self) -> None:
        async def again() -> None:
            if self.load is not None and not self.load.done():
                with pytest.raises(RolloutError):
                    await self.engine.load_weights(self.good, 99)

        self.do(again())

    @precondition(lambda self: self.tried > 1)
    @rule()
    def close(self) -> None:
        self.do(self.engine.close())
        self.mode = "closed"
        self.step(2)
        assert not self.owners()

    # --- what always holds ---

    def owners(self) -> list[str | None]:
        return [owner for task, (owner, *_) in self.requests.items() if not task.done()]

    def sampled(self) -> int:
        engine: Any = self.engine
        return engine.statistics.decoded if isinstance(engine, EmbeddedEngine) else engine.steps

    def look(self) -> None:
        """Checks what has ended, and forgets it."""
        for task in [task for task in self.requests if task.done()]:
            _, length, count, seed = self.requests.pop(task)
            if task.exception() is not None:
                assert isinstance(task.exception(), RLFlowError)  # a failed load
                continue
            done = task.result()
            assert len(done.tokens) == len(done.logprobs) == len(done.versions) <= count
            assert done.interrupted or len(done.tokens) == count
            assert done.versions == sorted(done.versions) and set(done.versions) <= set(
                range(self.tried + 1)
            )
            assert done.tokens == self.known[length, seed][: len(done.tokens)]

    @invariant()
    def nothing_is_sampled_where_it_must_not_be(self) -> None:
        if hasattr(self, "engine") and (self.mode in ("paused", "closed") or self.broken):
            before = self.sampled()
            self.step(3)
            assert self.sampled() == before

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        with contextlib.closing(self.loop):
            if self.load is not None:
                self.finish_load()
            if self.broken and self.mode != "closed":
                self.load_weights(kind="whole")
            self.resume()
            if self.mode == "open":
                self.generate("last", 40, 3, 0, 0)
            self.do(_all([*self.requests, *self.pauses]))
            self.look()
            for owner in (*IDS[:3], "last"):
                self.engine.release(owner or "")
            self.nothing_is_left()

    def nothing_is_left(self) -> None:
        if isinstance(self.engine, EmbeddedEngine):
            scheduler = self.engine._scheduler
            assert (scheduler.waiting, scheduler.running, scheduler.ids) == ([], {}, set())
            assert scheduler.block_manager.free == scheduler.block_manager.count


async def _all(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def reference(engine: Engine) -> dict[Any, list[int]]:
    """What every prompt and seed gives alone."""
    cases = [(length, seed) for length in LENGTHS for seed in range(3)]
    return {
        case: asyncio.run(engine.generate(prompt(case[0]), Sampling(MOST, seed=case[1]))).tokens
        for case in cases
    }


def play(make: Callable[[], Engine], good: Pairs, other: Pairs, examples: int) -> None:
    known = reference(make())
    rules = settings(max_examples=examples, stateful_step_count=25, derandomize=True, deadline=None,
                     suppress_health_check=list(HealthCheck), database=None)  # fmt: skip
    run_state_machine_as_test(lambda: EngineMachine(make, good, other, known), settings=rules)


@pytest.mark.parametrize("kv_tokens", [288, 4096])
def test_the_embedded_engine_in_any_order_of_calls(
    qwen: Path, other_qwen: Path, tokenizer: Tokenizer, kv_tokens: int
) -> None:
    def make() -> EmbeddedEngine:
        return EmbeddedEngine(
            qwen,
            tokenizer,
            max_concurrency=3,
            max_tokens=200,
            kv_tokens=kv_tokens,
            prefill_tokens=48,
        )

    play(make, list(iterate_weights(qwen)), list(iterate_weights(other_qwen)), examples=EXAMPLES)


def test_the_fake_engine_in_any_order_of_calls(tokenizer: Tokenizer) -> None:
    good = list(FIRST_WEIGHTS.items())
    play(lambda: FakeEngine(tokenizer, max_concurrency=2), good, good, examples=EXAMPLES)
