"""Claims about retrievers: scores by hand or by brute force, order, ties, and independence from the batch."""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import ConfigError, DataError, MissingPackageError, install_command
from rlflow_environments.retrieval.corpus import Corpus, Passage, make_contents, write_corpus
from rlflow_environments.retrieval.encoders import NgramEncoder, split_words
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.make import HybridIndex, retriever_facts

NAMES = ("bm25", "dense", "hybrid", "random")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "el", "im", "on", "us")]


def _passage(title: str, text: str) -> Passage:
    return Passage(title, title, make_contents(title, text), f"doc://{title}")


def _encyclopedia(size: int = 300) -> list[Passage]:
    """People whose articles name three others, some of them more often than the other's own article does."""
    generator = random.Random(0)

    def word() -> str:
        return "".join(generator.choices(SYLLABLES, k=3)).capitalize()

    names = [f"{word()} {word()}" for _ in range(size)]
    passages = []
    for name in names:
        teacher, spouse, friend = generator.sample(names, 3)
        passages.append(
            _passage(
                name,
                f"{name} was a painter born in {word()}. The birthplace of {teacher}, who taught there, was {word()}. Later came "
                f"{spouse}; {spouse} and {friend} stayed, and the teacher of {spouse} was {friend}.",
            )
        )
    return passages


PASSAGES = _encyclopedia()
QUERIES = [f"{passage.title} birthplace" for passage in PASSAGES[:60]]
QUERIES += ["painter", "", "?!", "was the", "zzz qqq", "北京 painter"]


@pytest.fixture(scope="module", params=NAMES)
def retriever(request):
    return make_retriever(request.param, PASSAGES)


@pytest.fixture(scope="module")
def hybrid():
    return make_retriever("hybrid", PASSAGES)


def test_bm25_scores_are_those_of_the_formula():
    """Lucene's BM25: sum of ln(1 + (N - n + .5) / (n + .5)) * tf / (tf + k1 (1 - b + b * length / mean length))."""
    passages = [
        _passage("Alpha", "river river town"),
        _passage("Beta", "river stone stone"),
        _passage("Gamma", "sky"),
    ]
    k1, b, title_weight = 1.2, 0.6, 2
    bags = [
        Counter(split_words(p.contents) + split_words(p.title) * title_weight) for p in passages
    ]
    lengths = [sum(bag.values()) for bag in bags]

    def score(bag: Counter, length: int, query: str) -> float:
        total = 0.0
        for word in query.split():
            n = sum(word in other for other in bags)
            idf = math.log(1 + (len(bags) - n + 0.5) / (n + 0.5))
            total += idf * bag[word] / (bag[word] + k1 * (1 - b + b * length / np.mean(lengths)))
        return total

    index = make_retriever(
        {"name": "bm25", "k1": k1, "b": b, "title_weight": title_weight}, passages
    )
    found = index.search(["stone river alpha"], 5)[0]
    expected = {
        p.title: score(bag, n, "stone river alpha") for p, bag, n in zip(passages, bags, lengths)
    }
    assert [p.title for p in found] == sorted(
        (t for t in expected if expected[t]), key=expected.get, reverse=True
    )
    assert [p.score for p in found] == pytest.approx([expected[p.title] for p in found], rel=1e-5)


def test_dense_search_equals_brute_force():
    encoder = NgramEncoder(PASSAGES)
    matrix = encoder.encode_passages(PASSAGES).astype(np.float64)
    retriever = make_retriever("dense", PASSAGES)
    for query, found in zip(QUERIES[:60], retriever.search(QUERIES[:60], 7)):
        scores = matrix @ encoder.encode_queries([query])[0].astype(np.float64)
        best = np.argsort(-scores, kind="stable")[:7]
        assert [p.title for p in found] == [PASSAGES[row].title for row in best]
        assert [p.score for p in found] == pytest.approx(scores[best], abs=1e-7)


def test_fusion_is_the_sum_of_reciprocal_ranks():
    class Fixed:
        def __init__(self, rows):
            self.rows = rows

        def rank(self, queries, top_k):
            return [[(row, 0.0) for row in self.rows[:top_k]] for _ in queries]

    fused = HybridIndex({"a": ({}, Fixed([4, 2, 9])), "b": ({}, Fixed([2, 7]))}).rank(["q"], 3)[0]
    assert fused == [(2, 1 / 62 + 1 / 61), (4, 1 / 61), (7, 1 / 62)]


@pytest.mark.parametrize("name", ["bm25", "dense", "hybrid"])
def test_a_name_finds_its_own_article_before_those_that_mention_it(name):
    found = make_retriever(name, PASSAGES).search([f"{p.title} birthplace" for p in PASSAGES], 3)
    first = np.mean([hits[0].title == p.title for hits, p in zip(found, PASSAGES)])
    assert first >= 0.99


def test_random_passages_do_not_depend_on_what_is_asked_for():
    found = make_retriever("random", PASSAGES).search(
        [f"{p.title} birthplace" for p in PASSAGES], 3
    )
    assert (
        np.mean([p.title in [hit.title for hit in hits] for hits, p in zip(found, PASSAGES)]) < 0.05
    )
    other_seed = make_retriever({"name": "random", "seed": 1}, PASSAGES).search(QUERIES[:5], 3)
    assert other_seed != found[:5]
    assert len({hit.title for hits in found for hit in hits}) > 200  # 900 draws from 300


def test_a_batch_gives_what_single_queries_give_bit_for_bit(retriever):
    together = retriever.search(QUERIES, 5)
    assert together == [retriever.search([query], 5)[0] for query in QUERIES]
    assert together[::-1] == retriever.search(QUERIES[::-1], 5)


def test_a_short_result_is_the_beginning_of_a_longer_one(retriever):
    short, long = retriever.search(QUERIES, 3), retriever.search(QUERIES, 20)
    assert [hits[:3] for hits in long] == short


def test_results_are_ordered_distinct_and_at_most_top_k(retriever):
    for hits in retriever.search(QUERIES, 4):
        assert len(hits) <= 4 and len({hit.id for hit in hits}) == len(hits)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_threads_do_not_disturb_each_other(retriever):
    expected = retriever.search(QUERIES, 3)
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(lambda i: retriever.search([QUERIES[i]], 3)[0], [*range(len(QUERIES))] * 5)
        )
    assert found == expected * 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("top_k", [2, 3, 50])
def test_more_than_the_corpus_holds_is_never_padded(name, top_k):
    corpus = PASSAGES[:3]
    hits = make_retriever(name, corpus).search([f"painter {PASSAGES[0].title}"], top_k)[0]
    assert len(hits) == min(top_k, 3)
    assert {hit.title for hit in hits} <= {p.title for p in corpus}


@pytest.mark.parametrize("name", ["bm25", "dense", "hybrid"])
def test_ties_go_to_the_earlier_row(name):
    twins = [
        Passage(f"{i:02}", "Twin", make_contents("Twin", "the same words"), "") for i in range(40)
    ]
    corpus = [_passage("Other", "something else"), *twins]
    for top_k in (1, 3, 39):
        hits = make_retriever(name, corpus).search(["twin words"] * 30, top_k)
        assert [[hit.id for hit in row] for row in hits] == [[f"{i:02}" for i in range(top_k)]] * 30


def test_only_passages_that_match_are_returned():
    retriever = make_retriever("bm25", PASSAGES)
    alone, none, empty = retriever.search([PASSAGES[5].title.split()[0], "zzz qqq", ""], 50)
    assert all(PASSAGES[5].title.split()[0] in hit.contents for hit in alone) and alone
    assert none == [] and empty == []


@pytest.mark.parametrize(
    "query",
    ["", " \n\t", "?!...", "<answer>", "\ud800", "\x00", "a" * 20_000, "北京", "\u2028", "🙂"],
)
def test_any_string_is_a_legal_query(retriever, query):
    assert len(retriever.search([query], 3)) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=6))
def test_every_query_gets_an_answer_in_its_place(hybrid, queries):
    assert hybrid.search(queries, 2) == [hybrid.search([query], 2)[0] for query in queries]


def test_unicode_words_are_found():
    corpus = [
        _passage("北京", "中国的首都"),
        _passage("Ærøskøbing", "a town"),
        _passage("Москва", "город"),
    ]
    for name in ("bm25", "dense"):
        hits = make_retriever(name, corpus).search(["首都 北京", "ærøskøbing", "МОСКВА"], 1)
        assert [hit[0].title for hit in hits] == ["北京", "Ærøskøbing", "Москва"]


def test_a_misspelled_name_is_close_for_vectors_and_lost_for_words():
    name = PASSAGES[7].title
    misspelled = name[:3] + name[4:]
    assert make_retriever("dense", PASSAGES).search([misspelled], 1)[0][0].title == name
    assert make_retriever("bm25", PASSAGES).search([misspelled.split()[0]], 1)[0] == []


def test_passages_without_a_word_can_be_indexed():
    corpus = [Passage("0", "", "...", ""), Passage("1", "!", '"!"\n?', "")]
    for name in NAMES[:3]:
        assert make_retriever(name, corpus).search(["word", ""], 2)[1] == []


def test_a_corpus_file_serves_as_well_as_a_list(tmp_path):
    corpus = Corpus(write_corpus(tmp_path / "corpus.jsonl", PASSAGES))
    for name in NAMES:
        assert make_retriever(name, corpus).search(QUERIES, 3) == make_retriever(
            name, PASSAGES
        ).search(QUERIES, 3)


def test_vectors_have_unit_length_and_do_not_depend_on_the_process():
    encoder = NgramEncoder(PASSAGES[:10], dimensions=64)
    vectors = np.concatenate(
        [encoder.encode_passages(PASSAGES[:10]), encoder.encode_queries(["painter", "born in"])]
    )
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(12), abs=1e-6)
    assert not encoder.encode_queries(["", "..."]).any()
    only = NgramEncoder([_passage("a", "b")], dimensions=32, ngram_weight=0.0, buckets_per_word=2)
    # Golden: the buckets of a word under blake2b. Python's salted hash would change them from run to run.
    vector = only.encode_queries(["harbour"])[0]
    assert {int(bucket): float(np.sign(vector[bucket])) for bucket in np.flatnonzero(vector)} == {
        22: -1.0,
        21: 1.0,
    }


def test_a_vector_does_not_depend_on_the_texts_around_it(monkeypatch):
    from rlflow_environments.retrieval.encoders import ngram

    encoder = NgramEncoder(PASSAGES)
    together = encoder.encode_passages(PASSAGES), encoder.encode_queries(QUERIES)
    monkeypatch.setattr(ngram, "_CHUNK", 50)  # fewer characters than most passages have
    monkeypatch.setattr(ngram, "_CHUNK_TEXTS", 3)
    assert (encoder.encode_passages(PASSAGES) == together[0]).all()
    assert (encoder.encode_queries(QUERIES) == together[1]).all()
    assert (
        np.concatenate([encoder.encode_queries([query]) for query in QUERIES]) == together[1]
    ).all()


def test_weighting_follows_idf_and_term_frequency():
    """Two words in disjoint buckets: their shares of a query are idf * (1 + ln tf)."""
    corpus = [_passage("x", "common rare"), _passage("y", "common"), _passage("z", "common")]
    encoder = NgramEncoder(corpus, dimensions=4096, ngram_weight=0.0)
    common, rare, both = encoder.encode_queries(["common", "rare", "common rare common"]).astype(
        np.float64
    )
    assert common @ rare == 0
    idf = {n: math.log(1 + (3 - n + 0.5) / (n + 0.5)) for n in (1, 3)}
    weights = np.array([idf[3] * (1 + math.log(2)), idf[1]])
    assert [both @ common, both @ rare] == pytest.approx(
        weights / np.linalg.norm(weights), abs=1e-6
    )


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("densse", "Did you mean 'dense'"),
        ({"dimensions": 3}, "a mapping with 'name', found {'dimensions': 3}"),
        ({"name": "dense", "dimension": 3}, "Did you mean 'dimensions'"),
        ({"name": "bm25", "dimensions": 3}, "unknown keyword 'dimensions'"),
        (
            {"name": "hybrid", "dense": {"dimensons": 3}},
            "hybrid.dense: .*unknown keyword 'dimensons'",
        ),
        ({"name": "dense", "dimensions": 0}, "dimensions: expected a whole number above 0"),
        ({"name": "dense", "title_weight": 2}, "from 0 to 1"),
        ({"name": "bm25", "b": 2}, r"\.b: expected a number from 0 to 1"),
    ],
)
def test_a_wrong_retriever_component_is_one_clear_error(component, message):
    with pytest.raises(ConfigError, match=message):
        make_retriever(component, PASSAGES[:3])


def test_an_empty_corpus_and_a_senseless_top_k_are_refused(retriever):
    with pytest.raises(DataError, match="no passages"):
        make_retriever("bm25", [])
    with pytest.raises(ConfigError, match="at least 1"):
        retriever.search(["x"], 0)
    assert retriever.search([], 3) == []


@pytest.mark.parametrize("name", ["bm25", "faiss", "qdrant"])
def test_a_retriever_says_which_package_it_needs_and_what_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = retriever_facts(name)
    monkeypatch.setitem(sys.modules, facts.package, None)
    told = f"'{facts.package}' is not installed: {install_command(facts.extra)}"
    with pytest.raises(MissingPackageError, match=re.escape(told)):
        make_retriever(name, PASSAGES[:3])
