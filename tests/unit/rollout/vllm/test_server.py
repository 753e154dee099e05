"""Engines over a vLLM that somebody serves, against a server with its routes and without vLLM: what
it is asked, and what goes wrong. The contract is that of `test_engine`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.components import ENGINE
from rlflow.errors import ConfigError, RolloutError
from rlflow.models.entries import Experts
from rlflow.models.huggingface import iterate_weights
from rlflow.models.vocabulary import known_vocab
from rlflow.rollout import Tokenizer
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.vllm import served_model
from rlflow.rollout.vllm.completions import decoded_routes
from rlflow.rollout.vllm.engines import make_vllm_server_engines
from rlflow.rollout.vllm.launch import VARIABLE, check_python
from rlflow.rollout.vllm.server import VLLMServer
from rlflow.rollout.vllm.vllm_engine import VLLMEngine
from tests.fixtures import tiny_model
from tests.unit.rollout.engine_contract import PROMPT, Make, Pairs, run, some_steps, start
from tests.unit.rollout.vllm.fake_server import FakeServed
from tests.unit.rollout.vllm.real import scorer
from tests.unit.rollout.vllm.test_engine import some_tokens

Serve = Callable[..., FakeServed]


@pytest.fixture
def serve(qwen: Path) -> Iterator[Serve]:
    served: list[FakeServed] = []

    def new(fault: str = "", **options: Any) -> FakeServed:
        served.append(FakeServed(qwen, fault, **options))
        return served[-1]

    yield new
    for one in served:
        one.close()


@pytest.fixture
def make(qwen: Path, tokenizer: Tokenizer, serve: Serve, tmp_path: Path) -> Iterator[Make]:
    made: list[VLLMEngine] = []

    def new(fault: str = "", served: FakeServed | None = None, **options: Any) -> VLLMEngine:
        url = (served or serve(fault)).url
        options = {"weights_folder": str(tmp_path / "weights"), "start_s": 2.0, **options}
        engines = make_vllm_server_engines(qwen, tokenizer, url=url, **options)
        made.extend(engines)  # type: ignore[arg-type]
        return made[-1]

    yield new
    for engine in made:
        engine.kill()


@pytest.fixture
def weights(other_qwen: Path) -> Pairs:
    return list(iterate_weights(other_qwen))


def test_a_server_that_takes_a_connection_and_never_answers_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        server = VLLMServer(None, connections=1, url=f"http://127.0.0.1:{port}")
        with (
            contextlib.closing(server),
            pytest.raises(RolloutError, match=r"did not answer in 0\.5 s"),
        ):
            began = time.monotonic()
            server.wait_until_ready(0.5)
        assert time.monotonic() - began < 60


# --- what it is asked -------------------------------------------------------------------------------------------------


def test_what_is_sent_leaves_nothing_to_the_server_s_defaults(make: Make, serve: Serve) -> None:
    served = serve()
    run(make(served=served).generate(PROMPT, Sampling(3, 0.7, stop=("x",), seed=5), priority=4))
    (body,) = served.bodies
    asked = body["sampling_params"]
    assert (body["token_ids"], body["model"], "priority" in body) == (PROMPT, "fake", False)
    assert (asked["logprobs"], asked["ignore_eos"], asked["include_stop_str_in_output"]) == (
        0,
        True,
        True,
    )
    run(make(served=served).generate([*PROMPT, 9], Sampling(3, 0.7, stop=("x",), seed=5)))
    run(make(served=served).generate(PROMPT, Sampling(3, 0.7, stop=("x",), seed=5)))
    longer, again = (body["sampling_params"]["seed"] for body in served.bodies[1:])
    assert (
        asked["seed"] == again != longer
    )  # a part that goes on must not draw the numbers of the part before it
    assert body["cache_salt"].endswith("0")


def test_the_tensors_that_arrive_are_those_that_were_sent_and_nothing_is_left(
    make: Make, weights: Pairs, tmp_path: Path, serve: Serve
) -> None:
    served = serve()

    async def play(engine: VLLMEngine) -> float:
        await engine.load_weights(weights, 1)
        done = await engine.generate(PROMPT, Sampling(1, seed=1))
        assert done.versions == [1]
        return done.logprobs[0] / (1 + done.tokens[0] / 1000)

    norm = dict(weights)["model.norm.weight"]
    assert run(play(make(served=served, bucket_mib=1))) == pytest.approx(-float(norm[0]), rel=1e-6)
    assert not list((tmp_path / "weights").rglob("*.safetensors")) and not served.paused


def test_closing_leaves_the_server_as_it_was_found(make: Make, serve: Serve) -> None:
    served = serve()

    async def play(engine: VLLMEngine) -> None:
        request = start(engine, PROMPT, 3000)
        await some_tokens(engine)
        await engine.pause("keep")
        await engine.close()
        assert (await request).stop == "aborted"
        with pytest.raises(RolloutError, match="closed"):
            await engine.generate(PROMPT, Sampling(1))

    run(play(make(served=served)))
    assert not served.paused


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **sizes)


def over_experts(path: Path, fault: str = "", **options: Any) -> Completion:
    served = FakeServed(path, fault, scores=lambda row, temperature: [-1.0] * (len(row) - 1))
    try:
        given = {"weights_folder": str(path / "weights"), "start_s": 2.0, "routes": True, **options}
        (engine,) = make_vllm_server_engines(path, url=served.url, **given)
        assert isinstance(engine, VLLMEngine)
        done = run(engine.generate(PROMPT, Sampling(5, seed=1)))
        engine.kill()
        return done
    finally:
        served.close()


def test_every_request_leaves_out_the_ids_that_the_tokenizer_has_not(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, vocab_size=390)
    served = FakeServed(path)
    folder = str(path / "weights")
    (engine,) = make_vllm_server_engines(path, url=served.url, weights_folder=folder, start_s=2.0)
    assert isinstance(engine, VLLMEngine)
    run(engine.generate(PROMPT, Sampling(5, seed=1)))
    engine.kill()
    served.close()
    biases = [body["sampling_params"]["logit_bias"] for body in served.bodies]
    known = known_vocab(path, 390)
    assert known < 390 and biases
    assert all(bias == {str(token): -100.0 for token in range(known, 390)} for bias in biases)


def test_routes_come_from_the_layers_that_have_experts(experts: Path) -> None:
    done = over_experts(experts)
    fed = torch.tensor([*PROMPT, *done.tokens][:-1])
    expected = torch.stack([fed % 8, (fed + 1) % 8], -1)[:, None].expand(-1, 2, -1)
    assert done.routes is not None and torch.equal(done.routes.long(), expected)
    assert done.routes_version == -1  # it says the versions of sampled tokens alone
    assert over_experts(experts, "no_routes", routes=False).routes is None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no_routes", "asked for a prompt; .* start it with --enable-return-routed-experts"),
        (
            "drops_cached_routes",
            r"asked for a prompt that it has in its cache; .* \(303, 3, 2\), found \(4, 3, 2\)",
        ),
        (
            "zeroes_cached_routes",
            "a prompt that it has in its cache, sent routes that name an expert twice",
        ),
        ("wild_routes", "asked for a prompt; expected routes of .* found"),
    ],
)
def test_a_server_that_does_not_say_all_routes_is_refused_at_the_start(
    experts: Path, fault: str, words: str
) -> None:
    with pytest.raises(RolloutError, match=words):
        over_experts(experts, fault)


VLLM_S_OWN = (
    "import numpy, vllm.utils.serial_utils as utils; "
    "print(utils.numpy2base64(numpy.arange(24, dtype=numpy.uint8).reshape(4, 3, 2)))"
)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no interpreter with vLLM"
)
def test_real_vllm_writes_routes_as_they_are_read_and_needs_a_triton_for_cpus() -> None:
    python = os.environ[VARIABLE]
    said = subprocess.run(
        [python, "-c", VLLM_S_OWN], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    found = decoded_routes(said, Experts(8, 1, 0, (True, False, True), 2), 4, "vLLM")
    assert torch.equal(found, torch.arange(24, dtype=torch.uint8).view(4, 3, 2)[:, [0, 2]])
    check_python(python)
    has = (
        subprocess.run([python, "-c", "import triton.backends.cpu"], capture_output=True).returncode
        == 0
    )
    with (
        contextlib.nullcontext()
        if has
        else pytest.raises(ConfigError, match="Triton that compiles for CPUs")
    ):
        check_python(python, triton=True)


def test_routes_of_a_dense_model_are_refused(qwen: Path) -> None:
    with pytest.raises(ConfigError, match="the model has no experts"):
        make_vllm_server_engines(qwen, url="http://127.0.0.1:1", routes=True)


def test_each_url_is_an_engine(qwen: Path, tokenizer: Tokenizer, serve: Serve) -> None:
    score = scorer(qwen)
    urls = [serve(scores=score).url, serve(scores=score).url + "/v1/"]
    engines = ENGINE.build(
        {"name": "vllm_server", "url": urls}, "rollout.engine", path=qwen, tokenizer=tokenizer
    )
    assert len(engines) == 2 and not any(engine.takes_weights for engine in engines)
    for engine in engines:
        assert len(run(engine.generate(PROMPT, Sampling(3))).tokens) == 3
        run(engine.close())


def test_a_key_is_sent_from_its_variable(
    make: Make, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(key="secret")
    with pytest.raises(RolloutError, match="status 401"):
        make(served=served)
    monkeypatch.setenv("SERVED_KEY", "secret")
    assert make(served=served, api_key_variable="SERVED_KEY").max_tokens == 4096


def test_with_a_folder_a_server_begins_with_the_weights_of_the_directory(
    make: Make, serve: Serve, qwen: Path
) -> None:
    served = serve()
    served.scale = 77.0
    engine = make(served=served)
    assert engine.version == 0 and served.scale == pytest.approx(
        float(dict(iterate_weights(qwen))["model.norm.weight"][0])
    )
    assert set(run(engine.generate(PROMPT, Sampling(3))).versions) == {0}


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "told"),
    [("disabled", "status 403: .*--enable-scale-out"), ("raw", "--logprobs-mode processed_logprobs"), ("paused", "is paused"),
     ("undeveloped", "VLLM_SERVER_DEV_MODE=1")],
)  # fmt: skip
def test_a_server_that_cannot_be_used_is_refused_at_the_start(
    make: Make, fault: str, told: str
) -> None:
    with pytest.raises(RolloutError, match=told) as caught:
        make(fault)
    assert "\n" not in str(caught.value)


def test_nobody_there_is_one_error_after_start_s(qwen: Path, tokenizer: Tokenizer) -> None:
    begun = time.monotonic()
    with pytest.raises(
        RolloutError, match=r"http://127\.0\.0\.1:9 did not answer in 0\.2 s .*vllm serve MODEL"
    ):
        make_vllm_server_engines(qwen, tokenizer, url="http://127.0.0.1:9", start_s=0.2)
    assert time.monotonic() - begun < 5
    with pytest.raises(ConfigError, match=r"rollout\.engine\.url: expected an address"):
        make_vllm_server_engines(qwen, tokenizer, url="localhost:8000")


def test_a_request_is_sent_again_until_somebody_answers_and_not_for_ever(
    make: Make, serve: Serve
) -> None:
    served = serve()
    engine = make(served=served, retry_s=20.0)
    expected = run(engine.generate(PROMPT, Sampling(5, seed=2))).tokens
    served.drops = 2
    assert run(engine.generate(PROMPT, Sampling(5, seed=2))).tokens == expected
    served.drops = 10**6
    with pytest.raises(
        RolloutError, match=r"no answer in \d+ attempts over 0\.6 s \(rollout\.engine\.retry_s\)"
    ):
        run(make(served=served, retry_s=0.6).generate(PROMPT, Sampling(5)))


def test_a_server_that_was_started_anew_has_old_weights_and_is_found_out(
    make: Make, serve: Serve, weights: Pairs
) -> None:
    served = serve()
    engine = make(served=served)

    async def play() -> None:
        await engine.load_weights(weights, 3)
        served.restart()
        with pytest.raises(
            RolloutError, match=r"sampled with weights 'default' where version 3 .*started anew"
        ):
            await engine.generate(PROMPT, Sampling(3))

    run(play())


def test_weights_that_somebody_else_gave_the_server_are_found_out(
    make: Make, serve: Serve, qwen: Path
) -> None:
    served = serve(scores=scorer(qwen))
    engine = make(served=served, weights_folder=None)
    served.label = "another"
    with pytest.raises(RolloutError, match=r"'another'.*somebody else gave it weights"):
        run(engine.generate(PROMPT, Sampling(3)))


def test_a_server_that_keeps_its_weights_is_asked_whether_they_are_the_models(
    make: Make, serve: Serve, qwen: Path, other_qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers, in float64, tells the log-probs that the server answers."""
    same, other = scorer(qwen), scorer(other_qwen)
    with caplog.at_level("INFO"):
        make(served=serve(scores=same), weights_folder=None)
    assert f"has the weights of {qwen}" in caplog.text and "WARNING" not in caplog.text
    rounded = scorer(qwen, torch.bfloat16)
    make(served=serve(scores=rounded), weights_folder=None)
    assert f"nats from those of {qwen}: bfloat16, or weights that are a little older" in caplog.text
    with pytest.raises(
        RolloutError,
        match=rf"says that it serves {qwen}.*: expected the weights of {qwen}, found others",
    ):
        make(served=serve(scores=other), weights_folder=None)


def test_a_model_too_large_to_compute_here_is_said_not_to_be_known(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_model, "LARGEST", 1000)
    make(weights_folder=None)
    assert "it is not known whether its weights are those of" in caplog.text


def test_without_a_folder_weights_are_refused_and_without_routes_a_pause(
    make: Make, serve: Serve, weights: Pairs, qwen: Path
) -> None:
    score = scorer(qwen)
    with pytest.raises(
        RolloutError, match=r"keeps the weights that it has: .*rollout\.engine\.weights_folder"
    ):
        run(make(served=serve(scores=score), weights_folder=None).load_weights(weights, 1))
    engine = make(served=serve("undeveloped", scores=score), weights_folder=None)
    assert len(run(engine.generate(PROMPT, Sampling(3))).tokens) == 3
    with pytest.raises(RolloutError, match="cannot be paused"):
        run(engine.pause("keep"))


def test_a_cache_that_is_not_cleared_ends_the_update(
    make: Make, serve: Serve, weights: Pairs, tmp_path: Path
) -> None:
    async def play(engine: VLLMEngine) -> None:
        request = start(engine, PROMPT, 3000)
        await some_steps()
        with pytest.raises(RolloutError, match="the cache was not cleared"):
            await engine.load_weights(weights, 1)
        with pytest.raises(RolloutError, match="half loaded"):
            await asyncio.wait_for(request, 10)

    served = serve()
    engine = make(served=served)
    served.fault = "keeps_cache"
    run(play(engine))
    assert not list((tmp_path / "weights").rglob("*.safetensors"))
