"""Which questions can be answered from a corpus: a gold answer occurs in it, and so do the articles
that support it.

Necessary, not sufficient: a passage may hold the words of an answer and say nothing of the question
("yes" occurs everywhere).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.types import Task
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.search.rewards.scoring import normalize_answer

_END = ""  # no word


@dataclass
class Finding:
    """What a corpus has of one question. answer: a gold answer occurs in some passage. titles: of
    the supporting articles, normalized; found: those of them that the corpus has. supported: a gold
    answer occurs in a supporting article."""

    titles: frozenset[str] = frozenset()
    found: set[str] = field(default_factory=set)
    answer: bool = False
    supported: bool = False

    @property
    def answerable(self) -> bool:
        """A gold answer and all supporting articles are there."""
        return self.answer and len(self.found) == len(self.titles)


class AnswerFinder:
    """Looks for all gold answers of all questions at once, in one pass over the passages.

    A gold answer occurs where `scoring.contains_gold` says so: its words, normalized as for exact
    match, follow each other in the normalized text. The words of all answers form a trie, which is
    walked from every word of a passage: the time is that of normalizing the text, and at most the
    longest answer's words per word of it, whatever the number of questions.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.findings = [
            Finding(frozenset(map(normalize_answer, supporting_titles(task.metadata))))
            for task in tasks
        ]
        self._trie: dict[str, Any] = {}
        self._askers: list[list[int]] = []  # per distinct gold answer, its questions
        self._supports: dict[str, list[int]] = {}  # title -> questions
        for number, (task, finding) in enumerate(zip(tasks, self.findings, strict=True)):
            for gold in task.answer:
                self._learn(gold, number)
            for title in finding.titles:
                self._supports.setdefault(title, []).append(number)

    def read(self, passages: Iterable[Passage]) -> None:
        """Notes what the passages have."""
        for passage in passages:
            golds = self._occurring(normalize_answer(passage.contents).split())
            askers = {number for gold in golds for number in self._askers[gold]}
            for number in askers:
                self.findings[number].answer = True
            title = normalize_answer(passage.title) if self._supports else ""
            for number in self._supports.get(title, ()):
                self.findings[number].found.add(title)
                self.findings[number].supported |= number in askers

    def _learn(self, gold: str, number: int) -> None:
        words = normalize_answer(gold).split()
        if not words:  # nothing is left to look for, and exact match takes no text for it either
            return
        node = self._trie
        for word in words:
            node = node.setdefault(word, {})
        if _END not in node:
            node[_END] = len(self._askers)
            self._askers.append([])
        self._askers[node[_END]].append(number)

    def _occurring(self, words: Sequence[str]) -> set[int]:
        """The numbers of the gold answers that occur in a text, given by its words."""
        found = set()
        for start, word in enumerate(words):
            node = self._trie.get(word)
            place = start + 1
            while node is not None:
                if _END in node:
                    found.add(node[_END])
                node = node.get(words[place]) if place < len(words) else None
                place += 1
        return found


def supporting_titles(row: Mapping[str, Any]) -> list[str]:
    """The titles of the articles that a question rests on, where its row has them, in HotpotQA's
    forms: `supporting_facts` of the row, or of its `metadata` (FlashRAG), as {title: [...]} or
    [[title, sentence], ...]. Else none."""
    metadata = row.get("metadata")
    facts = row.get("supporting_facts") or (
        metadata.get("supporting_facts") if isinstance(metadata, Mapping) else None
    )
    if isinstance(facts, Mapping):
        facts = facts.get("title")
        return (
            [title for title in facts if isinstance(title, str)] if isinstance(facts, list) else []
        )
    if not isinstance(facts, list):
        return []
    return [
        fact[0] for fact in facts if isinstance(fact, list) and fact and isinstance(fact[0], str)
    ]
