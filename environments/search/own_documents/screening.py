"""Leaves out candidates that are not fit to be asked, by reason, and separates training from
validation: different documents, and no name in common."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.own_documents.candidates import Candidate
from rlflow_environments.search.own_documents.documents import Document
from rlflow_environments.search.rewards.scoring import contains_gold, normalize_answer

T = TypeVar("T")

REASONS = {
    "unreadable": "the model's reply holds no question with an answer",
    "answer_in_question": "the answer stands in the question",
    "empty_answer": "nothing is left of the answer once it is normalized",
    "not_in_documents": "the answer does not occur in the passage that it is said to come from",
    "one_hop_suffices": "two hops were meant, but the first passage has the answer, or the "
    "question names the second",
    "ambiguous": "equal questions have different answers",
    "repeated": "the same question once more",
    "not_retrieved": "a search for a hop does not bring its answer",
    "across_split": "its passages belong to documents on both sides of the split",
    "leak_in_validation": "taken out of validation, because too many training questions share its "
    "names",
    "leak_in_training": "taken out of training, because it shares a name with a validation "
    "question",
    "surplus": "more than were asked for",
}
"""Reason -> what it means, in the order of the screening."""

MOST_LOST_SHARE = 0.05
"""Of the training questions: a validation question whose names would cost more of them is left out
instead."""
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


def validation_documents(documents: Sequence[Document], share: float, seed: int) -> set[int]:
    """The documents that are kept for validation: chosen by seed and name alone, so that new
    documents move no old one."""
    limit = share * 2**64

    def drawn(document: Document) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed}/{document.name}".encode()).digest()[:8])

    return {number for number, document in enumerate(documents) if drawn(document) < limit}


def split(
    candidates: Sequence[Candidate],
    owners: Sequence[int],
    held_out: set[int],
    dropped: Counter[str],
) -> tuple[list[Candidate], list[Candidate]]:
    """(training, validation) candidates by the documents of their passages; owners: the document of
    each passage."""
    sides: dict[bool, list[Candidate]] = {False: [], True: []}
    for candidate in candidates:
        of = {owners[hop.passage] in held_out for hop in candidate.hops}
        if len(of) > 1:
            dropped["across_split"] += 1
        else:
            sides[of.pop()].append(candidate)
    return sides[False], sides[True]


def separate(
    train: Sequence[Candidate], val: Sequence[Candidate], wanted_val: int, dropped: Counter[str]
) -> tuple[list[Candidate], list[Candidate]]:
    """(training, validation) without leaks: no name or answer of a validation question occurs in a
    training question or answer.

    Validation questions are taken in their order until there are enough; each takes the training
    questions that share a name with it out, or, where these are too many, is left out itself.
    """
    mentions = _Mentions(train)
    lost: set[int] = set()
    chosen: list[Candidate] = []
    for number, candidate in enumerate(val):
        if len(chosen) == wanted_val:
            dropped["surplus"] += len(val) - number
            break
        conflicts = mentions.of({*candidate.names, normalize_answer(candidate.answer)}) - lost
        if len(conflicts) > max(1, MOST_LOST_SHARE * (len(train) - len(lost))):
            dropped["leak_in_validation"] += 1
            continue
        lost |= conflicts
        chosen.append(candidate)
    dropped["leak_in_training"] += len(lost)
    return [candidate for number, candidate in enumerate(train) if number not in lost], chosen


class _Mentions:
    """Which questions mention a name, in their text, their answer or their facts."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._texts = [
            " | ".join([candidate.question, candidate.answer, *sorted(candidate.names)])
            for candidate in candidates
        ]
        self._by_word: dict[str, set[int]] = {}
        for number, text in enumerate(self._texts):
            for word in normalize_answer(text).split():
                self._by_word.setdefault(word, set()).add(number)

    def of(self, names: set[str]) -> set[int]:
        """The numbers of the questions that mention at least one of the normalized names."""
        found: set[int] = set()
        for name in names:
            words = [self._by_word.get(word, set()) for word in name.split()]
            if words:
                found |= {
                    number
                    for number in set.intersection(*words)
                    if contains_gold(self._texts[number], [name])
                }
        return found


def in_turns(groups: Mapping[str, Sequence[T]], generator: random.Random) -> list[T]:
    """The members of all groups, each group shuffled: one of each group in random order, then the
    next of each, and so on."""
    shuffled = [
        generator.sample(list(members), len(members)) for _, members in sorted(groups.items())
    ]
    ordered: list[T] = []
    for rank in range(max(map(len, shuffled), default=0)):
        turn = [members[rank] for members in shuffled if rank < len(members)]
        ordered += generator.sample(turn, len(turn))
    return ordered


def mixed(
    candidates: Sequence[Candidate], multi_hop_share: float, generator: random.Random
) -> list[Candidate]:
    """The candidates in an order of which every beginning has about this share of two-hop
    questions, as long as both last."""
    by_kind: dict[int, dict[str, list[Candidate]]] = {1: {}, 2: {}}
    for candidate in candidates:
        by_kind[min(2, len(candidate.hops))].setdefault(candidate.kind, []).append(candidate)
    single, multi = (in_turns(by_kind[hops], generator) for hops in (1, 2))
    waiting, ordered = {1: deque(single), 2: deque(multi)}, []
    while waiting[1] and waiting[2]:
        ordered.append(waiting[2 if generator.random() < multi_hop_share else 1].popleft())
    return [*ordered, *waiting[1], *waiting[2]]
