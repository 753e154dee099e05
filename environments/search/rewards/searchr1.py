"""Rewards of the Search-R1 family. Answers are read from the policy's own text; the order of tags
from all of it.

Sources: Search-R1 `qa_em.py` and `qa_em_format.py`; RLinf `rewards/searchr1` for the rule above ten
tags. The original needs two answer tags because it also reads its prompt, which shows one; without
the prompt that is one.
"""

from __future__ import annotations

import re

from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.tool_calls import TextCall, read_calls
from rlflow_environments.common.transcript import Transcript
from rlflow_environments.search.rewards import scoring

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_ORDER = re.compile(
    "<think></think>(?:<search></search><information></information><think></think>)*"
    "<answer></answer>"
)
"""Of a text's tags alone."""


def searchr1_em(transcript: Transcript) -> float:
    """Exact match of the last answer, 1 or 0; a quarter of it above ten opening or closing answer
    tags (RLinf)."""
    return scoring.searchr1_em(transcript.model_text, transcript.golds)


def searchr1_subem(transcript: Transcript) -> float:
    """1 if a normalized gold answer is a substring of the normalized last answer, else 0."""
    answer = scoring.extract_answer(transcript.model_text)
    if answer is None:
        return 0.0
    normalized = scoring.normalize_answer(answer)
    return float(any(scoring.normalize_answer(gold) in normalized for gold in transcript.golds))


def searchr1_em_format(
    transcript: Transcript, *, structure: float = 0.2, final: float = 0.1, retrieval: float = 0.0
) -> float:
    """Exact match with credit for form (Search-R1 v0.3; the defaults are those of its launch
    script).

    | answer        | tags in order | gold in an information block | reward                |
    |---|---|---|---|
    | right         | yes           |                              | 1                     |
    | right         | no            |                              | 1 - structure         |
    | wrong or none | yes           | yes                          | structure + retrieval |
    | wrong or none | yes           | no                           | structure             |
    | wrong         | no            |                              | final                 |
    | none          | no            |                              | 0                     |
    """
    # Some prompts begin the thought
    opened = "<think>" if transcript.prompt_text.rstrip().endswith("<think>") else ""
    in_order = tags_in_order(opened + transcript.whole_text)
    answer = scoring.extract_answer(transcript.model_text)
    if scoring.exact_match(answer, transcript.golds):
        return 1.0 if in_order else 1.0 - structure
    if in_order:
        return structure + retrieval if _gold_retrieved(transcript) else structure
    return final if answer is not None else 0.0


def searchr1_f1_plus(
    transcript: Transcript, *, no_search: float = 0.1, no_answer: float = 0.1
) -> float:
    """F1 of the last answer's words, less a penalty where the policy never searched, by tag or tool
    call, and one where it never answered: F1+ of Search-R1++, arXiv 2602.19526. From -0.2 to 1."""
    text = transcript.model_text
    answer = scoring.extract_answer(text)
    calls = [call for response in transcript.responses for call in read_calls(response)]
    called = any(isinstance(call, TextCall) and call.name == "search" for call in calls)
    searched = called or blocks("search", text)
    penalties = no_search * (not searched) + no_answer * (answer is None)
    return scoring.f1(answer, transcript.golds) - penalties


def tags_in_order(text: str) -> bool:
    """Whether the text is think, (search, information, think) any number of times, answer, with
    only white space between, before and after, and every kind of tag balanced."""
    parts = _TAG.split(text)  # texts, and tags between them
    outside = "".join(parts[::4])
    return _ORDER.fullmatch("".join(parts[1::2])) is not None and not outside.strip()


def _gold_retrieved(transcript: Transcript) -> bool:
    """Whether a normalized gold answer is a substring of an information block that the policy was
    shown."""
    shown = [block for text in transcript.observations for block in blocks("information", text)]
    normalized = [scoring.normalize_answer(block) for block in shown]
    golds = [scoring.normalize_answer(gold) for gold in transcript.golds]
    return any(gold in block for gold in golds for block in normalized)
