"""Real vLLM for the tests: servers that several engines use one after another, paced, and
transformers to hold them against."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout, Tokenizer, WeightProbe
from rlflow.rollout.engine import Completion, Engine
from rlflow.rollout.vllm import launch
from rlflow.rollout.vllm.buckets import SharedFiles
from rlflow.rollout.vllm.engines import make_vllm_engines
from rlflow.rollout.vllm.server import VLLMServer
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from tests.fixtures import tiny_model
from tests.unit.rollout.asking import Asking
from tests.unit.rollout.engine_contract import PROMPT, run

NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get(launch.VARIABLE),
        reason=f"{launch.VARIABLE} names no interpreter with vLLM; tests/run.sh --full makes an "
        "environment where it can",
    ),
]
"""Marks of every test with real vLLM."""
START_S = 400.0
# Tokens of a request that something happens to: with the pace of `paced_steps`, six seconds
LONG = 800
# More than two of the blocks of 128 tokens that vLLM caches
LONG_PROMPT = [(7 * place) % 290 + 5 for place in range(300)]
COUNTERS = re.compile(r"^vllm:(num_requests_running|generation_tokens_total)\{.*\} (\S+)$", re.M)
Scorer = Callable[[Sequence[int], float], list[float]]


def counters(server: VLLMServer) -> tuple[int, int]:
    """(requests that run, tokens sampled so far), as the server counts."""
    url = f"{server._routes.url}/metrics"
    text = server._http.call(server._http.session.ask, "GET", url).text
    found = {name: int(float(value)) for name, value in COUNTERS.findall(text)}
    return found["num_requests_running"], found["generation_tokens_total"]


async def some_tokens(engine: Engine, more: int = 5) -> None:
    """Returns when all requests of an engine run, and that many tokens have been sampled for each
    since. Raises AssertionError where one has ended before."""
    assert isinstance(engine, VLLMEngine)
    await asyncio.sleep(0)  # those that were started a line before
    running = list(engine._running)
    assert running

    async def now() -> tuple[int, int]:
        return await asyncio.to_thread(counters, engine.server)

    while (await now())[0] < len(running):
        await asyncio.sleep(0.02)
    before = (await now())[1]
    while (await now())[1] < before + (more + 1) * len(running):
        await asyncio.sleep(0.02)
    over = any(request.future.done() for request in running)
    assert not over, "over before anything was done to it"


def with_pace(folder: Path) -> Path:
    """A server's folder with one more plug-in of vLLM: `paced_steps`, by which a request of many
    tokens cannot be over before a test that saw its first ones has done something to it, however
    late the test gets a core."""
    (folder / "paced_steps.py").symlink_to(Path(__file__).with_name("paced_steps.py"))
    described = folder / "paced_steps-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: paced_steps\nVersion: 1\n")
    entry = "[vllm.general_plugins]\npaced_steps = paced_steps:register\n"
    (described / "entry_points.txt").write_text(entry)
    return folder


class Lent:
    """A server that several engines use one after another: none of them ends it."""

    def __init__(self, lent: VLLMServer) -> None:
        self.lent = lent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lent, name)

    def close(self, *_: Any) -> None:
        """It is somebody else's."""


def scorer(path: Path, dtype: torch.dtype = torch.float64) -> Scorer:
    """transformers' log-probs (float64 if nothing else is said), nats, of a row's tokens but the
    first, at a temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    def score(row: Sequence[int], temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([list(row)])).logits[0, :-1] / temperature
        told = logits.double().log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])
        return told[:, 0].tolist()

    return score


def gap(
    done: Completion, prompt: Sequence[int], scorers: dict[int, Scorer], temperature: float
) -> float:
    """The largest difference, nats, to the model of each token's version over the history."""
    row, start = [*prompt, *done.tokens], len(prompt) - 1
    exact = {one: scorers[one](row, temperature)[start:] for one in set(done.versions)}
    told = zip(done.versions, done.logprobs)
    return max(abs(exact[version][i] - logprob) for i, (version, logprob) in enumerate(told))


class Started:
    """A model directory, three others of its shape, and vLLM servers that have it loaded."""

    def __init__(self, folder: Path, tied: bool, **options: Any) -> None:
        self.path, *self.others = [
            tiny_model(folder / f"seed{seed}", tied=tied, seed=seed, scale=0.1, hidden_size=128)
            for seed in (0, 1, 2, 3)
        ]
        self.tokenizer = Tokenizer.from_pretrained(self.path)
        folder_of = launch.make_folder
        launch.make_folder = lambda: with_pace(folder_of())
        shared = {
            "start_s": START_S,
            "max_concurrency": 16,
            "arguments": {"disable_log_stats": False},
        }
        try:
            self.engines = make_vllm_engines(self.path, self.tokenizer, **{**shared, **options})
        finally:
            launch.make_folder = folder_of
        self.engine = self.engines[0]
        assert isinstance(self.engine, VLLMEngine)
        self.server = self.engine.server
        self._scorers: dict[Path, Scorer] = {}

    def borrow(self, **options: Any) -> VLLMEngine:
        """A new engine over the first server, which stays."""
        lent: Any = Lent(self.server)
        given: Any = {"max_concurrency": 16, "start_s": START_S, **options}
        engine = VLLMEngine(self.path, self.tokenizer, lent, SharedFiles().carrier, **given)
        engine.max_tokens = min(engine.max_tokens, self.engine.max_tokens)
        return engine

    def score(self, path: Path) -> Scorer:
        if path not in self._scorers:
            self._scorers[path] = scorer(path)
        return self._scorers[path]

    def restore(self) -> None:
        """The weights of the directory as version 0, nothing paused."""
        run(self.borrow().load_weights(iterate_weights(self.path), 0))

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()


def probe(score: Scorer, temperature: float = 0.7) -> WeightProbe:
    def rows(wanted: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0, *score(row, temperature)] for row in wanted]

    return WeightProbe([PROMPT, LONG_PROMPT], rows, temperature=temperature)


@contextlib.contextmanager
def rollout_over(started: Started, *engines: Engine) -> Iterator[Rollout]:
    """A rollout over an engine that borrows the server, or over these."""
    given = list(engines) or [started.borrow()]
    options = {"samples_per_prompt": 2, "max_response_tokens": 20}
    rollout = Rollout(given, Asking(), started.tokenizer, **options)
    try:
        yield rollout
    finally:
        rollout.close()
        if not engines:
            started.restore()
