"""Agent protocols: how a response is read, and how results are shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rlflow.types import Observation
from rlflow_environments.common.blocks import blocks
from rlflow_environments.common.tool_calls import CallReader
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.search.protocols.text import neutralize_tags

Tool = Literal["search", "access"]
TOOLS: tuple[Tool, ...] = ("search", "access")
Page = str | None
"""A page's text, None where the URL is not known."""


@dataclass(frozen=True)
class Call:
    """A use of a tool. inputs: queries of a search, URLs of an access; mostly one."""

    tool: Tool
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What a call brought, an element per input: passages of a search, pages of an access."""

    call: Call
    passages: list[list[Passage]] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """What a response asks for. calls: tools to use. ends: the episode is over. message: what is
    answered where no tool is used, and behind the results of calls to those that made no sense;
    invalid: whether one made none."""

    calls: tuple[Call, ...] = ()
    ends: bool = False
    message: Observation = ""
    invalid: bool = False


@dataclass(frozen=True)
class Shown:
    """An observation, and the text that takes its place once it has been read (None: it stays)."""

    full: Observation
    short: str | None = None


class Protocol(ABC):
    """One agent protocol, of one environment."""

    tools: ClassVar[tuple[Tool, ...]] = ("search",)
    """What the protocol has words for."""
    stop: tuple[str, ...] = ()
    """Stop strings of a response."""
    reading_stop: tuple[str, ...] | None = None
    """Stop strings of the response that follows a result (None: as always)."""
    frame: tuple[str, str] = ("", "")
    """See `Environment.frame`."""
    document_characters: int | None = None
    """Where documents are cut unless the configuration says otherwise."""
    prompt_template: str = "searchr1"
    """A name in PROMPT_TEMPLATES, or a text with {question}."""
    speaks_messages: bool = False
    """Whether observations are chat messages, so that prompts must be too."""
    scores_unfinished: bool = True
    """Whether an episode that reaches its limit is scored by what it has written so far."""

    def __init__(
        self, tools: Sequence[Tool] = ("search",), max_document_characters: int | None = None
    ) -> None:
        """tools: those enabled. max_document_characters: of one document."""
        self.enabled = tuple(tools)
        given = max_document_characters
        self.max_document_characters = self.document_characters if given is None else given

    def schemas(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the enabled tools, where the model's chat template presents them."""
        return ()

    def responses(self, max_turns: int) -> int:
        """How many responses an episode gets under the original's `max_turns`."""
        return max_turns

    @abstractmethod
    def read(self, response: str, stop: tuple[str, ...], cut: bool) -> Reading:
        """Reads a response. stop: its stop strings; cut: whether a token limit ended it."""

    def read_sampled(
        self, response: str, stop: tuple[str, ...], cut: bool, calls: CallReader
    ) -> Reading:
        """As `read`. calls: reads calls of tools as the model's chat template writes them."""
        return self.read(response, stop, cut)

    @abstractmethod
    def show(self, results: Sequence[Result]) -> list[Shown]:
        """The observations that results are shown as, one after the other; at least one."""

    @abstractmethod
    def refuse(self, calls: Sequence[Call]) -> Observation:
        """What is answered to a search where none is left."""

    def document(self, passage: Passage) -> str:
        """A passage's contents, cut, without anything that speaks in the protocol."""
        return neutralize_tags(passage.contents[: self.max_document_characters])


def last_block(tag: str, text: str) -> str | None:
    """The content of the last `<tag>...</tag>`, stripped; of nested openings the innermost; None
    without one."""
    found = blocks(tag, text)
    return found[-1].rpartition(f"<{tag}>")[2].strip() if found else None
