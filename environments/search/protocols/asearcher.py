"""The protocol of ASearcher and AstraFlow: searches and pages, every result read in a response of
its own.

Sources: ASearcher `train/asearcher.py`, `train/search_agent.py`; AstraFlow
`workflow/impl/asearcher/agent.py`. Prompts are ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rlflow.types import Observation
from rlflow_environments.search.protocols.base import (
    Call,
    Page,
    Protocol,
    Reading,
    Result,
    Shown,
    Tool,
    last_block,
)
from rlflow_environments.search.protocols.searchr1 import as_observation, information
from rlflow_environments.search.protocols.text import neutralize_tags
from rlflow_environments.search.rewards.asearcher import INVALID_QUESTION

MAX_CHUNKS = 10
CHUNK_CHARACTERS = 25_000
SHORT_CHARACTERS = 100
NO_PAGE = "<information>\nNo More Information is Found for this URL.\n</information>"
NONE_LEFT = "<information>\nNo searches are left.\n</information>"

MAY_BE_INVALID = (
    "If nothing fits all that the question says, the Assistant writes '<answer> "
    f"{INVALID_QUESTION}. </answer>'."
)
IS_VALID = "Try to find the most likely answer."
_USES = {
    "search": "writes <search> query </search> to ask a search engine",
    "access": "writes <access> url </access> to open a page",
}


class ASearcher(Protocol):
    """Search, and access where it is enabled. A result is read in a response that ends with its
    thought; a page comes in chunks, each of which gives way to its beginning once it has been read.

    max_turns: responses, so that a search takes two and a page of ten chunks eleven. Results queue
    up: the oldest is read first. A response that ends without any of its stop strings ends the
    episode; one that ends with a stray tag goes on.
    """

    tools = ("search", "access")
    reading_stop = ("</think>",)
    frame = ("\n\n<information>\n[Doc 1]():\n", "\n</information>\n<think>\n")
    document_characters = 5000

    def __init__(
        self, tools: Sequence[Tool] = ("search",), max_document_characters: int | None = None
    ) -> None:
        super().__init__(tools, max_document_characters)
        self.stop = tuple(f"</{tool}>" for tool in (*self.enabled, "answer"))
        self.prompt_template = prompt(self.enabled)

    def read(self, response: str, stop: tuple[str, ...], cut: bool) -> Reading:
        said_all = not cut and not any(text in response for text in stop)
        if said_all or last_block("answer", response) is not None:
            return Reading(ends=True)
        for tool in self.enabled:
            wanted = last_block(tool, response)
            if wanted is not None:
                return Reading(calls=(Call(tool, (wanted,)),))
        # A thought that ends is no mistake; a stray closing tag is, but nothing is said about it.
        return Reading(invalid=any(f"</{tool}>" in response for tool in (*self.enabled, "answer")))

    def show(self, results: Sequence[Result]) -> list[Shown]:
        result = results[0]
        if result.call.tool == "search":
            return [Shown(as_observation(information(self, result.passages[0])))]
        return page_chunks(result.pages[0])

    def refuse(self, calls: Sequence[Call]) -> Observation:
        return as_observation(NONE_LEFT)


def page_chunks(page: Page) -> list[Shown]:
    """A page as at most 10 chunks of 25,000 characters, each with the form of 100 characters that
    replaces it."""
    if page is None or not page.strip():
        return [Shown(as_observation(NO_PAGE))]
    starts = range(0, min(len(page), MAX_CHUNKS * CHUNK_CHARACTERS), CHUNK_CHARACTERS)
    return [
        _chunk(number, page[start : start + CHUNK_CHARACTERS])
        for number, start in enumerate(starts, start=1)
    ]


def _chunk(number: int, text: str) -> Shown:
    def framed(part: str) -> str:
        return as_observation(
            f"<information>\n>>>> Page {number} >>>>\n\n{neutralize_tags(part)}\n</information>"
        )

    return Shown(framed(text), framed(text[:SHORT_CHARACTERS]))


def prompt(tools: Sequence[str]) -> str:
    """The prompt for the enabled tools, with a place for the question; it opens the first
    thought."""
    uses = " or ".join(_USES[tool] for tool in tools)
    return (
        "A conversation between User and Assistant. The User asks a question and the Assistant "
        "answers it. The Assistant first "
        "thinks about the question and about what it has read, between <think> and </think>, and "
        "keeps what matters. Where a "
        f"fact is missing it {uses}; what is found is given to it between <information> and "
        "</information>. At the end it "
        "writes the answer between <answer> and </answer>, as in <answer> answer here </answer>; "
        "several answers are separated "
        f"by commas. {MAY_BE_INVALID}\n\nUser:\n\n{{question}}\n\nThe answer is in the language of "
        "the question.\n\n"
        "Assistant:\n<think>\n"
    )


def with_validity(prompt_text: str, task_id: str, ratio: float) -> str:
    """The prompt, which for a share of the tasks asks for an answer instead of offering that there
    is none.

    Drawn by the task's id, so that all attempts of a group are asked alike. ratio: the original's
    `valid_inst_ratio`.
    """
    digest = hashlib.blake2b(f"validity/{task_id}".encode(errors="replace"), digest_size=8).digest()
    drawn = int.from_bytes(digest, "big") / 2**64
    return prompt_text.replace(MAY_BE_INVALID, IS_VALID) if drawn < ratio else prompt_text
