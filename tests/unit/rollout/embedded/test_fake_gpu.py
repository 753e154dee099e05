"""The embedded engine on a GPU that is not there: same tokens as on the CPU, through new weights and sleep."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model

from rlflow.models.huggingface import iterate_weights
from rlflow.rollout.embedded import embedded_engine
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling
from tests.fake_cuda import fake_cuda
from tests.unit.rollout.embedded.test_engine import random_rows
from tests.unit.rollout.embedded.test_graphs import Recorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")


def play(path: Path, other: Path) -> list[Completion]:
    """Responses at two temperatures before and after a sleep, in which the weights became another model's and again the
    model's own."""

    async def generate(engine: EmbeddedEngine, turn: str) -> list[Completion]:
        rows = enumerate(random_rows([20, 35, 50], seed=1))
        calls = [
            engine.generate(row, Sampling(12, float(place % 2), seed=place), f"{turn}{place}")
            for place, row in rows
        ]
        return list(await asyncio.gather(*calls))

    async def run() -> list[Completion]:
        engine = EmbeddedEngine(path, max_concurrency=4, max_tokens=128, sleep=True)
        completions = await generate(engine, "before")
        await engine.load_weights(iterate_weights(other), 1)
        await engine.sleep()
        await engine.load_weights(iterate_weights(path), 2)
        await engine.wake()
        completions += await generate(engine, "after")
        await engine.close()
        return completions

    return asyncio.run(run())


def test_the_engine_says_what_it_says_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = (
        tiny_model(tmp_path / name, "qwen2", seed=seed)
        for seed, name in enumerate(("one", "other"))
    )
    recorders: list[Recorder] = []

    def capture() -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    on_cpu = play(path, other)
    monkeypatch.setattr(embedded_engine, "CudaCapture", capture)
    with fake_cuda() as gpu:
        found = play(path, other)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in on_cpu]
    assert [answer.tokens for answer in found[:3]] == [answer.tokens for answer in found[3:]]
    assert found[0].logprobs == pytest.approx(on_cpu[0].logprobs, abs=1e-4)
    assert recorders[0].recorded and gpu.waits  # it took the GPU's way, and read the tokens
