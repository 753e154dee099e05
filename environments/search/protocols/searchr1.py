"""The protocols around Search-R1's tags: that of Search-R1 itself (and slime), RLinf's, and
SkyRL's.

Sources: Search-R1 `search_r1/llm_agent/generation.py`; RLinf `agents/searchr1`,
`agents/tool_call/parsers.py`; SkyRL `skyrl_gym/envs/search`, `skyrl_gym/tools/search.py`. Templates
of observations are theirs, sentences are ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlflow.types import Observation
from rlflow_environments.common.blocks import blocks
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.search.protocols.base import Call, Protocol, Reading, Result, Shown
from rlflow_environments.search.protocols.text import (
    INVALID_ACTION,
    SEARCHES_SPENT,
    format_observation,
    neutralize_tags,
    parse_action,
)

NO_RESULTS = "No search results found."


class SearchR1(Protocol):
    """Think, search, information, answer. A response without a complete action is corrected.

    max_turns: rounds that may search; one more response follows, whose search is not executed.
    """

    stop = ("</search>", "</answer>")
    frame = ("\n\n<information>Doc 1(Title: ) ", "</information>\n\n")
    scores_unfinished = False  # it ends unanswered, which is worth nothing

    def responses(self, max_turns: int) -> int:
        # generation.py, `run_llm_loop`: after the rounds a last rollout with do_search=False
        return max_turns + 1

    def read(self, response: str, stop: tuple[str, ...], cut: bool) -> Reading:
        action = parse_action(response)
        if action is None:
            return Reading(message=INVALID_ACTION, invalid=True)
        if action.kind == "answer":
            return Reading(ends=True)
        return Reading(calls=(Call("search", (action.content,)),))

    def show(self, results: Sequence[Result]) -> list[Shown]:
        return [Shown(format_observation(results[0].passages[0], self.max_document_characters))]

    def refuse(self, calls: Sequence[Call]) -> Observation:
        return SEARCHES_SPENT


class RLinf(Protocol):
    """As Search-R1 with prompts, but a response without a search ends the episode, whatever it
    says.

    max_turns: responses, so that the last one's search would be of no use.
    """

    # And 16 more in its configuration: what a tokenizer may join them with
    stop = ("</search>", "</answer>")
    frame = ("\n\n<information>\n[Doc 1]():\n", "\n</information>\n<think>\n")
    document_characters = 5000

    def read(self, response: str, stop: tuple[str, ...], cut: bool) -> Reading:
        # searchr1_agent_loop.py cuts at the first closing tag by hand: whatever follows it is not
        # read, a second search neither.
        head, found, _ = response.partition("</search>")
        wanted = blocks("search", head + found)
        if not wanted:
            return Reading(ends=not cut)
        return Reading(calls=(Call("search", (wanted[0].strip(),)),))

    def show(self, results: Sequence[Result]) -> list[Shown]:
        return [Shown(as_observation(information(self, results[0].passages[0])))]

    def refuse(self, calls: Sequence[Call]) -> Observation:
        return SEARCHES_SPENT + "<think>\n"


class SkyRL(Protocol):
    """Search-R1's tags with the results as a JSON string. A response without an action is shown an
    empty block.

    max_turns: responses.
    """

    stop = ("</search>", "</answer>")
    frame = ('\n<information>{"result": "Doc 1: ', '"}</information>\n')

    def read(self, response: str, stop: tuple[str, ...], cut: bool) -> Reading:
        # env.py, `_is_done`: both tags anywhere, in either order, and before it looks for a search.
        if "<answer>" in response and "</answer>" in response:
            return Reading(ends=True)
        wanted = blocks("search", response)
        if not wanted:
            return Reading(message="\n<information></information>\n", invalid=True)
        return Reading(calls=(Call("search", (wanted[0].strip(),)),))

    def show(self, results: Sequence[Result]) -> list[Shown]:
        passages = results[0].passages[0]
        documents = [
            f"Doc {number}: {self.document(passage).strip()}\n"
            for number, passage in enumerate(passages, start=1)
        ]
        return [Shown(self._block("".join(documents) or NO_RESULTS))]

    def refuse(self, calls: Sequence[Call]) -> Observation:
        return self._block("No searches are left.")

    def _block(self, text: str) -> str:
        return f"\n<information>{json.dumps({'result': text})}</information>\n"


def information(protocol: Protocol, passages: Sequence[Passage]) -> str:
    """The information block of RLinf, ASearcher and AstraFlow."""
    documents = [
        f"[Doc {number}]({neutralize_tags(passage.url)}):\n{protocol.document(passage)}"
        for number, passage in enumerate(passages, start=1)
    ]
    body = "\n\n".join(documents) if documents else "No search results are found."
    return f"<information>\n{body}\n</information>"


def as_observation(block: str) -> str:
    """A block as it is appended in RLinf, ASearcher and AstraFlow: the policy goes on thinking."""
    return f"\n\n{block}\n<think>\n"
