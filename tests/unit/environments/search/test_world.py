"""The fictional encyclopedia: the same bytes for everyone, true to itself, and its two halves never meet."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.corpus import Corpus
from rlflow_environments.search.environment import SearchEnvironment
from rlflow_environments.search.questions import read_tasks
from rlflow_environments.search.world.articles import titles
from rlflow_environments.search.world.prose import (
    ADJECTIVES,
    NOUNS,
    OPENINGS,
    RELATIONS,
    fits,
    pool_of,
    syllables,
)
from rlflow_environments.search.world.world import FILES, ensure_world
from tests.unit.environments.retrieval.search_corpora import read_pages
from tests.unit.environments.search.search_solver import Facts, answers, read_facts

ROOT = Path(__file__).resolve().parents[4]
SMALL = {"size": 0.1, "train_questions": 60, "val_questions": 20}
NAME_WORD = re.compile(r"\b[A-Z][a-z]{4,6}\b")
"""The shape of an invented word: a first syllable of three letters and a second one of two to four."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The world of the demo."""
    return ensure_world(tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="module")
def corpus(world: dict[str, Path]) -> Corpus:
    return Corpus(world["corpus"])


@pytest.fixture(scope="module")
def facts(corpus: Corpus) -> Facts:
    return read_facts({passage.title: passage.body for passage in corpus})


@pytest.fixture(scope="module")
def rows(world: dict[str, Path]) -> dict[str, list[dict]]:
    return {
        pool: [json.loads(line) for line in world[pool].read_text().splitlines()]
        for pool in ("train", "val")
    }


@functools.cache
def pool_by_word() -> dict[str, str]:
    """Every word that a name can have, and the pool that it is drawn from."""
    first, last = syllables()
    pairs = itertools.product(enumerate(first), enumerate(last))
    return {start + end: pool_of(i, j) for (i, start), (j, end) in pairs if fits(start, end)}


def pools_in(text: str) -> set[str]:
    """The pools of all invented words and titles of works in the text."""
    words = pool_by_word()
    found = {
        words[word]
        for word in NAME_WORD.findall(text)
        if word in words and word not in english_words()
    }
    named = re.findall(rf"The (?:{'|'.join(ADJECTIVES)}) (?:{'|'.join(NOUNS)})", text)
    return found | {pool_by_title()[title] for title in named}


@functools.cache
def english_words() -> set[str]:
    """Capitalised words of the sentences themselves, e.g. "Barges", which has the shape of a name by accident."""
    spoken = [sentence for relation in RELATIONS.values() for sentence in relation.sentences]
    return set(NAME_WORD.findall(" ".join([*spoken, *itertools.chain(*OPENINGS.values())])))


@functools.cache
def pool_by_title() -> dict[str, str]:
    return {title: pool for pool in ("train", "val") for title in titles(pool)}


# ---------------------------------------------------------------- names


def test_every_word_belongs_to_one_pool_and_the_pools_share_every_syllable() -> None:
    first, last = syllables()
    words = pool_by_word()
    pairs = sum(fits(left, other) for left, other in itertools.product(first, last))
    assert (
        len(set(first)) == len(set(last)) == 200 and len(words) == pairs > 35_000
    )  # no word can be split in two ways
    assert all(len(syllable) == 3 for syllable in first)
    for pool, share in (("train", 0.8), ("val", 0.2)):
        drawn = {word for word, its in words.items() if its == pool}
        assert abs(len(drawn) / pairs - share) < 0.01
        assert {word[:3] for word in drawn} == set(first) and {word[3:] for word in drawn} == set(
            last
        )
    assert not set(titles("train")) & set(titles("val"))


# ---------------------------------------------------------------- the files


def test_the_demo_world_has_two_thousand_passages_with_pages_of_their_own(
    world: dict[str, Path], corpus: Corpus
) -> None:
    pages = read_pages(world["pages"])
    assert len(corpus) >= 2000 and len({passage.title for passage in corpus}) == len(corpus)
    assert set(pages) == {passage.url for passage in corpus}
    assert all(
        passage.body in pages[passage.url] and len(pages[passage.url]) > len(passage.contents)
        for passage in corpus
    )
    assert (len(read_tasks(world["train"], "train")), len(read_tasks(world["val"], "val"))) == (
        2000,
        400,
    )


def test_prose_is_varied(corpus: Corpus) -> None:
    """Hardly an article has the outline of another: names and numbers blanked, most are unique in their kind."""
    blanked = [
        re.sub(
            r"\d+",
            "#",
            re.sub(r"(?:The )?[A-Z][a-z]+(?: [A-Z][a-z]+)+|[A-Z][a-z]{4,6}\b", "@", passage.body),
        )
        for passage in corpus
    ]
    assert len(set(blanked)) > 0.6 * len(blanked)


def test_articles_are_english_sentences(corpus: Corpus) -> None:
    for passage in corpus:
        assert passage.body[0].isupper() and passage.body.endswith(".") and "{" not in passage.body
        assert not re.search(r"  | \.|\ba [aeiou]|\bAn? [A-Z]|\.\.", passage.body), passage.body
        assert all(sentence[0].isupper() for sentence in passage.body.split(". "))


def test_equal_seeds_give_equal_bytes_in_any_process(tmp_path: Path) -> None:
    """In another process, with another order of sets and dictionaries' hashes."""

    def fingerprints(directory: Path) -> dict[str, str]:
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in directory.glob("*/*")
        }

    ensure_world(tmp_path / "here", **SMALL)
    world = "rlflow_environments.search.world.world"
    call = f"from {world} import ensure_world; ensure_world({str(tmp_path / 'there')!r}, **{SMALL})"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "17",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    subprocess.run([sys.executable, "-c", call], check=True, env=environment)
    ensure_world(tmp_path / "other", seed=8, **SMALL)
    here, there, other = (fingerprints(tmp_path / name) for name in ("here", "there", "other"))
    assert here == there and set(here) == {*FILES.values(), "manifest.json"}
    assert all(here[name] != other[name] for name in here)


def test_a_world_is_made_once_and_other_arguments_never_touch_it(tmp_path: Path) -> None:
    paths = ensure_world(tmp_path, **SMALL)
    before = {path: path.stat().st_mtime_ns for path in paths.values()}
    assert ensure_world(tmp_path, **SMALL) == paths
    other = ensure_world(tmp_path, **{**SMALL, "val_questions": 19})
    assert not set(other.values()) & set(paths.values())
    assert {path: path.stat().st_mtime_ns for path in paths.values()} == before


def test_no_half_written_world_is_left_or_taken_for_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ensure_world(tmp_path / "failed", **{**SMALL, "prompt_template": "none"})
    assert not (tmp_path / "failed").exists()

    killed = tmp_path / "killed"
    call = f"from rlflow_environments.search.world.world import ensure_world; ensure_world({str(killed)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", call], env=environment)
    while not list(killed.glob("*.partial/corpus.jsonl*")) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = ensure_world(tmp_path / "whole")
    again = ensure_world(killed)
    assert all(again[name].read_bytes() == whole[name].read_bytes() for name in whole)


# ---------------------------------------------------------------- truth


def test_every_article_states_every_fact_of_its_subject_once(corpus: Corpus, facts: Facts) -> None:
    """Facts are read out of the text; a kind of entity has the same relations everywhere, each with one object."""
    assert all(len(objects) == 1 for objects in facts.values())
    stated: dict[str, frozenset[str]] = {
        passage.title: frozenset(
            relation for subject, relation in facts if subject == passage.title
        )
        for passage in list(corpus)[:300]
    }
    allowed = [
        {"birthplace"},
        {"mouth", "source"},
        {"river", "country"},
        {"capital"},
        {"author"},
        {"founder", "seat"},
    ]
    for title, relations in stated.items():
        own = relations - {"teacher", "spouse"}  # which a few people do not have
        assert own in allowed, (title, relations)


def test_facts_agree_with_each_other(facts: Facts) -> None:
    spouses = {
        subject: next(iter(objects))
        for (subject, relation), objects in facts.items()
        if relation == "spouse"
    }
    assert spouses and all(
        spouses[other] == person and person != other for person, other in spouses.items()
    )
    for (subject, relation), objects in facts.items():
        if relation == "capital":
            assert facts[(next(iter(objects)), "country")] == {subject}
        assert subject not in objects


@pytest.mark.parametrize("pool", ["train", "val"])
def test_every_question_has_one_answer_and_the_corpus_gives_it(
    pool: str, rows: dict[str, list[dict]], facts: Facts
) -> None:
    """A reader that knows the language but none of the data finds every solution, and no other, by following the chain."""
    for row in rows[pool]:
        assert answers(row["question"], facts) == set(row["solutions"]), row


@pytest.mark.parametrize("pool", ["train", "val"])
def test_questions_are_of_the_kinds_that_were_asked_for(
    pool: str, rows: dict[str, list[dict]]
) -> None:
    asked = rows[pool]
    assert len({row["question"] for row in asked}) == len(asked)
    kinds = {
        kind: [row for row in asked if row["kind"] == kind]
        for kind in ("one_hop", "two_hop", "comparison")
    }
    shares = {kind: len(members) / len(asked) for kind, members in kinds.items()}
    assert shares == pytest.approx({"one_hop": 0.42, "two_hop": 0.53, "comparison": 0.05})
    assert all(row["hops"] == (1 if row["kind"] == "one_hop" else 2) for row in asked)
    binary = [row for row in asked if row["solutions"][0] in ("yes", "no")]
    assert len(binary) <= 0.15 * len(asked)
    assert 0.3 < sum(row["solutions"] == ["yes"] for row in binary) / len(binary) < 0.7
    common = max(
        sum(row["solutions"] == [answer] for row in asked)
        for answer in {r["solutions"][0] for r in asked}
    )
    assert common <= 0.08 * len(asked)  # nothing to gain by always saying the same


# ---------------------------------------------------------------- the halves


def test_no_entity_of_the_validation_questions_occurs_in_training(
    rows: dict[str, list[dict]], corpus: Corpus
) -> None:
    entities = {
        pool: {name for row in members for name in row["entities"]}
        for pool, members in rows.items()
    }
    assert len(entities["val"]) > 200 and not entities["val"] & entities["train"]
    for pool, members in rows.items():
        for row in members:
            assert pools_in(row["question"]) == {pool}, row
            assert pools_in(" ".join([*row["solutions"], *row["entities"]])) <= {pool}
    by_pool = [pools_in(passage.contents) for passage in corpus]
    assert all(len(pools) == 1 for pools in by_pool)  # the halves do not mention each other
    assert 0.3 < sum(pools == {"val"} for pools in by_pool) / len(by_pool) < 0.4


def test_the_environment_plays_the_world(tmp_path: Path) -> None:
    environment = SearchEnvironment(world={"directory": str(tmp_path), **SMALL}, retriever="bm25")
    assert (len(environment.tasks("train")), len(environment.tasks("val"))) == (60, 20)
