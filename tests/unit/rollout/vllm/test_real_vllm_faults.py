"""Real vLLM where something is wrong: what a planted fault ends in; and several processes of it.

Needs the interpreter of an environment with vLLM in RLFLOW_VLLM_PYTHON; `tests/run.sh --full` makes one where it can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlflow.errors import ModelError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.vllm.routes import GENERATE
from tests.unit.rollout.engine_contract import PROMPT, run, start
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


# --- planted faults -----------------------------------------------------------------------------


@contextlib.contextmanager
def planted(started: Started, change: Callable[[str, Any], tuple[str, Any]]) -> Iterator[None]:
    """What is asked of the server's routes is changed on its way."""
    asked = started.server._routes.ask

    async def ask(method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        return await asked(method, *change(path, body), **options)

    started.server._routes.ask = ask  # type: ignore[method-assign]
    try:
        yield
    finally:
        started.server._routes.ask = asked  # type: ignore[method-assign]


def hotter(path: str, body: Any) -> tuple[str, Any]:
    """Another temperature than the one that is asked for."""
    if path == GENERATE:
        sampling = body["sampling_params"]
        body = {
            **body,
            "sampling_params": {**sampling, "temperature": sampling["temperature"] + 0.2},
        }
    return path, body


def unnamed(path: str, body: Any) -> tuple[str, Any]:
    """The new weights under the old version."""
    return path, {"weight_version": None} if path == "/finish_weight_update" else body


def uncleared(path: str, body: Any) -> tuple[str, Any]:
    """Keys and values of the old weights are kept."""
    return path.replace("clear_cache=true", "clear_cache=false"), body


def test_an_update_without_a_tensor_is_refused_and_a_whole_one_repairs_it(untied: Started) -> None:
    pairs = [
        pair for pair in iterate_weights(untied.others[0]) if "layers.1.mlp.up_proj" not in pair[0]
    ]
    with rollout_over(untied) as rollout:
        with pytest.raises(
            ModelError,
            match=r"1 of \d+ tensors did not arrive: model\.layers\.1\.mlp\.up_proj\.weight",
        ):
            rollout.load_weights(pairs, 1, probe(untied.score(untied.others[0])))
        rollout.load_weights(
            iterate_weights(untied.others[1]), 2, probe(untied.score(untied.others[1]))
        )


@pytest.mark.parametrize(
    ("fault", "told"),
    [(hotter, r"differ by .* nats"), (unnamed, "where version 1 or later was expected")],
)
def test_a_wrong_temperature_and_a_wrong_version_are_found_by_the_probe(
    untied: Started, fault: Any, told: str
) -> None:
    with rollout_over(untied) as rollout, planted(untied, fault):
        score = untied.score(untied.others[0])
        with pytest.raises(RolloutError, match=told):
            rollout.load_weights(iterate_weights(untied.others[0]), 1, probe(score))


def test_a_probe_against_another_version_is_found(untied: Started) -> None:
    with rollout_over(untied) as rollout, pytest.raises(RolloutError, match=r"differ by .* nats"):
        rollout.load_weights(
            iterate_weights(untied.others[0]), 1, probe(untied.score(untied.others[1]))
        )


def test_a_cache_that_was_not_cleared_stops_the_update(untied: Started) -> None:
    async def play() -> None:
        engine = untied.borrow()
        request = start(engine, LONG_PROMPT, LONG, 1)
        await some_tokens(engine)
        with pytest.raises(
            RolloutError, match="the cache was not cleared: requests in flight hold"
        ):
            await engine.load_weights(iterate_weights(untied.others[0]), 1)
        with pytest.raises(RolloutError, match="half loaded"):
            await request

    try:
        with planted(untied, uncleared):
            run(play())
    finally:
        untied.restore()


# --- processes --------------------------------------------------------------------------------------------------------


def test_tensor_parallel_engines_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two tensor-parallel ranks of vLLM need a core each")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    split = Started(tmp_path, False, tensor_parallel=2)

    async def play() -> list[Completion]:
        engine = split.borrow()
        first = await engine.generate(LONG_PROMPT, Sampling(30, 0.7, seed=1))
        await engine.load_weights(iterate_weights(split.others[0]), 1)
        return [first, await engine.generate(LONG_PROMPT, Sampling(30, 0.7, seed=1))]

    try:
        for version, (done, path) in enumerate(zip(run(play()), (split.path, split.others[0]))):
            assert set(done.versions) == {version}
            assert gap(done, LONG_PROMPT, {version: split.score(path)}, 0.7) < 1e-4
    finally:
        split.close()


def test_two_engines_share_episodes_and_syncs_and_one_whose_core_dies_says_so(
    tmp_path: Path,
) -> None:
    two = Started(tmp_path, False, engines=2)
    try:
        with rollout_over(two, *two.engines) as rollout:
            for version, path in enumerate(two.others[:2], start=1):
                rollout.load_weights(iterate_weights(path), version, probe(two.score(path)))
                groups = rollout.collect(rollout.environment.tasks(""), step=version)
                segments = [s for group in groups for t in group.trajectories for s in t.segments]
                assert {int(v) for segment in segments for v in segment.versions} == {-1, version}
            assert all(engine.counts.decoded > 0 for engine in rollout.engines)  # type: ignore[attr-defined]
            rollout._thread().run(core_dies(two))
    finally:
        two.close()


async def core_dies(started: Started) -> None:
    """The engine's process is killed: the server ends, says so, and leaves no process."""
    engine, leader = started.engine, psutil.Process(started.server.served.child.pid)
    children = leader.children(recursive=True)
    request = start(engine, PROMPT, LONG, 1)
    await some_tokens(engine)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)
    with pytest.raises(RolloutError, match="vLLM: its process"):
        await request
    assert started.server.served.child.ended.done() and engine.failure
    deadline = time.monotonic() + 30
    while any(map(lives, (leader, *children))) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not any(map(lives, (leader, *children)))


def lives(process: psutil.Process) -> bool:
    """Whether it does, and is not only waiting to be noticed as ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
