"""Rewards of ASearcher and AstraFlow, over the policy's own text.

Sources: ASearcher `utils/rewards.py`, `utils/search_tool.py`, `train/asearcher.py`; AstraFlow
`workflow/impl/asearcher`. The originals look for the words of the validity penalty in the last
answer tag of the whole context, prompt and pages included; here, as for everything else, only what
the policy wrote counts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from typing import Literal

from rlflow_environments.common.transcript import Transcript
from rlflow_environments.search.rewards import scoring

INVALID_QUESTION = "the question is invalid"
"""The answer that a prompt may offer for a question without one; a prompt that holds these words
allows it."""
VALIDITY_PENALTY = -0.5
_PENALIZED = ("question", "invalid", "appropriate", "valid")

_PUNCTUATION_TO_SPACE = str.maketrans(dict.fromkeys(string.punctuation, " "))
_DROPPED_WITH_CJK = str.maketrans(dict.fromkeys("0123456789，。 ,.-"))
_CJK = (("\u4e00", "\u9fff"), ("\u3400", "\u4dbf"), ("\uf900", "\ufaff"))
_TOOL_TAGS = ("search", "access", "answer")


def asearcher_f1(transcript: Transcript) -> float:
    """The best F1 over the gold answers of two sets (not bags) of tokens."""
    return _best(_f1, scoring.extract_answer(transcript.model_text), transcript.golds)


def asearcher_em(transcript: Transcript) -> float:
    """Exact match as in Search-R1, with True and False read as yes and no in answer and golds."""
    return _best(_exact_match, scoring.extract_answer(transcript.model_text), transcript.golds)


def asearcher_compat(transcript: Transcript, *, base: Literal["f1", "em"] = "f1") -> float:
    """The reward of the ASearcher recipes: base (f1 or em) times 1 or 0 for form, and the validity
    penalty.

    Where the row has `aug_answer`, the base is 0.7 * score + 0.3 * max(score, score against it).
    The penalty of -0.5 replaces everything else if the prompt does not offer the answer "the
    question is invalid" and the answer contains one of four words as a substring, case-sensitively:
    "question mark" is punished too.
    """
    answer = scoring.extract_answer(transcript.model_text)
    refused = answer is not None and any(word in answer for word in _PENALIZED)
    if refused and INVALID_QUESTION not in transcript.prompt_text:
        return VALIDITY_PENALTY
    score = _best(_BASES[base], answer, transcript.golds)
    augmented = transcript.task.metadata.get("aug_answer")
    augmented = scoring.answer_texts(augmented if isinstance(augmented, list) else [augmented])
    if augmented:
        score = score * 0.7 + max(_best(_BASES[base], answer, augmented), score) * 0.3
    return score * float(all(map(well_formed, transcript.responses)))


def well_formed(response: str) -> bool:
    """Whether one response has balanced tool tags, at most one of them, no word that plays another
    role, and at most one closing think tag."""
    return (
        all(response.count(f"<{tag}>") == response.count(f"</{tag}>") for tag in _TOOL_TAGS)
        and sum(response.count(f"<{tag}>") for tag in _TOOL_TAGS) <= 1
        and "Assistant" not in response
        and "assistant" not in response
        and response.count("</think>") <= 1
    )


def _best(score: Callable[[str, str], float], answer: str | None, golds: Sequence[str]) -> float:
    return 0.0 if answer is None else max((score(answer, gold) for gold in golds), default=0.0)


def _exact_match(answer: str, gold: str) -> float:
    return float(
        scoring.normalize_answer(_yes_or_no(answer)) == scoring.normalize_answer(_yes_or_no(gold))
    )


def _f1(answer: str, gold: str) -> float:
    """F1 of two sets of tokens; characters and runs of digits where the gold answer is Chinese. 0
    if one is empty."""
    text, wanted = _spaced(_yes_or_no(answer)), _spaced(_yes_or_no(gold))
    split = _characters if _is_chinese(wanted) else lambda value: set(value.split())
    found, expected = split(text), split(wanted)
    if not found or not expected:
        return 0.0
    common = len(found & expected)
    precision, recall = common / len(found), common / len(expected)
    return 2 * (precision * recall) / (precision + recall) if common else 0.0


def _spaced(text: str) -> str:
    """ASCII punctuation to spaces, white space collapsed, lower case. Articles stay."""
    return re.sub(r"\s+", " ", text.translate(_PUNCTUATION_TO_SPACE)).strip().lower()


def _characters(text: str) -> set[str]:
    """The characters and the runs of digits."""
    runs = "".join(char if char.isdigit() else " " for char in text).split()
    return {*text.translate(_DROPPED_WITH_CJK), *runs}


def _is_chinese(text: str) -> bool:
    return any(low <= char <= high for char in text for low, high in _CJK)


def _yes_or_no(text: str) -> str:
    return {"True": "yes", "False": "no"}.get(text, text)


_BASES: dict[str, Callable[[str, str], float]] = {"f1": _f1, "em": _exact_match}
