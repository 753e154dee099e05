"""The text of the Search-R1 protocol as pure functions: prompts, actions in a response,
observations from passages.

Source: Search-R1 (arXiv 2503.09516), `search_r1/llm_agent/generation.py`; the wording of prompts
and corrections is ours. What is made of it in an episode, and the other protocols, are in
`protocols`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlflow.errors import ConfigError, did_you_mean
from rlflow_environments.common.blocks import block_span

if TYPE_CHECKING:
    from rlflow_environments.retrieval.corpus import Passage

_BY_SEARCH = (
    "Whenever a fact is missing, look it up: write <search> your query </search>, and what the "
    "search engine "
    "finds is shown to you between <information> and </information>. You may search as many times "
    "as you need. As soon as "
    "nothing is missing any more, write only the answer, without an explanation, between <answer> "
    "and </answer>, for "
    "example <answer> Beijing </answer>. Question: {question}\n"
)
PROMPT_TEMPLATES: dict[str, str] = {
    "searchr1": (
        "Answer the question at the end. Each time you are given something new, first think it "
        "over between <think> and </think>. "
    )
    + _BY_SEARCH,
    "direct": "Answer the question at the end. " + _BY_SEARCH,
    "short": "Question: {question}\n",
}
"""Name -> text of the user message. `direct` asks for no thoughts (Search-R1++, arXiv 2602.19526).
`short` is for models that are too small to follow an instruction."""

INVALID_ACTION = (
    "\n\nThat was no valid action. I write <search> a query </search> to look something up, or "
    "<answer> the answer </answer> "
    "to finish. I try again.\n\n"
)
SEARCHES_SPENT = (
    "\n\nNo searches are left. I give my answer now as <answer> the answer </answer>.\n\n"
)


ActionKind = Literal["search", "answer"]
ACTIONS: tuple[ActionKind, ...] = ("search", "answer")


@dataclass(frozen=True)
class Action:
    """What a response asks for. content: the query or the answer, stripped."""

    kind: ActionKind
    content: str


# Possessive: a page may hold "<" and ten thousand blanks.
_PROTOCOL_TAG = re.compile(
    r"<(\s*+(?:/\s*+)?(?:think|search|access|information|answer|tool_call|tool_response)\s*+)>",
    re.IGNORECASE,
)
# `<|name|>` of most models, DeepSeek's full-width bars, and the plain ones of Llama 2, Mistral and
# Gemma: a tokenizer that meets one of its own in text makes it the token.
_SPECIAL_TOKEN = re.compile(
    r"<(?:[|\uff5c](\s*[\w\u2581-]+\s*)[|\uff5c]|"
    r"(/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn)))>"
)


def parse_action(response: str) -> Action | None:
    """The first complete search or answer of a response, None where there is none.

    As in Search-R1 the text counts up to its first `</search>`, or without one up to its first
    `</answer>`: `_postprocess_responses` cuts it there before `postprocess_predictions` looks for
    the first action.
    """
    for closing in ("</search>", "</answer>"):
        head, found, _ = response.partition(closing)
        if found:
            return _first_action(head + found)
    return None


def _first_action(text: str) -> Action | None:
    found = [(span, kind) for kind in ACTIONS if (span := block_span(kind, text))]
    if not found:
        return None
    (start, stop), kind = min(found)
    return Action(kind, text[start:stop].strip())


def neutralize_tags(text: str) -> str:
    """The text with protocol tags and special tokens in square brackets: `<answer>` -> `[answer]`,
    `<|im_end|>` -> `[im_end]`.

    A retrieved page can then neither end the information block nor be taken for the policy's own
    action.
    """
    text = _PROTOCOL_TAG.sub(r"[\1]", text)
    return _SPECIAL_TOKEN.sub(lambda match: f"[{match[1] or match[2]}]", text)


def format_observation(
    passages: Sequence[Passage], max_document_characters: int | None = None
) -> str:
    """The information block of Search-R1: `Doc {i}(Title: {first line}) {rest}`, i from 1, one
    document per line group.

    Each document is cut to `max_document_characters` of its contents; the tags around the documents
    are never cut.
    """
    documents = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = neutralize_tags(passage.contents)[:max_document_characters].partition("\n")
        documents.append(f"Doc {number}(Title: {title}) {text}\n")
    return f"\n\n<information>{''.join(documents).strip()}</information>\n\n"


def render_prompt(template: str, question: str) -> str:
    """The prompt text of a question. template: a name in PROMPT_TEMPLATES, or a text that contains
    `{question}`.

    Raises ConfigError for a name that is not known.
    """
    question = question.strip()
    if template == "searchr1" and not question.endswith("?"):
        question += "?"  # as Search-R1's data preparation does
    return check_prompt_template(template).replace("{question}", question)


def check_prompt_template(template: str) -> str:
    """The text of a prompt template, given by name or as the text itself. Raises ConfigError for an
    unknown name."""
    text = PROMPT_TEMPLATES.get(template, template)
    if "{question}" not in text:
        known = ", ".join(PROMPT_TEMPLATES)
        raise ConfigError(
            f"environment.prompt_template: expected one of {known}, or a text with {{question}}, "
            f"found '{template}'." + did_you_mean(template, PROMPT_TEMPLATES)
        )
    return text
