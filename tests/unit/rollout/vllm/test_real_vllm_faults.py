"""Real vLLM where something is wrong: what a planted fault ends in; and several processes of it.

Needs the interpreter of an environment with vLLM in RLFLOW_VLLM_PYTHON; `tests/run.sh --full` makes one where it can."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlflow.errors import ModelError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.engine import Completion, Sampling
from tests.unit.rollout.engine_contract import PROMPT, run, start
from tests.unit.rollout.vllm.real import (
    FAULTY,
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


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("untied"), tied=False)
    yield started
    started.close()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("faulty"), False, FAULTY)
    yield started
    started.close()


def test_versions_can_be_counted_where_vllm_does_not_tell_them(faulty: Started) -> None:
    async def play() -> Completion:
        await faulty.engine._process.ask("plant", fault="no_spans")
        engine = faulty.borrow()
        request = start(engine, PROMPT, LONG, 1)
        await some_tokens(engine)
        await engine.load_weights(iterate_weights(faulty.others[0]), 1)
        return await request

    try:
        done = run(play())
    finally:
        faulty.restore()
    scorers = {0: faulty.score(faulty.path), 1: faulty.score(faulty.others[0])}
    assert set(done.versions) == {0, 1} and gap(done, PROMPT, scorers, 1.0) < 1e-5


# --- syncs of a rollout, and planted faults ----------------------------------------------------------------------------


def test_two_engines_share_the_episodes_of_a_rollout_and_its_syncs(untied: Started, faulty: Started) -> None:
    with rollout_over(untied, faulty) as rollout:
        for version, path in enumerate(untied.others[:2], start=1):
            rollout.load_weights(iterate_weights(path), version, probe(untied.score(path)))
            groups = rollout.collect(rollout.environment.tasks(""), step=version)
            segments = [s for group in groups for t in group.trajectories for s in t.segments]
            assert {int(v) for segment in segments for v in segment.versions} == {-1, version}
        assert all(engine.counts.decoded > 0 for engine in rollout.engines)  # type: ignore[attr-defined]


def test_an_update_without_a_tensor_is_refused_and_a_whole_one_repairs_it(untied: Started) -> None:
    pairs = [pair for pair in iterate_weights(untied.others[0]) if "layers.1.mlp.up_proj" not in pair[0]]
    with rollout_over(untied) as rollout:
        with pytest.raises(
            ModelError, match=r"1 of \d+ tensors did not arrive: model\.layers\.1\.mlp\.up_proj\.weight"
        ):
            rollout.load_weights(pairs, 1, probe(untied.score(untied.others[0])))
        rollout.load_weights(iterate_weights(untied.others[1]), 2, probe(untied.score(untied.others[1])))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("temperature", r"differ by .* nats on a token of the probe"),
        ("other_version", r"given version 1 and sampled its probe"),
    ],
)
def test_a_wrong_temperature_and_a_wrong_version_are_found_by_the_probe(faulty: Started, fault: str, told: str) -> None:
    with rollout_over(faulty) as rollout:
        rollout._thread().run(faulty.engine._process.ask("plant", fault=fault))
        with pytest.raises(RolloutError, match=told):
            rollout.load_weights(iterate_weights(faulty.others[0]), 1, probe(faulty.score(faulty.others[0])))


def test_a_probe_against_another_version_is_found(untied: Started) -> None:
    with rollout_over(untied) as rollout, pytest.raises(RolloutError, match=r"differ by .* nats"):
        rollout.load_weights(iterate_weights(untied.others[0]), 1, probe(untied.score(untied.others[1])))


def test_a_cache_that_was_not_cleared_stops_the_update(faulty: Started) -> None:
    async def play() -> None:
        await faulty.engine._process.ask("plant", fault="cache_kept")
        engine = faulty.borrow()
        request = start(engine, LONG_PROMPT, LONG, 1)
        await some_tokens(engine)
        with pytest.raises(RolloutError, match="the cache was not cleared: requests in flight hold keys and values"):
            await engine.load_weights(iterate_weights(faulty.others[0]), 1)
        with pytest.raises(RolloutError, match="half loaded"):
            await request

    try:
        run(play())
    finally:
        faulty.restore()


def test_raw_log_probs_are_found_by_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_PLANTED", "raw")
    raw = Started(tmp_path, False, FAULTY)
    try:
        with (
            rollout_over(raw) as rollout,
            pytest.raises(RolloutError, match=r"differ by .* nats on a token of the probe"),
        ):
            rollout.load_weights(iterate_weights(raw.others[0]), 1, probe(raw.score(raw.others[0])))
    finally:
        raw.close()


# --- processes --------------------------------------------------------------------------------------------------------


def test_tensor_parallel_engines_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_engine_whose_core_dies_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    started = Started(tmp_path, False)
    worker = psutil.Process(started.engine._process._process.pid)
    children = worker.children(recursive=True)
    core = next(child for child in children if "EngineCore" in " ".join(child.cmdline()) or child.children() or True)

    async def play() -> None:
        request = start(started.engine, PROMPT, LONG, 1)
        await some_tokens(started.engine)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        with pytest.raises(RolloutError, match="vLLM"):
            await request

    assert core is not None
    run(play())
    deadline = time.monotonic() + 30
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    started.close()
