"""The parts of a search environment: files, a world, a retriever."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.components import check_options
from rlflow.errors import ConfigError
from rlflow.types import Observation, Task
from rlflow_environments.common.transcript import as_text
from rlflow_environments.retrieval.corpus import Corpus
from rlflow_environments.retrieval.indices import Retriever, brings_documents, make_retriever
from rlflow_environments.search.protocols import Protocol
from rlflow_environments.search.protocols.asearcher import with_validity
from rlflow_environments.search.protocols.text import render_prompt
from rlflow_environments.search.questions import QuestionSource, read_tasks


def world_files(
    world: Mapping[str, Any] | None, elsewhere: Path | None = None
) -> Mapping[str, Any]:
    """The paths of the embedded world's files, made if they are missing; none without a world.
    elsewhere: where missing ones are made."""
    if world is None:
        return {}
    from rlflow_environments.search.world.world import ensure_world

    options = check_options(world, ensure_world, where="environment.world", reserved=("elsewhere",))
    return ensure_world(**options, elsewhere=elsewhere)


def open_retriever(
    retriever: str | Mapping[str, Any] | Retriever, corpus: str | Path | None
) -> Retriever:
    """The retriever itself, or the one that is described, over the corpus. Raises ConfigError."""
    if isinstance(retriever, Retriever):
        return retriever
    where = "environment.retriever"
    if corpus is None and brings_documents(retriever, where):
        return make_retriever(retriever, None, where)
    if corpus is None:
        raise ConfigError(
            "environment search: no corpus. Set environment.corpus to a .jsonl file of passages, "
            "or environment.world to the embedded world's options."
        )
    return make_retriever(retriever, Corpus(corpus), where)


def load_tasks(
    questions: Mapping[str, QuestionSource],
    protocol: Protocol,
    template: str | None,
    valid_ratio: float,
) -> dict[str, list[Task]]:
    """Split -> the questions of its file in the protocol's prompts. template: in place of the
    protocol's. valid_ratio: see `with_validity`; in "val" every question is taken to have an
    answer. Raises ConfigError, DataError."""
    template = protocol.prompt_template if template is None else template
    loaded = {}
    for split, path in questions.items():
        ratio = valid_ratio if split == "train" else 1.0
        loaded[split] = [
            _adapted(task, protocol, ratio) for task in read_tasks(path, split, template)
        ]
    return loaded


def task_of(question: str, tasks: Sequence[Task], protocol: Protocol, template: str | None) -> Task:
    """A question that somebody asks, in place of that in the prompt of the first task whose prompt
    holds its question as it stands: a policy knows the prompts of its data; without such a task in
    the template. Nobody knows its answer."""
    question = question.strip()
    metadata = {"question": question}
    for task in tasks:
        asked = task.metadata.get("question")
        if isinstance(asked, str) and asked.strip() and asked.strip() in as_text(task.prompt):
            return Task("asked", _exchanged(task.prompt, asked.strip(), question), [], metadata)
    prompt = render_prompt(protocol.prompt_template if template is None else template, question)
    return _adapted(Task("asked", prompt, [], metadata), protocol, 1.0)


def _exchanged(prompt: Observation, old: str, new: str) -> Observation:
    if isinstance(prompt, str):
        return prompt.replace(old, new)
    return [{**message, "content": message["content"].replace(old, new)} for message in prompt]


def _adapted(task: Task, protocol: Protocol, valid_ratio: float) -> Task:
    prompt = task.prompt
    if isinstance(prompt, str):
        prompt = with_validity(prompt, task.id, valid_ratio)
    if isinstance(prompt, str) and protocol.speaks_messages:
        prompt = [{"role": "user", "content": prompt}]
    return task if prompt == task.prompt else dataclasses.replace(task, prompt=prompt)
