"""An engine that tells its text as it comes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from rlflow.rollout import Tokenizer
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Sampling
from rlflow.rollout.streaming import PIECE_TOKENS, StreamingEngine
from tests.fixtures import tiny_model

PROMPT = list(range(20, 45))


class Heard:
    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.texts: list[tuple[str, bool]] = []

    def shown(self, text: str) -> None:
        self.prompts.append(text)

    def said(self, text: str, ended: bool) -> None:
        self.texts.append((text, ended))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_greedy_completions_are_those_of_one_request(model: Path) -> None:
    tokenizer, heard = Tokenizer.from_pretrained(model), Heard()
    plain, inner = EmbeddedEngine(model, tokenizer), EmbeddedEngine(model, tokenizer)
    streaming = StreamingEngine(inner, tokenizer, heard)
    for count in (1, PIECE_TOKENS, 23):
        sampling = Sampling(count, temperature=0.0)
        expected = asyncio.run(plain.generate(PROMPT, sampling))
        found = asyncio.run(streaming.generate(PROMPT, sampling, "a"))
        assert (found.tokens, found.stop, found.versions) == (
            expected.tokens,
            expected.stop,
            expected.versions,
        )
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert heard.texts[-1] == (tokenizer.decode(found.tokens), True)
    told = [text for text, _ in heard.texts[-6:]]
    assert len(told) == 6 and all(later.startswith(earlier) for earlier, later in pairwise(told))


def test_a_stop_string_over_the_edge_of_two_pieces_ends_the_response(model: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(model)
    free = asyncio.run(
        EmbeddedEngine(model, tokenizer).generate(PROMPT, Sampling(40, temperature=0.0))
    )
    edges = range(PIECE_TOKENS, 36, PIECE_TOKENS)
    strings = {
        edge: tokenizer.decode(free.tokens[edge - 1 : edge + 1], skip_special_tokens=False)
        for edge in edges
    }
    tried = 0
    for edge, string in strings.items():
        before = tokenizer.decode(free.tokens[:edge], skip_special_tokens=False)
        if "\ufffd" in string or string in before or len(string) < 2:
            continue
        tried += 1
        sampling = Sampling(40, temperature=0.0, stop=(string,))
        streaming = StreamingEngine(EmbeddedEngine(model, tokenizer), tokenizer, Heard())
        found = asyncio.run(streaming.generate(PROMPT, sampling, "a"))
        assert (found.tokens, found.stop) == (free.tokens[: edge + 1], "stop")
        assert len(found.logprobs) == len(found.versions) == edge + 1
    assert tried


def test_what_is_shown_is_the_prompt_and_then_what_is_new(model: Path) -> None:
    tokenizer, heard = Tokenizer.from_pretrained(model), Heard()
    streaming = StreamingEngine(EmbeddedEngine(model, tokenizer), tokenizer, heard)
    said = asyncio.run(
        streaming.generate(tokenizer.encode("Where?"), Sampling(5, temperature=0.0), "a")
    )
    asyncio.run(
        streaming.generate(
            [*tokenizer.encode("Where?"), *said.tokens, *tokenizer.encode(" In Vasmere.")],
            Sampling(3),
            "a",
        )
    )
    asyncio.run(streaming.generate(tokenizer.encode("Another"), Sampling(3), "b"))
    assert heard.prompts == ["Where?", " In Vasmere.", "Another"]


def test_of_a_rewritten_conversation_the_rest_from_there_is_shown(model: Path) -> None:
    tokenizer, heard = Tokenizer.from_pretrained(model), Heard()
    streaming = StreamingEngine(EmbeddedEngine(model, tokenizer), tokenizer, heard)
    said = asyncio.run(
        streaming.generate(tokenizer.encode("Where?"), Sampling(5, temperature=0.0), "a")
    )
    other = next(token for token in tokenizer.encode("xyz") if token != said.tokens[1])
    rewritten = [
        *tokenizer.encode("Where?"),
        said.tokens[0],
        other,
        *tokenizer.encode(" In Vasmere."),
    ]
    asyncio.run(streaming.generate(rewritten, Sampling(3), "a"))
    assert heard.prompts[1] == f"{tokenizer.decode([other])} In Vasmere."
