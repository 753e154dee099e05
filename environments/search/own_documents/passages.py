"""Documents cut into passages at the ends of sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rlflow_environments.retrieval.corpus import Passage, make_contents
from rlflow_environments.search.own_documents.documents import Document

MAX_CHARACTERS = 1000

_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[^\W_a-z])|(?<=[。！？])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Sr|Jr|vs|No|Vol|Fig|cf|ca|approx|e\.g|i\.e|etc))\.$"
)


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; an abbreviation or an initial ends none."""
    sentences: list[str] = []
    for piece in _END.split(paragraph):
        if not piece.strip():
            continue
        if sentences and _ABBREVIATION.search(sentences[-1]):
            sentences[-1] = f"{sentences[-1]} {piece.strip()}"
        else:
            sentences.append(piece.strip())
    return sentences


def cut_passages(
    documents: Sequence[Document], max_characters: int = MAX_CHARACTERS
) -> tuple[list[Passage], list[int]]:
    """(passages in the order of the documents, the document's number of each passage).

    A passage has the title and the URL of its document and at most `max_characters` of its text:
    whole sentences, and only a longer sentence is cut itself.
    """
    passages: list[Passage] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        for text in _pieces(document, max_characters):
            contents = make_contents(document.title, text)
            passages.append(
                Passage(f"p{len(passages):06d}", document.title, contents, document.url)
            )
            owners.append(number)
    return passages, owners


def _pieces(document: Document, limit: int) -> Iterator[str]:
    piece = ""
    for paragraph in document.paragraphs:
        for index, sentence in enumerate(_parts(paragraph, limit)):
            joint = "" if not piece else "\n" if index == 0 else " "
            if len(piece) + len(joint) + len(sentence) > limit:
                yield piece
                piece, joint = "", ""
            piece += joint + sentence
    if piece:
        yield piece


def _parts(paragraph: str, limit: int) -> Iterator[str]:
    for sentence in split_sentences(paragraph):
        yield from (sentence[start : start + limit] for start in range(0, len(sentence), limit))
