"""The remote teacher against transformers behind the wire format of vLLM; what a server cannot do is one clear error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.algorithms.teachers import remote_model as module
from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.algorithms.teachers.remote_model import ServerTeacher
from rlflow.batching import token_batch
from rlflow.errors import ConfigError, RLFlowError
from rlflow.rollout import Tokenizer
from rlflow.types import Batch
from tests.fixtures import tiny_model
from tests.reference.trainer import ReferenceTrainer
from tests.unit.algorithms.teachers.completion_server import serve


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return tiny_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(path)


@pytest.fixture
def make(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    teachers: list[ServerTeacher] = []

    def build(url: str, temperature: float = 1.0, **options: Any) -> ServerTeacher:
        teachers.append(ServerTeacher(url, "teacher", **options))
        teachers[-1].open(Classroom(None, tokenizer, lambda task: [], temperature))  # type: ignore[arg-type]
        return teachers[-1]

    yield build
    for teacher in teachers:
        teacher.close()


def rows(temperatures: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Batch:
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 300, (length,), generator=draw).tolist() for length in (4, 11, 2)]
    return token_batch(tokens).replace(temperatures=torch.tensor(temperatures))


@pytest.mark.parametrize(
    ("wire", "top_k"), [("prompt_logprobs", 3), ("prompt_logprobs", 0), ("echo", 3)]
)
def test_scores_are_those_of_a_forward_pass_and_the_ids_are_sent_as_they_are(
    make: Any, path: Path, wire: str, top_k: int
) -> None:
    batch = rows()
    with serve(path) as (url, model):
        teacher = make(url, wire=wire, top_k=top_k, rows_per_request=2)
        started = len(model.requests)
        found = teacher.score(batch)
    asked = [row for request in model.requests[started:] for row in request["prompt"]]
    pairs = zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
    assert sorted(asked) == sorted(row[:length] for row, length in pairs)
    expected = ReferenceTrainer(path).score(batch, top_k=top_k)
    assert set(found) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=1e-5, rtol=0)


def test_a_server_that_has_the_temperature_is_asked_for_it(make: Any, path: Path) -> None:
    batch = rows((0.5, 0.7, 0.5))
    with serve(path, temperature=True) as (url, _):
        found = make(url, temperature=0.7).score(batch)
    expected = ReferenceTrainer(path).score(batch)["logprobs"]
    torch.testing.assert_close(found["logprobs"], expected, atol=1e-5, rtol=0)


def test_a_server_that_ignores_the_temperature_is_refused_at_another_one(
    make: Any, path: Path
) -> None:
    with (
        serve(path) as (url, _),
        pytest.raises(ConfigError, match=r"at temperature 1, .*rollout\.temperature = 0\.7"),
    ):
        make(url, temperature=0.7)


def test_a_server_that_comes_back_is_waited_for_and_one_that_does_not_is_given_up(
    make: Any, path: Path
) -> None:
    with serve(path, failures=3) as (url, model):
        make(url, tries=9)
        assert len(model.requests) > 3
    with (
        serve(path, failures=99) as (url, _),
        pytest.raises(RLFlowError, match="no answer after 2 attempts; last: status 503"),
    ):
        make(url, tries=2)
    with pytest.raises(RLFlowError, match=r"attempts; last: no connection to .* refused"):
        make("http://127.0.0.1:9/v1", tries=2)


def test_a_server_that_hangs_ends_at_the_deadline(make: Any, path: Path) -> None:
    with serve(path, delay_s=300.0) as (url, _):
        started = time.monotonic()
        with pytest.raises(
            RLFlowError, match=r"not answered after 0.3 s; raise algorithm\.teacher\.deadline_s"
        ):
            make(url, deadline_s=0.3)
        assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "served, options, message",
    [
        ({"drop": "prompt_logprobs"}, {}, "no prompt_logprobs, so it cannot be a teacher.*vLLM"),
        ({"drop": "logprobs"}, {"wire": "echo"}, "no logprobs of the echoed prompt"),
        ({"shift": 1}, {}, r"token \d+ is .* to the server and .* to the policy"),
        (
            {},
            {"top_k": 3, "api_key_variable": "NO_SUCH_VARIABLE"},
            "environment variable NO_SUCH_VARIABLE is not set",
        ),
    ],
)
def test_what_a_server_cannot_do_is_one_error(
    make: Any, path: Path, served: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with serve(path, **served) as (url, _), pytest.raises(RLFlowError, match=message):
        make(url, **options)


def test_a_model_that_it_does_not_have_and_an_address_that_is_none(
    path: Path, tokenizer: Tokenizer
) -> None:
    with serve(path) as (url, _):
        teacher = ServerTeacher(url, "another")
        with pytest.raises(
            RLFlowError, match=r"status 404.*check algorithm.teacher.url, model, wire"
        ):
            teacher.open(Classroom(None, tokenizer, lambda task: [], 1.0))  # type: ignore[arg-type]
        teacher.close()
    with pytest.raises(ConfigError, match="expected an address such as http"):
        ServerTeacher("localhost:8000", "teacher")
