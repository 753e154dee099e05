"""Conversations and texts out of files, to be imitated (`rlflow sft`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError
from rlflow.report.metrics import Metric
from rlflow.types import Episode, Message, Step, Task, TaskRecording
from rlflow.values import Share
from rlflow_environments.common.jsonl import BadRow, kind_of, refuse, text_of
from rlflow_environments.common.rows import read_rows
from rlflow_environments.common.text import load_json

logger = logging.getLogger(__name__)

WHAT = "recordings"
FORMS = "'messages', 'prompt' and 'completion', or 'text'"


class Recordings(Environment):
    """Rows of files that are imitated, for `rollout.engine: recorded`.

    A row is a JSON object with `messages` (and `tools`), of which every assistant's is trained;
    with `prompt` and `completion`, texts or messages, of which the completion is; or with `text`,
    of which everything is."""

    max_turns = 1
    shorthand = "train"
    metrics = {
        "nll": Metric(
            "nats/token",
            "negative log-likelihood of the trained tokens",
            score=True,
            shown="nll {:.4f}",
        )
    }

    def __init__(
        self,
        train: str | Path | None = None,
        val: str | Path | None = None,
        *,
        held_out: Share = 0.1,
        skip_bad: bool = False,
    ) -> None:
        """train, val: files of rows (JSON Lines, a JSON array, parquet). held_out: without val this
        share of train's rows validates, evenly spread. skip_bad: rows that cannot be read are left
        out with a warning, not an error.

        Raises ConfigError, DataError, MissingPackageError."""
        if train is None and val is None:
            raise ConfigError(
                f"environment recordings: expected train=ROWS.jsonl, rows of {FORMS}; found no "
                "file. Give --data FILE."
            )
        self._skip_bad = skip_bad
        files = {"train": train, "val": val}
        self._tasks = {
            split: self._read(Path(path)) for split, path in files.items() if path is not None
        }
        if val is None:
            self._hold_out(held_out)
        if train is not None:
            self._leave_out_what_validates()

    @classmethod
    def evaluation_options(cls, path: str) -> dict[str, Any]:
        return {"val": path, "train": None}

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks.get(split, [])

    def step(self, episode: Episode, response: str) -> Step:
        raise ConfigError(
            "environment recordings: it has nothing to say to a response, its rows are imitated; "
            "set rollout.engine=recorded, or take another environment."
        )

    def _read(self, path: Path) -> list[Task]:
        tasks: list[Task] = []
        bad: list[tuple[str, str]] = []
        for name, row in read_rows(path, WHAT):
            try:
                if isinstance(row, BadRow):
                    raise row
                place = name.rpartition(" ")[2]
                tasks.append(_task(f"{path.name}:{place}", recording_of(row)))
            except BadRow as problem:
                bad.append((name, str(problem)))
        refuse(path, WHAT, bad, len(tasks), skip=self._skip_bad)
        return tasks

    def _hold_out(self, share: float) -> None:
        rows = self._tasks["train"]
        count = min(len(rows) - 1, max(1, round(share * len(rows))))
        if count < 1:
            raise ConfigError(
                "environment recordings: one row alone, expected two or more to hold one out for "
                "the evaluation; add rows, or give --eval-data FILE."
            )
        places = {place * len(rows) // count for place in range(count)}
        self._tasks["val"] = [rows[place] for place in sorted(places)]
        self._tasks["train"] = [row for place, row in enumerate(rows) if place not in places]

    def _leave_out_what_validates(self) -> None:
        """No row that validates is trained on."""
        held = {repr(task.recording) for task in self._tasks["val"]}
        rows = self._tasks["train"]
        kept = [task for task in rows if repr(task.recording) not in held]
        both = len(rows) - len(kept)
        if both and kept:
            logger.warning("left out %d training rows that validate too", both)
            self._tasks["train"] = kept
        elif both:
            logger.warning("every training row validates too: evaluations show no more")


def recording_of(row: Mapping[str, Any]) -> TaskRecording:
    """What a row holds. Raises BadRow."""
    columns = {name: value for name, value in row.items() if value is not None}
    if "messages" in columns:
        return TaskRecording(_messages(columns, "messages"), _tools(columns))
    if {"prompt", "completion"} <= columns.keys():
        return _completed(columns)
    if "text" in columns:
        return TaskRecording(texts=((text_of(columns, "text"), True),))
    names = ", ".join(f"'{name}'" for name in list(columns)[:8]) or "no column"
    raise BadRow(f"expected {FORMS}, found {names}")


def _completed(row: dict[str, Any]) -> TaskRecording:
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return TaskRecording(texts=((row["prompt"], False), (text_of(row, "completion"), True)))
    roles = {"prompt": "user", "completion": "assistant"}
    prompt, completion = (
        [{"role": role, "content": text_of(row, name)}]
        if isinstance(row[name], str)
        else _messages(row, name)
        for name, role in roles.items()
    )
    return TaskRecording([*prompt, *completion], _tools(row), context=len(prompt))


def _messages(row: Mapping[str, Any], name: str) -> list[Message]:
    value = row[name]
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else kind_of(value)
        raise BadRow(f"'{name}': expected a list of messages, found {found}")
    return [_message(message, f"'{name}', message {n}") for n, message in enumerate(value, 1)]


def _message(message: Any, where: str) -> Message:
    """The message as chat templates take it: content is text, the arguments of calls are objects,
    keys without a value, which parquet fills in, are gone."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRow(f"{where}: expected an object with a role, found {kind_of(message)}")
    cleaned = {key: value for key, value in message.items() if value is not None}
    calls = cleaned.get("tool_calls") or []
    content = cleaned.get("content", "" if calls else None)
    if isinstance(content, list):
        content = _joined(content, where)
    if not isinstance(content, str):
        raise BadRow(f"{where}: 'content': expected text, found {kind_of(content)}")
    if message["role"] == "assistant" and not content.strip() and not calls:
        raise BadRow(f"{where}: an assistant's: expected text or tool_calls, found neither")
    cleaned["content"] = content
    if calls:
        cleaned["tool_calls"] = [_call(call, where) for call in calls]
    return cleaned


def _joined(parts: list[Any], where: str) -> str:
    """The text of a content in parts."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type", "") if isinstance(part, Mapping) else kind_of(part)
            raise BadRow(f"{where}: 'content': expected parts of text, found one of '{kind}'")
    return "".join(part["text"] for part in parts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow(f"{where}: 'tool_calls': expected {{function: {{name, arguments}}}}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments.encode())
        except (ValueError, RecursionError):
            raise BadRow(f"{where}: 'tool_calls': expected arguments as a JSON object") from None
    if not isinstance(arguments, Mapping):
        found = kind_of(arguments)
        raise BadRow(f"{where}: 'tool_calls': expected arguments as an object, found {found}")
    # Of a table's column every call has the keys of all
    arguments = {key: value for key, value in arguments.items() if value is not None}
    return {"type": "function", "function": {**function, "arguments": arguments}}


def _tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = row.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = load_json(tools.encode())
        except (ValueError, RecursionError):
            tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"'tools': expected a list of JSON schemas, found {kind_of(row['tools'])}")
    return tuple(tools)


def _task(name: str, recording: TaskRecording) -> Task:
    """The row as a task, with what is said first as its prompt, for people."""
    if recording.texts:
        *context, (answer, _) = recording.texts
        return Task(name, "".join(text for text, _ in context), answer, recording=recording)
    messages = recording.messages
    trained = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place >= max(1, recording.context)
    ]
    shown = messages[: trained[0]] if trained else messages
    prompt = [{"role": one["role"], "content": one["content"]} for one in shown]
    answer = messages[trained[-1]]["content"] if trained else None
    return Task(name, prompt, answer, recording=recording)
