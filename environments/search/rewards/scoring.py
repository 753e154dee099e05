"""Scores of an answer against its gold answers, over the policy's own text only. Every score is in
[0, 1].

Sources: Search-R1 `qa_em.py`; RLinf `rewards/searchr1` (at least one answer tag, a quarter above
ten tags); SQuAD for F1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlflow_environments.common.blocks import blocks

MAX_ANSWER_TAGS = 10

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_BREAK = re.compile(r"[^\w\s.,:]|_|(?<!\d)[.,:]|[.,:](?!\d)")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af]")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_texts(values: Sequence[Any]) -> list[str]:
    """A row's answers as texts, without those that are missing or blank."""
    # Floats are whole numbers beside a missing one (NaN) in a column of parquet or pandas
    whole = [
        int(value) if isinstance(value, float) and value.is_integer() else value
        for value in values
        if value is not None and value == value
    ]
    return [text for text in map(str, whole) if text.strip()]


def normalize_answer(text: str) -> str:
    """Lower case, then ASCII punctuation deleted, then whole-word articles to spaces, then white
    space collapsed.

    The order matters ("U.S.A." -> "usa") and is that of Search-R1; no Unicode normalization.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def extract_answer(model_text: str) -> str | None:
    """The content of the last complete answer tag, stripped; None without one."""
    answers = blocks("answer", model_text)
    return answers[-1].strip() if answers else None


def exact_match(answer: str | None, golds: Sequence[str]) -> float:
    """1.0 if the normalized answer equals a normalized gold answer, else 0.0."""
    if answer is None:
        return 0.0
    normalized = normalize_answer(answer)
    return float(any(normalized == normalize_answer(gold) for gold in golds))


def f1(answer: str | None, golds: Sequence[str]) -> float:
    """The best F1 of two bags of normalized tokens over the gold answers (SQuAD 1.1); two empty
    bags count as equal."""
    if answer is None:
        return 0.0
    tokens = normalize_answer(answer).split()
    return max((_bag_f1(tokens, normalize_answer(gold).split()) for gold in golds), default=0.0)


def _bag_f1(tokens: list[str], gold: list[str]) -> float:
    if not tokens or not gold:
        return float(tokens == gold)
    common = sum((Counter(tokens) & Counter(gold)).values())
    return 2 * common / (len(tokens) + len(gold))


def contains_gold(text: str, golds: Sequence[str]) -> bool:
    """Whether a gold answer occurs in the text as whole words ("no" does not occur in "north"),
    both normalized, or both with blanks for punctuation ("Einstein" occurs in "Einstein's"); in
    scripts without blanks between words, anywhere."""
    for form in (str, _broken):
        words = normalize_answer(form(text))
        for gold in golds:
            wanted = normalize_answer(form(gold))
            found = wanted in words if _UNSPACED.search(wanted) else f" {wanted} " in f" {words} "
            if wanted and found:
                return True
    return False


def _broken(text: str) -> str:
    """The text with blanks for punctuation, but within numbers."""
    return _BREAK.sub(" ", text)


def searchr1_em(model_text: str, golds: Sequence[str]) -> float:
    """Exact match of the last answer; a quarter of it if the text has more than ten opening or more
    than ten closing tags."""
    score = exact_match(extract_answer(model_text), golds)
    tags = max(model_text.count("<answer>"), model_text.count("</answer>"))
    return score / 4 if tags > MAX_ANSWER_TAGS else score
