"""Documents to question files, one stage after the other, with an account of everything that was
left out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from rlflow.errors import DataError
from rlflow.storage.files import write_json
from rlflow.values import PositiveInt, Range, Share, checked
from rlflow_environments.common.progress import StageProgress
from rlflow_environments.retrieval.corpus import Passage, write_corpus, write_pages, write_rows
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.search.own_documents.blanks import FAULTS
from rlflow_environments.search.own_documents.candidates import Candidate, compose, find_facts
from rlflow_environments.search.own_documents.documents import (
    CONVERT,
    MAX_CHARACTERS,
    Document,
    cut_passages,
)
from rlflow_environments.search.own_documents.english import BLANK
from rlflow_environments.search.own_documents.screening import (
    REASONS,
    mixed,
    retrievable,
    screen,
    separate,
    split,
    validation_documents,
)

Compose = Callable[[Sequence[Passage], Sequence[int], set[int], "Counter[str]"], list[Candidate]]
"""(passages, the document of each, documents kept for validation, what was left out by reason) ->
candidates."""


@dataclass(frozen=True)
class QuestionRequest:
    """train, val: questions of each, at the most. val_share: of the documents, kept for validation.
    multi_hop: share of two-hop questions. retriever, top_k: an answer must be among so many
    passages that this retriever finds. blanks: also ask for blanks in sentences, where rules
    compose the questions."""

    train: PositiveInt = 2000
    val: PositiveInt = 200
    val_share: Annotated[float, Range(above=0, below=1)] = 0.2
    multi_hop: Share = 0.5
    seed: int = 0
    retriever: str | dict[str, Any] = "bm25"
    top_k: PositiveInt = 3
    max_characters: Annotated[int, Range(100)] = MAX_CHARACTERS
    blanks: bool = True

    def check(self) -> None:
        """Raises ConfigError for values out of range."""
        for name, hint in get_type_hints(QuestionRequest, include_extras=True).items():
            checked(hint, getattr(self, name), f"--{name.replace('_', '-')}")


@dataclass
class QuestionReport:
    """What was read, composed, left out by reason (see screening.REASONS), and written. asked:
    questions at the most; by_rule: no model composed them."""

    documents: int = 0
    asked: int = 0
    by_rule: bool = True
    passages: int = 0
    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    train: Counter[str] = field(default_factory=Counter)
    val: Counter[str] = field(default_factory=Counter)
    blanks: int = 0  # of the questions written
    refused: Counter[str] = field(default_factory=Counter)  # sentences that can have no blank
    not_read: dict[str, int] = field(default_factory=dict)  # files by suffix

    def left_out(self) -> dict[str, int]:
        """{reason: count}, in the order of the screening."""
        found = {reason: self.dropped[reason] for reason in [*REASONS, *self.dropped]}
        return {reason: count for reason, count in found.items() if count}

    def lines(self) -> list[str]:
        """The report as text."""
        shown = [
            f"{self.documents:,} documents, {self.passages:,} passages, {self.candidates:,} "
            "candidate questions; left out:"
        ]
        for reason, count in self.left_out().items():
            shown.append(f"  {count:7,}  {reason}: {REASONS.get(reason, '')}")
        if self.refused:
            reasons = (
                f"{count:,} {FAULTS[reason]}" for reason, count in self.refused.most_common()
            )
            total = sum(self.refused.values())
            shown.append(f"no blank is put into {total:,} sentences: {', '.join(reasons)}")
        for name, counts in (("train", self.train), ("val", self.val)):
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
            shown.append(f"{name}: {sum(counts.values()):,} questions ({kinds or 'none'})")
        return [*shown, *self.advice()]

    def advice(self) -> list[str]:
        """What a user ought to know of these questions, a sentence each: files that nobody read,
        too few or poor questions."""
        told = [
            f"NOT READ: {count:,} {suffix} (make text of them first, for instance: "
            f"{CONVERT[suffix]})"
            for suffix, count in sorted(self.not_read.items())
            if suffix in CONVERT
        ]
        made, asked = sum(self.train.values()) + sum(self.val.values()), self.asked
        if self.by_rule and (made < 0.5 * asked or self.blanks > 0.5 * made):
            told.append(
                f"NOTE: {made:,} of {asked:,} questions that were asked for, {self.blanks:,} of "
                "them blanks in sentences. The rules read plain statements in English (born in, "
                "wrote, capital of, ...). A model asks better about other prose: --endpoint URL "
                "--model NAME."
            )
        return told


def make_questions(
    documents: Sequence[Document],
    out: str | Path,
    request: QuestionRequest,
    progress: StageProgress = lambda stage, done, total: None,
    ask: Compose | None = None,
    not_read: Mapping[str, int] = MappingProxyType({}),
) -> QuestionReport:
    """Writes corpus.jsonl, pages.jsonl, train.jsonl, val.jsonl and report.json to a folder; returns
    the report.

    ask: composes the candidates instead of the rules. not_read: {suffix: files} beside the
    documents, for the report. Equal documents, requests and candidates give equal files. Raises
    ConfigError: values out of range; DataError: no question is left for training or for validation.
    """
    request.check()
    folder, asked = Path(out).expanduser(), request.train + request.val
    report = QuestionReport(len(documents), asked, by_rule=ask is None, not_read=dict(not_read))
    passages, owners = cut_passages(documents, request.max_characters)
    report.passages, dropped = len(passages), report.dropped
    write_corpus(folder / "corpus.jsonl", passages)
    write_pages(folder / "pages.jsonl", _pages(documents))
    held_out = validation_documents(documents, request.val_share, request.seed)
    progress("composing questions", 0, 1)
    if ask is not None:
        candidates = ask(passages, owners, held_out, dropped)
    else:
        phrasing = random.Random(f"{request.seed}/phrasing")
        facts = find_facts(passages, report.refused, blanks=request.blanks)
        candidates = compose(facts, phrasing)
    report.candidates = len(candidates) + dropped["unreadable"]
    candidates = screen(candidates, passages, dropped)
    retriever = make_retriever(request.retriever, passages)
    candidates = retrievable(candidates, retriever, request.top_k, dropped, progress)
    order = random.Random(f"{request.seed}/order")
    sides = split(candidates, owners, held_out, dropped)
    train, val = (mixed(side, request.multi_hop, order) for side in sides)
    train, val = separate(train, val, request.val, dropped)
    dropped["surplus"] += max(0, len(train) - request.train)
    names = [documents[owner].name for owner in owners]
    for name, chosen in (("train", train[: request.train]), ("val", val)):
        made = [_row(candidate, passages, names) for candidate in chosen]
        rows = [{"id": f"{name}-{number}", **row} for number, row in enumerate(made)]
        getattr(report, name).update(row["kind"] for row in rows)
        report.blanks += sum(BLANK in row["made_by"].split() for row in rows)
        write_rows(folder / f"{name}.jsonl", rows)
    told = {**vars(report), "dropped": report.left_out(), "request": asdict(request)}
    write_json(folder / "report.json", told)
    _check_enough(report, folder)
    return report


def _row(candidate: Candidate, passages: Sequence[Passage], names: Sequence[str]) -> dict[str, Any]:
    """names: the document of each passage."""
    evidence = list(dict.fromkeys(hop.passage for hop in candidate.hops))
    return {
        "question": candidate.question,
        "solutions": [candidate.answer],
        "kind": "multi_hop" if len(candidate.hops) > 1 else "single_hop",
        "made_by": candidate.kind,
        "hops": len(candidate.hops),
        "entities": sorted(candidate.names),
        "evidence": [passages[row].id for row in evidence],
        "documents": list(dict.fromkeys(names[row] for row in evidence)),
    }


def _pages(documents: Sequence[Document]) -> dict[str, str]:
    """{url: page}; documents of one URL are one page."""
    pages: dict[str, list[str]] = {}
    for document in documents:
        pages.setdefault(document.url, []).append(f"{document.title}\n\n{document.text}")
    return {url: "\n\n".join(texts) for url, texts in pages.items()}


def _check_enough(report: QuestionReport, folder: Path) -> None:
    for name, counts in (("train", report.train), ("val", report.val)):
        if not counts:
            most = max(report.dropped, key=lambda reason: report.dropped[reason], default="")
            why = f"; most were left out for {most}: {REASONS.get(most, '')}" if most else ""
            raise DataError(
                f"{folder}: no {name} question is left of {report.candidates} candidates from "
                f"{report.documents} documents{why}. Give more documents, another --seed or "
                "--val-share, or let a model write the questions (--endpoint)."
            )
