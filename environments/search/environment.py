"""The search environment: a question, searches in a corpus, an answer, in one of the field's
protocols."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, RLFlowError, did_you_mean
from rlflow.types import Episode, Observation, Step, Task
from rlflow.values import NonNegativeInt, PositiveInt, Share
from rlflow_environments.common.threads import beside_the_loop
from rlflow_environments.common.tool_calls import reader_of
from rlflow_environments.common.transcript import as_text
from rlflow_environments.retrieval.client.asynchronous import AsyncRetriever
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.search.lookups import Lookups
from rlflow_environments.search.metrics import METRICS
from rlflow_environments.search.protocols import Call, Reading, Result, Shown, make_protocol
from rlflow_environments.search.protocols.text import check_prompt_template
from rlflow_environments.search.questions import QuestionSource
from rlflow_environments.search.rewards import (
    RULE_SCORES,
    Transcript,
    make_reward,
    rule_scores,
    scoring,
)
from rlflow_environments.search.rewards.judge import Judge
from rlflow_environments.search.sources import load_tasks, open_retriever, task_of, world_files

if TYPE_CHECKING:
    from rlflow_environments.search.managed import ManagedServer

COUNTS = ("searches", "accesses", "invalid_actions", "gold_in_results")


class SearchEnvironment(Environment):
    """Questions over a corpus. The policy asks for searches, is shown what they find, and answers;
    how it does so is the protocol's matter (docs/search_protocols.md).

    Metrics: see `metrics.METRICS`. The scores read the policy's own text only. A failing retriever
    aborts the episode; its error never becomes text.

    corpus: a .jsonl file (see `formats`). train, val: files of questions, or a folder of evaluation
    sets (see `questions`); either may be missing as long as its tasks are not asked for. world:
    keywords of `world.ensure_world`, which makes the embedded world's files; a file given beside it
    wins. retriever: a name, {name, options...}, or a Retriever (then `corpus` is not needed).
    top_k: passages per search. pages: a .jsonl file for the tool access (None: those of the world,
    or of the server); a managed service serves it. tools: search, and access where the protocol has
    it. max_turns: in the sense of the protocol's original; it takes the place of
    rollout.max_turns. prompt_template: for rows that have a `question` and no `prompt` (None: the
    protocol's). valid_inst_ratio: of the asearcher protocol. max_document_characters: of one
    passage's contents. max_searches: per episode; further searches are refused. managed: search in
    a service of its own that is started here and ends with the run; its options: see `managed`.
    network_host: what other machines with rollout workers call this one: the service listens there
    (None: 127.0.0.1)."""

    metrics = METRICS
    harmless_options = (
        "protocol",
        "top_k",
        "max_turns",
        "reward",
        "valid_inst_ratio",
        "max_document_characters",
        "max_searches",
    )

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        """The validation questions are those at `path`; the training questions, which an evaluation
        never asks, are not read."""
        return {"val": path, "train": None}

    @classmethod
    def rehearse(cls, **options: Any) -> tuple[Environment | None, list[RLFlowError]]:
        """See Environment: questions are read, index, corpus and options looked at; no index is
        built, no service started."""
        from rlflow_environments.search.rehearsal import rehearsal

        return rehearsal(cls, options)

    def __init__(
        self,
        corpus: str | Path | None = None,
        train: QuestionSource | None = None,
        val: QuestionSource | None = None,
        *,
        world: Mapping[str, Any] | None = None,
        retriever: str | Mapping[str, Any] | Retriever = "dense",
        top_k: PositiveInt = 3,
        pages: str | Path | None = None,
        protocol: str | Mapping[str, Any] = "searchr1",
        tools: Sequence[str] | None = None,
        max_turns: PositiveInt | None = None,
        reward: str | Mapping[str, Any] = "searchr1_em",
        prompt_template: str | None = None,
        valid_inst_ratio: Share = 0.3,
        max_document_characters: PositiveInt | None = None,
        max_searches: NonNegativeInt | None = None,
        managed: bool | Mapping[str, Any] = False,
        network_host: str | None = None,
    ) -> None:
        """Reads the files and builds the index. Raises ConfigError, DataError,
        MissingPackageError."""
        self._protocol = make_protocol(protocol, tools, max_document_characters)
        self._score = make_reward(reward)
        self.stop, self.frame = self._protocol.stop, self._protocol.frame
        self.tools = self._protocol.schemas()
        self.max_turns = None if max_turns is None else self._protocol.responses(max_turns)
        if prompt_template is not None:
            check_prompt_template(prompt_template)
        self._prompt_template = prompt_template
        self._max_searches = max_searches
        files = world_files(world)
        questions = {"train": train or files.get("train"), "val": val or files.get("val")}
        given = {split: path for split, path in questions.items() if path is not None}
        self.adopt(load_tasks(given, self._protocol, prompt_template, valid_inst_ratio))
        corpus = corpus or files.get("corpus")
        of_world = files.get("pages") if "access" in self._protocol.enabled else None
        self._service: ManagedServer | None = None
        if managed:
            from rlflow_environments.search.managed import start_managed

            pages = pages or of_world
            self._service = start_managed(retriever, corpus, managed, pages, network_host)
            self.retriever, pages = self._service.retriever, None
        else:
            self.retriever = open_retriever(retriever, corpus)
            if not isinstance(self.retriever, AsyncRetriever):  # a server has pages of its own
                pages = pages or of_world
        self._lookups = Lookups(self.retriever, top_k, pages)
        self._lookups.check_tools(self._protocol.enabled)

    def worker_options(self) -> dict[str, Any]:
        """Where this one has started a service, the others search in that."""
        if self._service is None:
            return {}
        return {
            "retriever": {"name": "http", **self._service.client},
            "managed": False,
            "pages": None,
        }

    def shutdown(self) -> None:
        """Stops a managed service and a judge."""
        if isinstance(self._score, Judge):
            self._score.close()
        if self._service is not None:
            self._service.stop()

    def adopt(
        self, tasks: dict[str, list[Task]], unread: Mapping[str, RLFlowError] | None = None
    ) -> None:
        """Takes these questions, by split, in place of those that it has. unread: what is raised
        where others are asked for."""
        self._tasks, self._unread = tasks, dict(unread or {})

    def tasks(self, split: str) -> Sequence[Task]:
        """The questions of "train" or "val" in file order. Raises ConfigError where no such file
        was given."""
        if split in self._unread:
            raise self._unread[split]
        if split not in self._tasks:
            given = ", ".join(self._tasks) or "none"
            raise ConfigError(
                f"environment search: no questions for the split '{split}'; given: {given}. Set "
                f"environment.{split} (train: --train-data, val: --val-data) to a .jsonl file of "
                f"questions.{did_you_mean(split, self._tasks)}"
            )
        return self._tasks[split]

    def task_from_text(self, text: str) -> Task:
        """The question in the prompt of the environment's own questions, else in that of the
        protocol."""
        tasks = [task for split in ("val", "train") for task in self._tasks.get(split, ())]
        return task_of(text, tasks, self._protocol, self._prompt_template)

    def report(self) -> dict[str, float]:
        """Rates and times of the searches since the last call."""
        return self._lookups.report()

    async def reset(self, task: Task) -> Episode:
        """A fresh episode with its counters at zero."""
        state: dict[str, Any] = {
            "searches": 0,
            "accesses": 0,
            "invalid_actions": 0,
            "gold_in_results": 0.0,
            "responses": [],
            "observations": [],
            "queries": set(),
            "stop": self.stop,
            "pending": deque(),
            "shown": None,
        }
        return Episode(task, scratch=state)

    async def step(self, episode: Episode, response: str) -> Step:
        """Searches, scores, or corrects. What the retriever raises escapes: the episode is
        aborted."""
        state = episode.scratch
        state["responses"].append(response)
        calls = reader_of(episode)
        reading = self._protocol.read_sampled(response, state["stop"], episode.cut, calls)
        if reading.ends:
            return await self._finish(episode)
        spent = self._spent(reading.calls, state)
        if reading.invalid or spent:
            state["invalid_actions"] += 1
        if spent:
            state["pending"].append(_with(Shown(self._protocol.refuse(reading.calls)), reading))
        elif reading.calls and self._usable(episode):
            *others, last = await self._carry_out(reading.calls, episode)
            state["pending"] += [*others, _with(last, reading)]
        if episode.turns_left == 0 and self._protocol.scores_unfinished:
            return await self._finish(episode, terminated=False)
        return self._show("" if reading.calls else reading.message, episode)

    def _spent(self, calls: Sequence[Call], state: Mapping[str, Any]) -> bool:
        wanted = sum(len(call.inputs) for call in calls if call.tool == "search")
        return (
            self._max_searches is not None
            and wanted > 0
            and state["searches"] + wanted > self._max_searches
        )

    def _usable(self, episode: Episode) -> bool:
        """Whether a response is left that would read a result; what is not read yet comes first."""
        return episode.turns_left is None or episode.turns_left > len(episode.scratch["pending"])

    async def _carry_out(self, calls: Sequence[Call], episode: Episode) -> list[Shown]:
        state = episode.scratch
        results = []
        for call in calls:
            results.append(await self._lookups.carry_out(call, episode))
            state["searches" if call.tool == "search" else "accesses"] += len(call.inputs)
        texts = [text for result in results for text in self._texts(result)]

        def read() -> tuple[bool, list[Shown]]:
            return any(
                scoring.contains_gold(text, episode.task.answer) for text in texts
            ), self._protocol.show(results)

        gold, shown = await beside_the_loop(sum(map(len, texts)), read)
        if gold:
            state["gold_in_results"] = 1.0
        return shown

    def _texts(self, result: Result) -> list[str]:
        """What a result shows of documents and pages."""
        cut = self._protocol.max_document_characters
        return [passage.contents[:cut] for found in result.passages for passage in found] + [
            page for page in result.pages if page
        ]

    def _show(self, message: Observation, episode: Episode) -> Step:
        """The message, or the oldest result that has not been read; what was read before takes its
        short form."""
        state = episode.scratch
        step = Step(message, metrics=self._metrics(episode))
        if state["shown"] is not None:
            turn, shown = state["shown"]
            if shown.short is not None and shown.short != shown.full:
                step.replace = {turn: shown.short}
            state["shown"] = None
        if state["pending"] and not message:
            shown = state["pending"].popleft()
            state["shown"] = (episode.turns - 1, shown)
            step.observation, step.stop = shown.full, self._protocol.reading_stop
        state["stop"] = self.stop if step.stop is None else step.stop
        state["observations"].append(as_text(step.observation))
        return step

    async def _finish(self, episode: Episode, terminated: bool = True) -> Step:
        state = episode.scratch
        transcript = Transcript(
            episode.task, tuple(state["responses"]), tuple(state["observations"])
        )
        score = await self._score(transcript)
        length = sum(map(len, (*transcript.responses, *transcript.observations)))
        scores = await beside_the_loop(length, lambda: _scores(transcript))
        evidence = {
            "rewarded_without_evidence": float(score.value > 0 and not state["gold_in_results"])
        }
        metrics = {**self._metrics(episode), **scores, **evidence, **score.metrics}
        return Step(reward=score.value, terminated=terminated, metrics=metrics)

    def _metrics(self, episode: Episode) -> dict[str, float]:
        """The metrics of an episode that has not answered: they stand if it never does."""
        metrics = dict.fromkeys(
            ("exact_match", "f1", "answered", "rewarded_without_evidence", *RULE_SCORES), 0.0
        )
        metrics |= {name: float(episode.scratch[name]) for name in COUNTS}
        hops = episode.task.metadata.get("hops")
        return {**metrics, "hops": float(hops)} if isinstance(hops, (int, float)) else metrics


def _with(shown: Shown, reading: Reading) -> Shown:
    """What is shown, with what was wrong about other calls of the response."""
    return replace(shown, full=[*shown.full, *reading.message]) if reading.message else shown


def _scores(transcript: Transcript) -> dict[str, float]:
    answer, golds = scoring.extract_answer(transcript.model_text), transcript.golds
    matches = {"exact_match": scoring.exact_match(answer, golds), "f1": scoring.f1(answer, golds)}
    return {**matches, "answered": float(answer is not None), **rule_scores(transcript)}
