"""Recorded decode steps: sizes rounded up, padded with the spare slot, equal to steps that run anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model

from rlflow.errors import ConfigError
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.embedded.scheduler import Scheduler
from rlflow.rollout.engine import Completion, Sampling
from tests.rounding import margin
from tests.unit.rollout.embedded.test_engine import assert_logprobs, random_rows


class Recorder:
    """In the place of CUDA: a recorded function is called again. Runs it once on recording, as the warm-up does."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        function()
        return function


def recording_engine(path: Path, recorder: Recorder, **options: int) -> EmbeddedEngine:
    """An engine on this CPU that decodes as one on a GPU does."""
    engine = EmbeddedEngine(path, max_tokens=512, **options)
    old = engine._scheduler
    engine._scheduler = Scheduler(
        engine._model,
        engine._stops,
        engine.max_concurrency,
        blocks=old.block_manager.count,
        max_tokens=512,
        prefill_tokens=8192,
        by_id=False,
        capture=recorder,
    )
    return engine


def episodes(engine: EmbeddedEngine, count: int) -> list[list[Completion]]:
    async def play(index: int) -> list[Completion]:
        tokens = random_rows([10 + 9 * index], seed=index)[0]
        completions = []
        for _ in range(2):
            sampling = Sampling(8 + 5 * (index % 4), 1.0 if index % 3 else 0.0, seed=index)
            completions.append(await engine.generate(tokens, sampling, f"{index}"))
            tokens += completions[-1].tokens + random_rows([13], seed=50 + index)[0]
        engine.release(f"{index}")
        return completions

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*(play(index) for index in range(count)))

    return asyncio.run(together())


def assert_equal(path: Path, first: list[list[Completion]], second: list[list[Completion]]) -> None:
    """Tokens and versions, and log-probs up to the rounding of float32; no choice of a token was within rounding."""
    for index, (left, right) in enumerate(zip(first, second, strict=True)):
        tokens, temperature = (
            random_rows([10 + 9 * index], seed=index)[0],
            1.0 if index % 3 else 0.0,
        )
        for ours, theirs in zip(left, right, strict=True):
            assert margin(path, tokens, ours.tokens, temperature, index) > 1
            assert (ours.tokens, ours.versions) == (theirs.tokens, theirs.versions)
            assert_logprobs(path, tokens, ours, temperature)
            assert_logprobs(path, tokens, theirs, temperature)
            tokens = tokens + ours.tokens + random_rows([13], seed=50 + index)[0]


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 3}, {"kv_tokens": 512}])
def test_recorded_steps_give_what_steps_that_run_anew_give(
    qwen: Path, options: dict[str, int]
) -> None:
    recorder = Recorder()
    engine = recording_engine(qwen, recorder, **options)
    assert_equal(qwen, episodes(engine, 7), episodes(EmbeddedEngine(qwen, **options), 7))
    assert 1 < recorder.recorded <= 4 * 4  # rows 1, 2, 4, 8 times blocks 1, 2, 4, 8
    recorded = recorder.recorded
    assert_equal(qwen, episodes(engine, 7), episodes(EmbeddedEngine(qwen, **options), 7))
    assert recorder.recorded == recorded


def test_new_versions_reach_recorded_steps(qwen: Path) -> None:
    engine = recording_engine(qwen, Recorder())
    episodes(engine, 3)
    engine._scheduler.runner.version = 7
    assert {v for completion in chain(*episodes(engine, 3)) for v in completion.versions} == {7}


def test_graphs_are_refused_where_there_is_no_gpu(qwen: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs: they need a GPU"):
        EmbeddedEngine(qwen, device="cpu", cuda_graphs=True)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_cuda_graphs_give_what_eager_steps_give(tmp_path: Path, family: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path = tiny_model(
        tmp_path, family, scale=0.2, seed=3
    )  # weights with which no choice is within rounding
    eager = EmbeddedEngine(path, device="cuda", cuda_graphs=False, max_tokens=512)
    graphs = EmbeddedEngine(path, device="cuda", cuda_graphs=True, max_tokens=512)
    for _ in range(2):
        assert_equal(path, episodes(graphs, 7), episodes(eager, 7))
    assert graphs._scheduler.statistics.decoded == eager._scheduler.statistics.decoded
    small = EmbeddedEngine(path, device="cuda", kv_tokens=512, max_tokens=512)
    assert_equal(path, episodes(small, 7), episodes(eager, 7))


@pytest.mark.gpu
def test_new_weights_reach_cuda_graphs(qwen: Path, other_qwen: Path) -> None:
    from rlflow.models.huggingface import iterate_weights

    changed = EmbeddedEngine(qwen, device="cuda", cuda_graphs=True, max_tokens=512)
    episodes(changed, 3)
    asyncio.run(changed.load_weights(iterate_weights(other_qwen), version=0))
    fresh = EmbeddedEngine(other_qwen, device="cuda", cuda_graphs=False, max_tokens=512)
    assert_equal(other_qwen, episodes(changed, 3), episodes(fresh, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_gpu_samples_what_the_cpu_samples(tmp_path: Path, cuda_graphs: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path = tiny_model(tmp_path, "qwen2", scale=0.2, seed=3)
    there = EmbeddedEngine(path, device="cuda", cuda_graphs=cuda_graphs, max_tokens=512)
    here = EmbeddedEngine(path, device="cpu", max_tokens=512)
    for left, right in zip(episodes(there, 7), episodes(here, 7), strict=True):
        for ours, theirs in zip(left, right, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
