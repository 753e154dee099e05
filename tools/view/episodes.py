"""Records of episodes, read: whether a task was solved, its question, its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.report.metrics import Metrics, scores
from rlflow.report.records import text_of


def solved(record: Mapping[str, Any], registered: Metrics) -> bool:
    """Whether the first score of an episode is 1, or, where it has none, its reward positive."""
    values = [record["metrics"][name] for name in scores(registered) if name in record["metrics"]]
    return bool(values[0] == 1 if values else (record["reward"] or 0) > 0)


def question_of(record: Mapping[str, Any]) -> str:
    """The question of an episode's task; where it has none the last line of its prompt, unless that
    is a cue ("Action:"), or the task's id."""
    question = (record.get("metadata") or {}).get("question")
    if isinstance(question, str) and question.strip():
        return question.strip()
    prompt = record.get("prompt") or ""
    prompt = text_of(prompt if isinstance(prompt, str) else prompt[-1:])
    last = prompt.strip().rpartition("\n")[2].strip() or ":"
    return str(record["task_id"]) if last.endswith(":") else last


def answers_of(record: Mapping[str, Any]) -> list[str]:
    """The texts that a task's answer may be; none where it is no text."""
    answer = record.get("answer")
    values = answer if isinstance(answer, list) else [answer]
    return [
        str(value) for value in values if type(value) in (str, int, float) and str(value).strip()
    ]
