"""Rows to imitate: which forms are read, what is made of them, and what is said of bad ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.errors import ConfigError, DataError
from rlflow.types import Episode, TaskRecording
from rlflow_environments.common.jsonl import BadRow
from rlflow_environments.dataset.recordings import Recordings, recording_of

ASKED = {"role": "user", "content": "A?"}
ANSWERED = {"role": "assistant", "content": "B."}
LOOKUP = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASKED, ANSWERED], "text": None}, TaskRecording([ASKED, ANSWERED])),
        ({"messages": [ASKED, ANSWERED], "tools": json.dumps(LOOKUP)}, TaskRecording([ASKED, ANSWERED], (*LOOKUP,))),
        ({"prompt": "A?", "completion": "B."}, TaskRecording(texts=(("A?", False), ("B.", True)))),
        ({"prompt": [ASKED], "completion": "B."}, TaskRecording([ASKED, ANSWERED], context=1)),
        ({"prompt": "A?", "completion": [ANSWERED]}, TaskRecording([ASKED, ANSWERED], context=1)),
        ({"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED], "tools": LOOKUP},
         TaskRecording([ASKED, ANSWERED, ASKED, ANSWERED], (*LOOKUP,), context=3)),
        ({"text": "All of it.", "source": "web"}, TaskRecording(texts=(("All of it.", True),))),
    ],
)  # fmt: skip
def test_the_forms_of_rows(row: dict[str, Any], expected: TaskRecording) -> None:
    assert recording_of(row) == expected


def test_messages_are_as_chat_templates_take_them() -> None:
    """Texts for contents, objects for arguments, no keys that are there for others' sake alone."""
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "?"}]
    rows = [
        {"role": "user", "content": parts, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call('{"where": "x"}')]},
        {"role": "tool", "content": "Doc", "tool_call_id": "1"},
        {"role": "assistant", "tool_calls": [call({"where": "y", "what": None})]},
    ]
    first, calling, result, again = recording_of({"messages": rows}).messages
    assert first == ASKED and result == rows[2]
    functions = [one["tool_calls"][0]["function"] for one in (calling, again)]
    assert [one["arguments"] for one in functions] == [{"where": "x"}, {"where": "y"}]
    assert calling["content"] == again["content"] == ""


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"question": "A?", "answer": "B"}, "expected 'messages', .* found 'question', 'answer'"),
        ({"prompt": "A?"}, "found 'prompt'"),
        ({}, "found no column"),
        ({"text": "  "}, "'text': expected text, found empty text"),
        ({"prompt": "A?", "completion": ""}, "'completion': expected text, found empty text"),
        ({"messages": []}, "'messages': expected a list of messages, found an empty list"),
        ({"messages": "A?"}, "'messages': expected a list of messages, found text"),
        ({"messages": [ASKED, "B"]}, "message 2: expected an object with a role, found text"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1: 'content': expected text, found a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "found one of 'image_url'"),
        ({"messages": [ASKED, {"role": "assistant", "content": " "}]}, "message 2: .* found neither"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("{")]}]}, "arguments as a JSON object"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("[1]")]}]}, "as an object, found a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": 1}]}]}, "'tool_calls': expected"),
        ({"messages": [ASKED, ANSWERED], "tools": "look"}, "'tools': expected a list of JSON schemas, found text"),
    ],
)  # fmt: skip
def test_bad_rows_say_what_was_expected_and_found(row: dict[str, Any], match: str) -> None:
    with pytest.raises(BadRow, match=match):
        recording_of(row)


def test_bad_rows_are_told_with_file_and_line_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": "a"}, {"text": ""}, {"text": "b"}]
    file = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows\.jsonl: 1 of 3 rows .* line 2: 'text'"):
        Recordings(file)
    caplog.set_level("WARNING")
    environment = Recordings(file, skip_bad=True)
    assert "line 2" in caplog.text
    named = [task.id for split in ("train", "val") for task in environment.tasks(split)]
    assert sorted(named) == ["rows.jsonl:1", "rows.jsonl:3"]


def test_a_share_is_held_out_evenly_and_never_trained(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"text": f"row {n}"} for n in range(40)])
    for share, count in ((0.1, 4), (0.25, 10), (0.001, 1), (1.0, 39)):
        environment = Recordings(file, held_out=share)
        train, val = ({task.id for task in environment.tasks(one)} for one in ("train", "val"))
        assert len(val) == count and len(train) == 40 - count and not train & val
    assert [task.id for task in Recordings(file).tasks("val")] == [
        f"rows.jsonl:{line}" for line in (1, 11, 21, 31)
    ]
    one = write(tmp_path / "one.jsonl", [{"text": "alone"}])
    with pytest.raises(ConfigError, match="one row alone"):
        Recordings(one)


def test_what_validates_is_not_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write(tmp_path / "train.jsonl", [{"text": "a"}, {"text": "b"}, {"text": "a"}])
    val = write(tmp_path / "val.jsonl", [{"text": "a"}])
    environment = Recordings(train, val)
    assert [task.id for task in environment.tasks("train")] == ["train.jsonl:2"]
    assert "left out 2 training rows" in caplog.text


def test_arrays_and_gzipped_files_are_read_too(tmp_path: Path) -> None:
    rows = [{"messages": [ASKED, ANSWERED]}, {"text": "more"}]
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(rows), encoding="utf-8")
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(array.read_bytes()))
    for file in (array, packed):
        environment = Recordings(val=file)
        assert [task.recording for task in environment.tasks("val")] == list(
            map(recording_of, rows)
        )


def test_tables_are_read_with_their_empty_cells(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calling = {"role": "assistant", "tool_calls": [call('{"where": "x"}')]}
    rows = [{"messages": [ASKED, calling]}, {"messages": [ASKED, ANSWERED]}]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    first, second = (task.recording for task in Recordings(val=file).tasks("val"))
    assert second == TaskRecording([ASKED, ANSWERED]) and first == recording_of(rows[0])


def test_people_see_the_prompt_and_the_answer(tmp_path: Path) -> None:
    rows = [
        {"messages": [ASKED, ANSWERED, ASKED, {"role": "assistant", "content": "C."}]},
        {"prompt": "A?", "completion": "B."},
        {"messages": [ASKED]},
    ]
    tasks = Recordings(val=write(tmp_path / "rows.jsonl", rows)).tasks("val")
    shown = [(task.prompt, task.answer) for task in tasks]
    assert shown == [([ASKED], "C."), ("A?", "B."), ([ASKED], None)]


def test_without_a_file_and_with_an_engine_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data FILE"):
        Recordings()
    environment = Recordings(val=write(tmp_path / "rows.jsonl", [{"text": "a"}]))
    with pytest.raises(ConfigError, match=r"rollout\.engine=recorded"):
        environment.step(Episode(environment.tasks("val")[0]), "said")
