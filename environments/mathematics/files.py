"""Problems out of files: GSM8K's and DAPO-Math's, by their fields.

gsm8k   question, and answer: working that ends with `#### 42` (openai/gsm8k)
dapo    prompt, messages or text, and reward_model.ground_truth (BytedTsinghua-SIA/DAPO-Math-17k,
        which holds each problem about a hundred times; open-r1's processed one; verl's others)
plain   problem or question, and answer or solution that is the answer alone, text or a number"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.types import Task
from rlflow_environments.common.jsonl import (
    BadRow,
    answer_of,
    are_messages,
    kind_of,
    refuse,
    text_of,
)
from rlflow_environments.common.rows import Row, read_rows
from rlflow_environments.common.transcript import as_text
from rlflow_environments.mathematics.answers import HASHES, boxed, number


def read_tasks(path: str, split: str, prompt: str) -> list[Task]:
    """The tasks of a file, a problem that is there twice once. Raises DataError."""
    what, bad = "problems", []
    found: dict[str, Task] = {}
    for name, row in read_rows(path, what):
        try:
            if isinstance(row, BadRow):
                raise row
            question, answer = _problem(row)
        except BadRow as problem:
            bad.append((name, str(problem)))
            continue
        task_id = f"{split}-{len(found)}"
        found.setdefault(as_text(question), _task(task_id, question, answer, prompt))
    refuse(Path(path), what, bad, len(found))
    return list(found.values())


def _problem(row: Row) -> tuple[Any, str]:
    """(messages or text, answer) of a row. Raises BadRow."""
    if isinstance(row.get("reward_model"), Mapping):
        answer = answer_of(dict(row["reward_model"]), "ground_truth")
        return _messages(row.get("prompt")), boxed(answer) or answer.strip()
    question = text_of(row, "problem" if "problem" in row else "question")
    answer = answer_of(row, "answer" if "answer" in row else "solution")
    if HASHES in answer:
        said = answer.rsplit(HASHES, 1)[1].strip()
        if number(said) is not None:
            return question, said.replace(",", "")
        answer = boxed(answer) or said  # a heading of Markdown has the mark too
        if not answer:
            raise BadRow(
                f"'answer': expected '{HASHES} NUMBER' at its end, found nothing behind it"
            )
    return question, boxed(answer) or answer.strip()


def _messages(prompt: Any) -> Any:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not are_messages(prompt):
        raise BadRow(f"'prompt': expected text or messages, found {kind_of(prompt)}")
    return [{"role": one["role"], "content": one["content"]} for one in prompt]


def _task(name: str, question: Any, answer: str, prompt: str) -> Task:
    """Messages stay as they are."""
    shown = prompt.replace("{question}", question) if isinstance(question, str) else question
    return Task(name, shown, answer)
