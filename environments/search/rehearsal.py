"""The search environment for a dry run: with its questions, without anything to search in; and all
that is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import Problems, RLFlowError
from rlflow.types import Task
from rlflow_environments.retrieval.client.asynchronous import AsyncRetriever
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.indices import CorpusRetriever, Retriever, brings_documents
from rlflow_environments.retrieval.indices.rehearsal import rehearse_retriever
from rlflow_environments.search.managed import managed_options
from rlflow_environments.search.protocols import make_protocol
from rlflow_environments.search.sources import load_tasks, open_retriever, world_files

APART = ("corpus", "train", "val", "world", "retriever", "managed", "valid_inst_ratio")
"""Options that are looked at one by one; the environment is made without them."""
TOGETHER = ("protocol", "tools", "pages", "max_document_characters")
"""Options of which some are right only beside the others."""
WHERE = "environment.retriever"


class _Served(AsyncRetriever):
    """Stands for a server or a world, which may have pages, and is never asked."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        raise NotImplementedError

    async def find(self, query: str, top_k: int, *, trace: str = "") -> list[Passage]:
        raise NotImplementedError

    async def page(self, url: str, *, trace: str = "") -> str | None:
        raise NotImplementedError


def rehearsal(
    kind: type[Any], options: Mapping[str, Any]
) -> tuple[Environment | None, list[RLFlowError]]:
    """See `Environment.rehearse`. kind: `SearchEnvironment`, which imports this module, or a class
    of it."""
    problems, quiet = Problems(), Problems()
    environment = _made(kind, options, problems)
    given = (options.get(key) for key in ("tools", "max_document_characters"))
    protocol = quiet.attempt(make_protocol, options.get("protocol", "searchr1"), *given)
    template = None if environment is None else options.get("prompt_template")
    known = (protocol or make_protocol("searchr1"), template, options.get("valid_inst_ratio", 0.3))
    tasks: dict[str, list[Task]] = {}
    unread: dict[str, RLFlowError] = {}
    with tempfile.TemporaryDirectory(prefix="rlflow-world-") as aside:
        files = problems.attempt(world_files, options.get("world"), Path(aside)) or {}
        for split in ("train", "val"):
            source, wrong = options.get(split) or files.get(split), Problems()
            if source is not None:
                tasks |= wrong.attempt(load_tasks, {split: source}, *known) or {}
                if wrong:
                    unread[split] = wrong[0]
        problems.note(*unread.values())
        _look_at_retriever(options, options.get("corpus") or files.get("corpus"), problems)
    if environment is not None:
        environment.adopt(tasks, unread)
    return environment, problems


def _made(kind: type[Any], options: Mapping[str, Any], problems: Problems) -> Any:
    """The environment with the options that are right, nothing to search in and no questions; None
    where they do not go together."""
    retriever = options.get("retriever", "dense")
    brings = not isinstance(retriever, Retriever) and Problems().attempt(
        brings_documents, retriever
    )
    served = bool(options.get("managed") or options.get("world") or brings)
    nothing = _Served() if served else CorpusRetriever([], None)  # type: ignore[arg-type]
    rest = {key: value for key, value in options.items() if key not in APART}
    together = {key: rest.pop(key) for key in TOGETHER if key in rest}
    good: dict[str, Any] = {}
    for group in (together, *({key: value} for key, value in rest.items())):
        alone = problems.attempt(kind, retriever=nothing, **group)
        if alone is not None:
            alone.shutdown()
            good |= group
    return problems.attempt(kind, retriever=nothing, **good)


def _look_at_retriever(
    options: Mapping[str, Any], corpus: str | Path | None, problems: Problems
) -> None:
    retriever, managed = options.get("retriever", "dense"), options.get("managed", False)
    if isinstance(retriever, Retriever):
        return
    brings = problems.attempt(brings_documents, retriever, WHERE)
    if corpus is None and not brings:
        if brings is not None:  # else its name is not known
            problems.attempt(open_retriever, retriever, None)  # says that there is no corpus
        return
    if managed:
        problems.attempt(managed_options, retriever, managed)
    problems.note(*rehearse_retriever(retriever, corpus, WHERE, alone=not managed))
