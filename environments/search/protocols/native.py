"""The protocol of models that are trained on tool calls: JSON in the form of their chat template.

Source of the search tool and its results: verl `tools/search_tool.py`,
`tools/utils/search_r1_like_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.types import Observation
from rlflow_environments.common.tool_calls import (
    CallReader,
    TextCall,
    read_calls,
    tool_message,
    tool_schema,
)
from rlflow_environments.search.protocols.base import Call, Protocol, Reading, Result, Shown
from rlflow_environments.search.protocols.searchr1 import NO_RESULTS
from rlflow_environments.search.protocols.text import neutralize_tags

PAGE_CHARACTERS = 25_000
PROMPT = (
    "Answer the question. Think it over first, look up what you do not know with the tools, and "
    "write only the answer, without an explanation, between <answer> and </answer> as soon as "
    "nothing is missing, for example <answer> Beijing </answer>. Question: {question}"
)


def _schema(name: str, description: str, parameter: str, kind: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: dict(kind)}, "required": [parameter]}
    return tool_schema(name, description, parameters)


_SCHEMAS = {
    "search": _schema(
        "search",
        "Searches for documents about each of the queries.",
        "query_list",
        {"type": "array", "items": {"type": "string"}, "description": "search queries"},
    ),
    "access": _schema(
        "access", "Opens a page.", "url", {"type": "string", "description": "the page's address"}
    ),
}


class Native(Protocol):
    """Calls of the tools `search(query_list)` and `access(url)`; results come as messages of the
    role `tool`.

    Calls are read in the form of the model's chat template. A response without a call ends the
    episode. max_turns: responses (verl's `max_assistant_turns`).
    """

    tools = ("search", "access")
    prompt_template = PROMPT
    speaks_messages = True

    def schemas(self) -> tuple[dict[str, Any], ...]:
        return tuple(_SCHEMAS[tool] for tool in self.enabled)

    def read(self, response: str, stop: tuple[str, ...], cut: bool) -> Reading:
        return self.read_sampled(response, stop, cut, CallReader())

    def read_sampled(
        self, response: str, stop: tuple[str, ...], cut: bool, calls: CallReader
    ) -> Reading:
        read = read_calls(response, calls, self.schemas())
        found = [self._call(call) for call in read]
        usable = tuple(call for call in found if isinstance(call, Call))
        problems = [_message(problem) for problem in found if isinstance(problem, str)]
        ends = not found and not cut
        return Reading(usable, ends, message=problems or "", invalid=bool(problems))

    def _call(self, found: TextCall | str) -> Call | str:
        """The call of a tool here, or what is wrong with it, for the model to read."""
        if isinstance(found, str):
            return found
        name, arguments = found.name, found.arguments
        if name not in self.enabled:
            return f"Error: the tools are {', '.join(self.enabled)}."
        given = (
            arguments.get("query_list", arguments.get("query"))
            if name == "search"
            else arguments.get("url")
        )
        inputs = [given] if isinstance(given, str) else given
        if (
            not isinstance(inputs, list)
            or not inputs
            or not all(isinstance(text, str) for text in inputs)
        ):
            wanted = "'query_list', a list of texts" if name == "search" else "'url', a text"
            return f"Error: {name} takes {wanted}."
        return Call(name, tuple(text.strip() for text in inputs))

    def show(self, results: Sequence[Result]) -> list[Shown]:
        return [Shown([_message(self._text(result)) for result in results])]

    def _text(self, result: Result) -> str:
        if result.call.tool == "access":
            return "\n---\n".join(
                neutralize_tags((page or "")[:PAGE_CHARACTERS]) or "No such page."
                for page in result.pages
            )
        if not any(result.passages):
            return NO_RESULTS
        return "\n---\n".join(self._documents(passages) for passages in result.passages)

    def _documents(self, passages: Sequence[Any]) -> str:
        documents = []
        for number, passage in enumerate(passages, start=1):
            title, _, text = self.document(passage).partition("\n")
            documents.append(f"Doc {number} (Title: {title})\n{text}\n\n")
        return "".join(documents).strip()

    def refuse(self, calls: Sequence[Call]) -> Observation:
        return [_message("No searches are left.") for _ in calls]


def _message(text: str) -> dict[str, str]:
    return tool_message(json.dumps({"result": text}, ensure_ascii=False))
