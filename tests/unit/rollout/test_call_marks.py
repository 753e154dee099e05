"""Control tokens that calls of tools are written with: part of a response's text, of nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import tiny_tokenizer

from rlflow.models.calls.form import TextCall
from rlflow.rollout import Tokenizer
from rlflow.types import Step
from tests.unit.rollout.chat_templates import (
    GPT_OSS,
    QWEN3,
    Talk,
    check_segments,
    dressed,
    played,
    user,
)

CALL = "<|channel|>commentary to=functions.look<|message|>{}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return dressed(directory, GPT_OSS)


def test_the_text_of_a_response_keeps_the_marks_of_its_calls(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"<|im_start|>{CALL}<|return|>")
    assert tokenizer.response_text(ids) == CALL
    assert tokenizer.spoken(tokenizer.speech(ids)) == CALL
    assert tokenizer.call_reader.read(CALL).calls == [TextCall("look", {})]


def test_other_templates_have_no_such_marks(directory: Path) -> None:
    tokenizer = dressed(directory, QWEN3)
    assert tokenizer.response_text(tokenizer.encode(CALL)) == "commentary to=functions.look{}"


def test_a_response_of_elsewhere_has_its_marks_and_no_other_control_token(
    tokenizer: Tokenizer,
) -> None:
    for text in (CALL, "plain", ""):
        ids = tokenizer.encode_response(text)
        assert ids == tokenizer.encode(text) and tokenizer.response_text(ids) == text
    ids = tokenizer.encode_response(f"{CALL}<|im_end|>")
    assert tokenizer.special_ids.isdisjoint(ids[-1:]) and tokenizer.response_text(ids) != CALL
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode_text(CALL))


def test_a_call_is_shown_again_as_it_was_sampled(tokenizer: Tokenizer) -> None:
    """The environment sends back what it got as the response's text."""
    ids = [*tokenizer.encode(CALL), tokenizer.eos_ids[-1]]
    said = {"role": "assistant", "content": tokenizer.response_text(ids)}
    told = Talk([Step([user("a"), said, user("b")], after=-1)])
    one, fed = played(tokenizer, [user("a")], [ids, ids], told, history="exact")
    check_segments(one, fed, [ids, ids])
    assert tokenizer.decode(fed[1], False).count("to=functions.look<|message|>{}") == 1
    assert fed[1].count(tokenizer.encode("<|channel|>")[0]) >= 1
