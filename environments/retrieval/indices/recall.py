"""The measured recall of an approximate index, by how far it searches: `nprobe` of IVF, `ef_search`
of HNSW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices.faiss_index import import_faiss, knob_of

TOP_K = 10
QUERIES = 200
TARGET = 0.95
WORDS = 8
AFFORDABLE_VECTORS = 20_000  # of an IVF index: a few milliseconds
AFFORDABLE_EF = 512
SAME = 0.005  # recall that is not worth twice the time


def sample_queries(corpus: Sequence[Passage], count: int = QUERIES) -> list[str]:
    """Eight words from the middle of passages spread over the corpus: harder to find than a title,
    as questions are."""
    count = min(count, len(corpus))
    bodies = [corpus[place * len(corpus) // count].body.split() for place in range(count)]
    return [" ".join(words[len(words) // 2 :][:WORDS]) for words in bodies if words]


def measure_recall(
    index: Any,
    queries: np.ndarray,
    exact: Iterator[np.ndarray],
    target: float | None,
) -> dict[str, Any] | None:
    """What an index folder says of its recall, see IndexMeta.search; None for an index that has
    nothing to set.

    queries: (Q, dimensions). exact: the vectors of the index block after block, row 0 first.
    target: recall@10 to reach, whatever it costs; None: TARGET, as far as searching a quarter of
    the lists, or 512 neighbours, gets.
    """
    faiss = import_faiss()
    from faiss.contrib.evaluation import knn_intersection_measure
    from faiss.contrib.exhaustive_search import knn_ground_truth

    knob = knob_of(faiss, index)
    queries = queries[queries.any(axis=1)]
    if knob is None or not len(queries):
        return None
    top_k = min(TOP_K, int(index.ntotal))
    nearest = knn_ground_truth(queries, exact, top_k, faiss.METRIC_INNER_PRODUCT)[1]
    wanted = TARGET if target is None else target
    recalls: dict[int, float] = {}
    for value in _ladder(knob.name, knob.most, int(index.ntotal), affordable=target is None):
        knob.set(value)
        recalls[value] = round(
            float(knn_intersection_measure(index.search(queries, top_k)[1], nearest)), 3
        )
        if recalls[value] >= wanted:
            break
    enough = min(wanted, max(recalls.values()) - SAME)
    chosen = next(value for value, recall in recalls.items() if recall >= enough)
    measured = {str(value): recall for value, recall in recalls.items()}
    return {knob.name: chosen, "target": wanted, "queries": len(queries), "recall": measured}


def _ladder(name: str, most: int, count: int, *, affordable: bool) -> list[int]:
    """Powers of two up to `most`, or to what is affordable."""
    if affordable:
        lists = max(most // 4, most * AFFORDABLE_VECTORS // count)
        most = min(most, lists if name == "nprobe" else AFFORDABLE_EF)
    least = 1 if name == "nprobe" else TOP_K  # HNSW never looks at fewer than it returns
    return sorted({min(max(2**power, least), most) for power in range(most.bit_length() + 1)})


def describe_recall(
    measured: Mapping[str, Any] | None, searched: Mapping[str, int]
) -> tuple[str, bool]:
    """(one line on the recall of an index that searches so far, whether it deserves a warning).
    measured: IndexMeta.search."""
    ((name, value),) = searched.items()
    if measured is None or name not in measured:
        return (
            f"{name} {value}, a guess: the recall of this index was never measured. Set {name} to "
            "search further",
            True,
        )
    known = [int(text) for text in measured["recall"] if int(text) <= value]
    if not known:
        return f"{name} {value}: less than was measured", True
    recall = measured["recall"][str(max(known))]
    count = measured["queries"]
    told = f"{name} {value}: recall@{TOP_K} {recall:.2f} of {count} queries from the corpus"
    if recall >= measured["target"]:
        return told, False
    return (
        f"{told}, below {measured['target']:g}. Set {name} higher, or build another index",
        True,
    )
