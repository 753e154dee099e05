"""The engine over real vLLM: the contract, log-probs against transformers, updates in flight, and what a planted fault ends in.

Needs the interpreter of an environment with vLLM in RLFLOW_VLLM_PYTHON; `tests/run.sh --full` makes one where it can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlflow.errors import ModelError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout, Tokenizer, WeightProbe
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.vllm import process
from rlflow.rollout.vllm.buckets import HEAD, WeightNames
from rlflow.rollout.vllm.engine import VLLMEngine
from tests.fixtures import tiny_model
from tests.unit.rollout.asking import Asking
from tests.unit.rollout.engine_contract import PROMPT, EngineContract, Make, Pairs, run, start
from tests.unit.rollout.vllm.test_engine import some_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get(process.VARIABLE),
        reason=f"{process.VARIABLE} names no interpreter with vLLM; tests/run.sh --full makes an environment where it can",
    ),
]
START_S = 400.0
LONG = 2500  # tokens of a request that something happens to; vLLM samples about 1000 a second of these models
LONG_PROMPT = [(7 * place) % 290 + 5 for place in range(300)]  # more than two of the blocks of 128 tokens that vLLM caches
Scorer = Callable[[Sequence[int], float], list[float]]


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
        self.max_tokens = job["max_tokens"]
        return Lent(self.lender)  # type: ignore[return-value]


def scorer(path: Path) -> Scorer:
    """transformers' log-probs in float64, nats, of every token of a row but the first, at a temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()

    def score(row: Sequence[int], temperature: float = 1.0) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([list(row)])).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()

    return score


def gap(done: Completion, prompt: Sequence[int], scorers: dict[int, Scorer], temperature: float) -> float:
    """The largest difference, nats, to the model of each token's version over the whole history."""
    row = [*prompt, *done.tokens]
    exact = {version: scorers[version](row, temperature)[len(prompt) - 1 :] for version in set(done.versions)}
    return max(abs(exact[v][i] - logprob) for i, (v, logprob) in enumerate(zip(done.versions, done.logprobs)))


class Started:
    """A model directory, two others of its shape, and a process with vLLM that has it loaded."""

    def __init__(self, folder: Path, tied: bool, program: Sequence[str] = process.PROGRAM, **options: Any) -> None:
        self.path, *self.others = [
            tiny_model(folder / f"seed{seed}", tied=tied, seed=seed, scale=0.1, hidden_size=128) for seed in (0, 1, 2, 3)
        ]
        self.tokenizer = Tokenizer.from_pretrained(self.path)
        kept, process.PROGRAM = process.PROGRAM, tuple(program)
        try:
            self.engine = VLLMEngine(self.path, self.tokenizer, start_s=START_S, max_concurrency=16, **options)
        finally:
            process.PROGRAM = kept
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


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("untied"), tied=False)
    yield started
    started.close()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("tied"), tied=True)
    yield started
    started.close()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("faulty"), False, [str(Path(__file__).with_name("faulty_worker.py"))])
    yield started
    started.close()


class TestRealVLLM(EngineContract):
    longer = 40

    async def a_while(self, engine: Engine) -> None:
        await some_tokens(engine)

    @pytest.fixture
    def make(self, untied: Started) -> Iterator[Make]:
        made: list[VLLMEngine] = []

        def new(**options: Any) -> VLLMEngine:
            if any(engine.version for engine in made):  # a new engine has the weights of its directory
                untied.restore()
                made.clear()
            made.append(untied.borrow(**options))
            return made[-1]

        yield new
        untied.restore()

    @pytest.fixture
    def tokenizer(self, untied: Started) -> Tokenizer:
        return untied.tokenizer

    @pytest.fixture
    def weights(self, untied: Started) -> Pairs:
        return list(iterate_weights(untied.others[0]))


# --- log-probs and stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_log_probs_are_those_of_transformers_at_the_sampling_temperature(
    head: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    vllm: Started = request.getfixturevalue(head)

    async def sample() -> list[Completion]:
        engine = vllm.borrow()
        prompts = (PROMPT, LONG_PROMPT, LONG_PROMPT)  # the third one finds the second in the cache
        return [await engine.generate(prompt, Sampling(40, temperature, seed=5)) for prompt in prompts]

    for prompt, done in zip((PROMPT, LONG_PROMPT, LONG_PROMPT), run(sample())):
        assert len(done.tokens) == 40 and set(done.versions) == {0}
        assert gap(done, prompt, {0: vllm.score(vllm.path)}, temperature or 1.0) < 1e-5


def test_a_stop_string_over_several_tokens_ends_where_it_is_complete(untied: Started) -> None:
    async def sample(stop: tuple[str, ...]) -> Completion:
        return await untied.borrow().generate(PROMPT, Sampling(120, seed=2, stop=stop))

    decode = untied.tokenizer.decode
    free = run(sample(()))
    pairs = [(decode([one]), decode([other])) for one, other in zip(free.tokens, free.tokens[1:])]
    strings = {one[-1] + other for one, other in pairs if one and other and (one + other).isascii()}
    assert len(strings) >= 3
    for string in sorted(strings)[:6]:
        ends = next(count for count in range(1, 121) if string in decode(free.tokens[:count]))
        done = run(sample(("\x00never", string)))
        assert (done.stop, done.tokens) == ("stop", free.tokens[:ends]) and done.logprobs == free.logprobs[:ends]


def test_the_history_of_an_episode_is_not_computed_again(untied: Started) -> None:
    async def turns() -> VLLMEngine:
        engine = untied.borrow()
        first = await engine.generate(LONG_PROMPT, Sampling(4, seed=1))
        await engine.generate([*LONG_PROMPT, *first.tokens, 9, 9], Sampling(4, seed=1))
        return engine

    engine = run(turns())
    assert engine.counts.reused >= 256  # two blocks of 128


def test_prompts_that_are_too_many_for_a_step_and_their_seeds(untied: Started) -> None:
    """On a CPU vLLM ends where a prompt with a seed is computed in parts."""
    prompts = [[(place * (7 + index)) % 290 + 5 for place in range(1500)] for index in range(8)]

    async def sample() -> list[Completion]:
        engine = untied.borrow()
        return list(await asyncio.gather(*(start(engine, prompt, 20, seed) for seed, prompt in enumerate(prompts))))

    for prompt, done in zip(prompts, run(sample())):
        assert gap(done, prompt, {0: untied.score(untied.path)}, 1.0) < 1e-5


# --- updates in flight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_three_updates_in_flight_are_exact_to_the_token(head: str, request: pytest.FixtureRequest) -> None:
    """Each token has the log-prob that the policy of its version gives it after the whole history, as if another one had
    computed nothing before."""
    vllm: Started = request.getfixturevalue(head)

    async def play() -> list[Completion]:
        engine = vllm.borrow()
        requests = [start(engine, prompt, LONG, seed) for seed, prompt in enumerate((PROMPT, LONG_PROMPT, LONG_PROMPT))]
        for version, path in enumerate(vllm.others, start=1):
            await some_tokens(engine)
            await engine.load_weights(iterate_weights(path), version)
        after = await engine.generate(LONG_PROMPT, Sampling(20, seed=3))  # its prompt was cached under older weights
        return [*await asyncio.gather(*requests), after]

    try:
        completions = run(play())
    finally:
        vllm.restore()
    scorers = {version: vllm.score(path) for version, path in enumerate((vllm.path, *vllm.others))}
    for done, prompt in zip(completions, (PROMPT, LONG_PROMPT, LONG_PROMPT, LONG_PROMPT)):
        assert gap(done, prompt, scorers, 1.0) < 1e-5
        assert done.versions == sorted(done.versions)
    assert set(completions[0].versions) == {0, 1, 2, 3} and set(completions[3].versions) == {3}
    assert all(set(done.versions) >= {1, 2, 3} for done in completions[:3])


def test_what_abort_and_pause_leave_can_be_continued_exactly(untied: Started) -> None:
    async def play() -> tuple[Completion, Completion, Completion]:
        engine = untied.borrow()
        requests = [start(engine, PROMPT, LONG, 1, request_id="a"), start(engine, PROMPT, LONG, 2, request_id="b")]
        await some_tokens(engine)
        await engine.abort("a")
        await engine.load_weights(iterate_weights(untied.others[0]), 4)
        await some_tokens(engine)
        await engine.pause("abort")
        aborted, paused = await asyncio.gather(*requests)
        await engine.resume()
        return aborted, paused, await engine.generate([*PROMPT, *paused.tokens], Sampling(30, seed=9))

    try:
        aborted, paused, rest = run(play())
    finally:
        untied.restore()
    scorers = {0: untied.score(untied.path), 4: untied.score(untied.others[0])}
    assert (aborted.stop, paused.stop, rest.stop) == ("aborted", "paused", "length")
    assert (set(aborted.versions), set(paused.versions), set(rest.versions)) == ({0}, {0, 4}, {4})
    assert max(gap(done, PROMPT, scorers, 1.0) for done in (aborted, paused)) < 1e-5
    assert gap(rest, [*PROMPT, *paused.tokens], scorers, 1.0) < 1e-5


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
        with pytest.raises(ModelError, match=r"1 of \d+ tensors did not arrive: model\.layers\.1\.mlp\.up_proj\.weight"):
            rollout.load_weights(pairs, 1, probe(untied.score(untied.others[0])))
        rollout.load_weights(iterate_weights(untied.others[1]), 2, probe(untied.score(untied.others[1])))


def test_a_head_that_stays_old_is_found_by_the_probe(tied: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    original = WeightNames.__init__

    def forgets_the_head(self: WeightNames, path: Path) -> None:
        original(self, path)
        self.tied, self.expected = False, self.expected - {HEAD}

    with rollout_over(tied) as rollout:
        rollout.load_weights(iterate_weights(tied.others[0]), 1, probe(tied.score(tied.others[0])))
    monkeypatch.setattr(WeightNames, "__init__", forgets_the_head)
    with rollout_over(tied) as rollout:
        with pytest.raises(RolloutError, match=r"differ by .* nats on a token of the probe"):
            rollout.load_weights(iterate_weights(tied.others[1]), 1, probe(tied.score(tied.others[1])))
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("fault", "told"),
    [("temperature", r"differ by .* nats on a token of the probe"), ("other_version", r"given version 1 and sampled its probe")],
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
    raw = Started(tmp_path, False, [str(Path(__file__).with_name("faulty_worker.py"))])
    try:
        with rollout_over(raw) as rollout, pytest.raises(RolloutError, match=r"differ by .* nats on a token of the probe"):
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
