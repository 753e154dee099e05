"""Which candidates are fit to be asked, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.own_documents.candidates import Candidate
from rlflow_environments.search.rewards.scoring import contains_gold, normalize_answer

REASONS = {
    "unreadable": "the model's reply holds no question with an answer",
    "answer_in_question": "the answer stands in the question",
    "empty_answer": "nothing is left of the answer once it is normalized",
    "not_in_documents": "the answer does not occur in the passage that it is said to come from",
    "one_hop_suffices": "two hops were meant, but the first passage has the answer, or the question names the second",
    "ambiguous": "equal questions have different answers",
    "repeated": "the same question once more",
    "not_retrieved": "a search for a hop does not bring its answer",
    "across_split": "its passages belong to documents on both sides of the split",
    "leak_in_validation": "taken out of validation, because too many training questions share its names",
    "leak_in_training": "taken out of training, because it shares a name with a validation question",
    "surplus": "more than were asked for",
}
"""Reason -> what it means, in the order of the screening."""

_BATCH = 256


def screen(
    candidates: Sequence[Candidate], passages: Sequence[Passage], dropped: Counter[str]
) -> list[Candidate]:
    """The candidates that hold by themselves; `dropped` counts the others by reason."""
    kept: list[Candidate] = []
    for candidate in candidates:
        reason = _fault(candidate, passages)
        if reason:
            dropped[reason] += 1
        else:
            kept.append(candidate)
    return _unambiguous(kept, dropped)


def _fault(candidate: Candidate, passages: Sequence[Passage]) -> str:
    if not normalize_answer(candidate.answer):
        return "empty_answer"
    if contains_gold(candidate.question, [candidate.answer]):
        return "answer_in_question"
    if any(
        not contains_gold(passages[hop.passage].contents, [hop.answer]) for hop in candidate.hops
    ):
        return "not_in_documents"
    if len(candidate.hops) > 1:
        first, last = candidate.hops[0], candidate.hops[-1]
        shortcut = first.passage == last.passage or contains_gold(
            passages[first.passage].contents, [candidate.answer]
        )
        if shortcut or contains_gold(candidate.question, [first.answer]):
            return "one_hop_suffices"
    return ""


def _unambiguous(candidates: Sequence[Candidate], dropped: Counter[str]) -> list[Candidate]:
    """Each question once, and none that has several answers: as a whole, or by one of its hops."""
    answers: dict[str, set[str]] = {}
    for candidate in candidates:
        for key, answer in _asked(candidate):
            answers.setdefault(key, set()).add(normalize_answer(answer))
    kept: dict[str, Candidate] = {}
    for candidate in candidates:
        if any(len(answers[key]) > 1 for key, _ in _asked(candidate)):
            dropped["ambiguous"] += 1
        elif candidate.question in kept:
            dropped["repeated"] += 1
        else:
            kept[candidate.question] = candidate
    return list(kept.values())


def _asked(candidate: Candidate) -> list[tuple[str, str]]:
    """What is asked, as keys that equal questions share: the question, and the query of each of
    several hops."""
    hops = [(f"query {hop.query}", hop.answer) for hop in candidate.hops]
    return [(f"question {normalize_answer(candidate.question)}", candidate.answer), *hops]


def retrievable(
    candidates: Sequence[Candidate],
    retriever: Retriever,
    top_k: int,
    dropped: Counter[str],
    progress: StageProgress = lambda stage, done, total: None,
) -> list[Candidate]:
    """The candidates each of whose hops is answered by one of the `top_k` passages that its query
    brings."""
    queries = list(dict.fromkeys(hop.query for candidate in candidates for hop in candidate.hops))
    found: dict[str, str] = {}
    for start in range(0, len(queries), _BATCH):
        batch = queries[start : start + _BATCH]
        for query, results in zip(batch, retriever.search(batch, top_k), strict=True):
            found[query] = "\n".join(passage.contents for passage in results)
        progress("searching for the answers", start + len(batch), len(queries))
    kept = [
        candidate
        for candidate in candidates
        if all(contains_gold(found[hop.query], [hop.answer]) for hop in candidate.hops)
    ]
    dropped["not_retrieved"] += len(candidates) - len(kept)
    return kept
