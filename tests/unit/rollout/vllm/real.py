"""Real vLLM for the tests: processes that several engines use one after another, paced, and transformers to hold them against."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout, Tokenizer, WeightProbe
from rlflow.rollout.engine import Completion, Engine
from rlflow.rollout.vllm import process
from rlflow.rollout.vllm.process_engines import VLLMEngine
from rlflow.rollout.vllm.queueing import QueueingEngine
from tests.fixtures import tiny_model
from tests.unit.rollout.asking import Asking
from tests.unit.rollout.engine_contract import PROMPT, run

NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get(process.VARIABLE),
        reason=f"{process.VARIABLE} names no interpreter with vLLM; tests/run.sh --full makes an environment where it can",
    ),
]
"""Marks of every test with real vLLM."""
WATCHED, FAULTY = ([str(Path(__file__).with_name(f"{name}_worker.py"))] for name in ("watched", "faulty"))
START_S = 400.0
LONG = 800  # tokens of a request that something happens to: with the pace of `paced_steps`, more than six seconds
LONG_PROMPT = [
    (7 * place) % 290 + 5 for place in range(300)
]  # more than two of the blocks of 128 tokens that vLLM caches
Scorer = Callable[[Sequence[int], float], list[float]]


async def some_tokens(engine: Engine, more: int = 5) -> None:
    """Returns when each request that runs has so many tokens more than now. Raises AssertionError where one has ended before."""
    assert isinstance(engine, QueueingEngine)
    await asyncio.sleep(0)  # those that were started a line before
    running = list(engine._running)
    assert running
    first: list[int] = []
    while True:
        found = (await engine._backend.ask("progress", calls=[request.call for request in running]))["tokens"]
        first = first or found
        assert not any(request.future.done() for request in running), "over before anything was done to it"
        if all(now >= before + more for now, before in zip(found, first, strict=True)):
            return
        await asyncio.sleep(0.01)


def with_pace(folder: Path) -> Path:
    """A process's folder with one more plug-in of vLLM: `paced_steps`, by which a request of many tokens cannot be over before
    a test that saw its first ones has done something to it, however late the test gets a core."""
    (folder / "paced_steps.py").symlink_to(Path(__file__).with_name("paced_steps.py"))
    described = folder / "paced_steps-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: paced_steps\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\npaced_steps = paced_steps:register\n")
    return folder


class Lent:
    """A process that several engines use one after another: none of them ends it."""

    def __init__(self, lent: process.VLLMProcess) -> None:
        self.lent = lent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lent, name)

    def close(self) -> None:
        """It is somebody else's."""

    kill = close


class Borrower(VLLMEngine):
    """A new engine over a process that there is."""

    lender: process.VLLMProcess

    def _start(self, python: str, job: dict[str, Any], kv_gib: int) -> process.VLLMProcess:
        return Lent(self.lender)  # type: ignore[return-value]


def scorer(path: Path, dtype: torch.dtype = torch.float64) -> Scorer:
    """transformers' log-probs (float64 if nothing else is said), nats, of a row's tokens but the first, at a temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def score(row: Sequence[int], temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([list(row)])).logits[0, :-1] / temperature
        return logits.double().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()

    return score


def gap(done: Completion, prompt: Sequence[int], scorers: dict[int, Scorer], temperature: float) -> float:
    """The largest difference, nats, to the model of each token's version over the whole history."""
    row = [*prompt, *done.tokens]
    exact = {version: scorers[version](row, temperature)[len(prompt) - 1 :] for version in set(done.versions)}
    return max(abs(exact[v][i] - logprob) for i, (v, logprob) in enumerate(zip(done.versions, done.logprobs)))


class Started:
    """A model directory, two others of its shape, and a process with vLLM that has it loaded."""

    def __init__(self, folder: Path, tied: bool, program: Sequence[str] = WATCHED, **options: Any) -> None:
        self.path, *self.others = [
            tiny_model(folder / f"seed{seed}", tied=tied, seed=seed, scale=0.1, hidden_size=128)
            for seed in (0, 1, 2, 3)
        ]
        self.tokenizer = Tokenizer.from_pretrained(self.path)
        kept, folder_of = process.PROGRAM, process._make_folder
        process.PROGRAM, process._make_folder = tuple(program), lambda: with_pace(folder_of())
        try:
            self.engine = VLLMEngine(self.path, self.tokenizer, start_s=START_S, max_concurrency=16, **options)
        finally:
            process.PROGRAM, process._make_folder = kept, folder_of
        self.engine.wait_until_ready()
        self.lender = type("BorrowerOfThis", (Borrower,), {"lender": self.engine._process})
        self._scorers: dict[Path, Scorer] = {}

    def borrow(self, **options: Any) -> VLLMEngine:
        return self.lender(self.path, self.tokenizer, **options)

    def score(self, path: Path) -> Scorer:
        if path not in self._scorers:
            self._scorers[path] = scorer(path)
        return self._scorers[path]

    def restore(self) -> None:
        """The weights of the directory as version 0, nothing planted, nothing paused."""

        async def load() -> None:
            with contextlib.suppress(RolloutError):  # the worker of rlflow has no such operation
                await self.engine._process.ask("plant", fault="")
            engine = self.borrow()
            await engine.load_weights(iterate_weights(self.path), 0)

        run(load())

    def close(self) -> None:
        asyncio.run(self.engine.close())


def probe(score: Scorer, temperature: float = 0.7) -> WeightProbe:
    def rows(wanted: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0, *score(row, temperature)] for row in wanted]

    return WeightProbe([PROMPT, LONG_PROMPT], rows, temperature=temperature)


@contextlib.contextmanager
def rollout_over(*started: Started) -> Iterator[Rollout]:
    engines = [one.borrow() for one in started]
    rollout = Rollout(engines, Asking(), started[0].tokenizer, samples_per_prompt=2, max_response_tokens=20)
    try:
        yield rollout
    finally:
        rollout.close()
        for one in started:
            one.restore()
