"""Half a surrogate pair, as a cut emoji leaves it, passes through every reader and writer of text from outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.net.http import Reply
from rlflow.storage.files import read_json, write_json, write_text
from rlflow_environments.common.jsonl import BadRow, parse_object
from rlflow_environments.common.text import load_json, well_formed
from rlflow_environments.retrieval.client.answers import read_passages
from rlflow_environments.retrieval.corpus import Corpus, write_rows
from rlflow_environments.search.protocols import make_protocol

HALF = "a\ud83d b"
WHOLE = "a\ufffd b"


def test_only_what_is_broken_is_replaced() -> None:
    assert well_formed(HALF) == WHOLE
    for text in ("", "plain", "\u00e9\u2603", "\U0001f600"):
        assert well_formed(text) is text


def test_json_is_read_as_text_that_can_be_written() -> None:
    assert load_json(b'{"a\\uD83d": ["\\ud83d", "\\ud83d\\ude00", 1]}') == {
        "a\ufffd": ["\ufffd", "\U0001f600", 1]
    }


def test_files_keep_half_a_pair_as_json_does(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"text": HALF})
    assert read_json(tmp_path / "a.json") == {"text": HALF}
    write_text(tmp_path / "a.txt", HALF)
    corpus = write_rows(tmp_path / "corpus.jsonl", [{"id": "0", "contents": HALF}])
    assert Corpus(corpus)[0].contents == WHOLE


def test_an_answer_of_a_server_is_text_that_can_be_written() -> None:
    body = json.dumps(
        {"result": [[{"document": {"id": "0", "contents": HALF}, "score": 1.0}]]}
    ).encode()
    assert read_passages("http://x", Reply(200, {}, body), 1, 1)[0][0].contents == WHOLE


def test_a_tool_call_asks_for_text_that_can_be_written() -> None:
    call = json.dumps({"name": "search", "arguments": {"query_list": [HALF]}})
    reading = make_protocol("native").read(f"<tool_call>{call}</tool_call>", (), False)
    assert reading.calls[0].inputs == (WHOLE,)


@pytest.mark.parametrize("row", [b'{"id": ' + b"1" * 5000 + b"}", b"[" * 200_000])
def test_a_hostile_row_is_a_bad_row(row: bytes) -> None:
    with pytest.raises(BadRow, match="can be read"):
        parse_object(row)
