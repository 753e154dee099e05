"""The search environment: a question, searches in a corpus, an answer, in the Search-R1 protocol."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlflow.environment import Environment
from rlflow.errors import ConfigError, did_you_mean
from rlflow.types import Episode, Step, Task
from rlflow_environments.search import scoring
from rlflow_environments.search.asynchronous import AsyncRetriever
from rlflow_environments.search.coalescer import CoalescedSearch
from rlflow_environments.search.formats import Corpus, Passage
from rlflow_environments.search.protocol import PROTOCOLS, check_prompt_template
from rlflow_environments.search.questions import QuestionSource, read_tasks
from rlflow_environments.search.retrievers import Retriever, brings_documents, make_retriever
from rlflow_environments.search.trace import trace_id

if TYPE_CHECKING:
    from rlflow_environments.search.managed import ManagedServer

REPORTED_METADATA = ("hops",)
"""Numeric keys of a question's row that become metrics of its episodes."""

T = TypeVar("T")


class SearchEnvironment(Environment):
    """Questions over a corpus. The policy writes `<search> query </search>` and is shown passages, or `<answer> answer </answer>`
    and the episode ends with its score; anything else is answered with a correction.

    Metrics: exact_match, f1, answered, searches (executed), invalid_actions, gold_in_results (1 once a gold answer stood in a
    passage that the policy was shown), and `hops` where the question's row has it. The scores read the policy's own text only.
    A failing retriever aborts the episode; its error never becomes text.
    """

    def __init__(
        self,
        corpus: str | Path | None = None,
        train: QuestionSource | None = None,
        val: QuestionSource | None = None,
        *,
        world: Mapping[str, Any] | None = None,
        retriever: str | Mapping[str, Any] | Retriever = "dense",
        top_k: int = 3,
        protocol: str = "searchr1",
        reward: str = "searchr1_em",
        prompt_template: str = "searchr1",
        max_document_characters: int | None = None,
        max_searches: int | None = None,
        managed: bool | Mapping[str, Any] = False,
    ) -> None:
        """Reads the files and builds the index.

        corpus: a .jsonl file (see `formats`). train, val: files of questions, or a folder of evaluation sets (see `questions`);
        either may be missing as long as its tasks are not asked for.
        world: keywords of `world.ensure_world`, which makes the embedded world's files; a file given beside it wins.
        retriever: a name, {name, options...}, or a Retriever (then `corpus` is not needed). top_k: passages per search.
        prompt_template: for rows that have a `question` and no `prompt`. max_document_characters: of one passage's contents.
        max_searches: per episode; further searches are refused. managed: search in a service of its own that is started here and
        ends with the run; its options: see `managed`. Raises ConfigError, DataError, MissingPackageError.
        """
        _at_least_one("top_k", top_k)
        _at_least_one("max_document_characters", max_document_characters)
        if max_searches is not None and max_searches < 0:
            raise ConfigError(f"environment.max_searches: expected 0 or more, found {max_searches}.")
        self._protocol = _named("protocol", protocol, PROTOCOLS)
        self._reward = _named("reward", reward, scoring.REWARDS)
        check_prompt_template(prompt_template)
        self.stop = self._protocol.stop
        self._top_k = top_k
        self._max_document_characters = max_document_characters
        self._max_searches = max_searches
        files = _world_files(world)
        questions = {"train": train or files.get("train"), "val": val or files.get("val")}
        self._tasks = {
            split: read_tasks(path, split, prompt_template) for split, path in questions.items() if path is not None
        }
        corpus = corpus or files.get("corpus")
        self._service: ManagedServer | None = None
        if managed:
            self.retriever = self._start_service(retriever, corpus, managed)
        else:
            self.retriever = _retriever(retriever, corpus)
        self._search = CoalescedSearch(self.retriever)

    def _start_service(
        self, retriever: Any, corpus: str | Path | None, managed: bool | Mapping[str, Any]
    ) -> Retriever:
        from rlflow_environments.search.managed import start_managed

        tasks = next(iter(self._tasks.values()), [])
        self._service = start_managed(retriever, corpus, managed, tasks, self._top_k)
        return self._service.retriever

    def shutdown(self) -> None:
        """Stops a managed service."""
        if self._service is not None:
            self._service.stop()

    def tasks(self, split: str) -> Sequence[Task]:
        """The questions of "train" or "val" in file order. Raises ConfigError where no such file was given."""
        if split not in self._tasks:
            given = ", ".join(self._tasks) or "none"
            raise ConfigError(
                f"environment search: no questions for the split '{split}'; given: {given}. Set environment.{split} to a "
                f".jsonl file of questions.{did_you_mean(split, self._tasks)}"
            )
        return self._tasks[split]

    async def reset(self, task: Task) -> Episode:
        """A fresh episode with its counters at zero."""
        return Episode(task, scratch={"responses": [], "searches": 0, "invalid_actions": 0, "gold_in_results": 0.0})

    async def step(self, episode: Episode, response: str) -> Step:
        """Searches, scores, or corrects. What the retriever raises escapes: the episode is aborted."""
        state = episode.scratch
        state["responses"].append(response)
        action = self._protocol.parse(response)
        if action is None:
            return self._refuse(episode, self._protocol.invalid_action)
        if action.kind == "answer":
            return self._finish(episode)
        if self._max_searches is not None and state["searches"] >= self._max_searches:
            return self._refuse(episode, self._protocol.searches_spent)
        passages = await self._find(action.content, episode)
        state["searches"] += 1
        shown = [passage.contents[: self._max_document_characters] for passage in passages]
        if any(scoring.contains_gold(text, episode.task.answer) for text in shown):
            state["gold_in_results"] = 1.0
        observation = self._protocol.observe(passages, self._max_document_characters)
        return Step(observation, metrics=self._metrics(episode))

    async def _find(self, query: str, episode: Episode) -> list[Passage]:
        if isinstance(self.retriever, AsyncRetriever):
            trace = trace_id(episode.task.id, episode.scratch["responses"])
            return await self.retriever.find(query, self._top_k, trace=trace)
        return await self._search.search(query, self._top_k)

    def _refuse(self, episode: Episode, message: str) -> Step:
        episode.scratch["invalid_actions"] += 1
        return Step(message, metrics=self._metrics(episode))

    def _finish(self, episode: Episode) -> Step:
        model_text = "".join(episode.scratch["responses"])
        answer, golds = scoring.extract_answer(model_text), episode.task.answer
        scores = {"exact_match": scoring.exact_match(answer, golds), "f1": scoring.f1(answer, golds), "answered": 1.0}
        metrics = {**self._metrics(episode), **scores}
        return Step(reward=self._reward(model_text, golds), terminated=True, metrics=metrics)

    def _metrics(self, episode: Episode) -> dict[str, float]:
        """The metrics of an episode that has not answered: they stand if it never does."""
        counts = {name: float(episode.scratch[name]) for name in ("searches", "invalid_actions", "gold_in_results")}
        metadata = {name: episode.task.metadata.get(name) for name in REPORTED_METADATA}
        numbers = {name: float(value) for name, value in metadata.items() if isinstance(value, (int, float))}
        return {"exact_match": 0.0, "f1": 0.0, "answered": 0.0, **counts, **numbers}


def _world_files(world: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The paths of the embedded world's files, made if they are missing; none without a world."""
    if world is None:
        return {}
    from rlflow_environments.search.world import ensure_world

    known = list(inspect.signature(ensure_world).parameters)
    for key in world:
        if key not in known:
            raise ConfigError(
                f"environment.world: unknown option '{key}'; known: {', '.join(known)}.{did_you_mean(key, known)}"
            )
    return ensure_world(**world)


def _retriever(retriever: str | Mapping[str, Any] | Retriever, corpus: str | Path | None) -> Retriever:
    if isinstance(retriever, Retriever):
        return retriever
    if corpus is None and brings_documents(retriever):
        return make_retriever(retriever, None)
    if corpus is None:
        raise ConfigError(
            "environment search: no corpus. Set environment.corpus to a .jsonl file of passages, or environment.world to the "
            "embedded world's options."
        )
    return make_retriever(retriever, Corpus(corpus))


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"environment.{name}: expected at least 1, found {value}.")


def _named(option: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ConfigError(
            f"environment.{option}: expected one of {', '.join(known)}, found '{name}'.{did_you_mean(name, known)}"
        )
    return known[name]
