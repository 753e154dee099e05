"""Retrievers, encoders, rewards and protocols of others: found by entry point, by module and by file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.errors import ConfigError
from rlflow.types import Task
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import make_encoder
from rlflow_environments.retrieval.indices import brings_documents, make_retriever
from rlflow_environments.search.protocols import make_protocol
from rlflow_environments.search.rewards import Transcript, make_reward

SOURCE = """
import numpy as np
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.protocols.searchr1 import SearchR1

class Reversed(Retriever):
    def __init__(self, corpus, *, first: int = 1):
        self.found = list(corpus)[::-1][first - 1:]

    def search(self, queries, top_k):
        return [self.found[:top_k] for _ in queries]

class Lengths:
    dimensions = 1

    def __init__(self, *, scale: float = 1.0):
        self.scale = scale

    def encode_queries(self, texts):
        return np.array([[self.scale * len(text)] for text in texts], np.float32)

def brevity(transcript, *, scale: float = 1.0):
    return scale / max(1, len(transcript.model_text))

class Mine(SearchR1):
    def __init__(self, tools, max_document_characters, *, polite: bool = False):
        super().__init__(tools, max_document_characters)
        self.polite = polite
"""
ENTRY_POINTS = """
[rlflow.retrievers]
mine = their_parts:Reversed
[rlflow.encoders]
mine = their_parts:Lengths
[rlflow.rewards]
mine = their_parts:brevity
[rlflow.protocols]
mine = their_parts:Mine
"""
PASSAGES = [Passage("0", "A", '"A"\nfirst', ""), Passage("1", "B", '"B"\nsecond', "")]


def _retrieve(name: str, **options: Any) -> object:
    return make_retriever({"name": name, **options}, PASSAGES).search(["x"], 1)[0][0].id


def _encode(name: str, **options: Any) -> object:
    return make_encoder({"name": name, **options}).encode_queries(["four"]).tolist()


def _reward(name: str, **options: Any) -> object:
    transcript = Transcript(Task("0", "", answer=[""]), ("four",))
    return asyncio.run(make_reward({"name": name, **options})(transcript)).value


def _protocol(name: str, **options: Any) -> object:
    return make_protocol({"name": name, **options}, ["search"]).polite


@pytest.fixture
def way(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """Class name -> the name under which a configuration finds it."""
    (tmp_path / "their_parts.py").write_text(SOURCE)
    information = tmp_path / "their_parts-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: their-parts\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    names = {
        "module": "their_parts:{}",
        "file": f"{tmp_path / 'their_parts.py'}:{{}}",
        "entry point": "mine",
    }
    return names[request.param].format


@pytest.mark.parametrize("way", ["entry point", "module", "file"], indirect=True)
@pytest.mark.parametrize(
    ("make", "class_name", "option", "plain", "with_option"),
    [
        (_retrieve, "Reversed", {"first": 2}, "1", "0"),
        (_encode, "Lengths", {"scale": 2}, [[4.0]], [[8.0]]),
        (_reward, "brevity", {"scale": 2}, 0.25, 0.5),
        (_protocol, "Mine", {"polite": True}, False, True),
    ],
    ids=["retriever", "encoder", "reward", "protocol"],
)
def test_parts_of_others_are_found_made_and_checked(
    way: Callable[[str], str],
    make: Callable[..., object],
    class_name: str,
    option: dict,
    plain: object,
    with_option: object,
) -> None:
    name = way(class_name)
    assert make(name) == plain and make(name, **option) == with_option
    with pytest.raises(
        ConfigError, match=rf"unknown keyword 'colour'. It takes: {next(iter(option))}\."
    ):
        make(name, colour=1)
    with pytest.raises(
        ConfigError, match=rf"{next(iter(option))}: expected .*, found 'much' \(text\)"
    ):
        make(name, **dict.fromkeys(option, "much"))


def test_a_retriever_whose_corpus_may_be_missing_brings_its_documents() -> None:
    assert [
        name for name in ("bm25", "faiss", "qdrant", "http", "random") if brings_documents(name)
    ] == ["qdrant", "http"]
    with pytest.raises(ConfigError, match="it needs a corpus"):
        make_retriever("bm25", None)


def test_every_component_of_the_search_environment_is_typed() -> None:
    with pytest.raises(
        ConfigError, match=r"retriever\.dimensions: expected a whole number above 0, found 'many'"
    ):
        make_retriever({"name": "dense", "dimensions": "many"}, PASSAGES)
    with pytest.raises(ConfigError, match=r"environment\.reward\.structure: expected a number"):
        make_reward({"name": "searchr1_em_format", "structure": "much"})
    assert np.isfinite(
        make_encoder({"name": "hashed", "title_weight": 1}, PASSAGES).encode_queries(["x"])
    ).all()
