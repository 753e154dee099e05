"""Claims about the readers and writers of the field's files."""

from __future__ import annotations

import gzip
import json

import pytest

from rlflow.errors import DataError
from rlflow_environments.retrieval.corpus import (
    Corpus,
    Passage,
    check_beginning,
    make_contents,
    write_corpus,
    write_pages,
    write_rows,
)
from rlflow_environments.search.questions import read_tasks
from tests.unit.environments.retrieval.search_corpora import read_pages


def _file(tmp_path, text: str | bytes, name: str = "rows.jsonl"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_corpus_round_trips_every_character(tmp_path):
    awkward = 'line\u2028separator \u0085 next \x0b tab\t quote " back\\slash 北京 \U0001f600\nsecond line\r\nthird'
    passages = [
        Passage(f"p{i}", "Ti\u2029tle", make_contents("Ti\u2029tle", awkward), f"doc://{i}")
        for i in range(3)
    ]
    corpus = Corpus(write_corpus(tmp_path / "corpus.jsonl", passages))
    assert list(corpus) == passages
    assert corpus[-1] == passages[2] and corpus[1:] == passages[1:]
    with pytest.raises(IndexError):
        corpus[3]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"contents": '"Alpha"\nBody.'}, Passage("0", "Alpha", '"Alpha"\nBody.', "doc://0")),
        ({"id": 7, "contents": "Alpha\nBody."}, Passage("7", "Alpha", "Alpha\nBody.", "doc://7")),
        ({"id": "x", "title": "T", "text": "Body."}, Passage("x", "T", '"T"\nBody.', "doc://x")),
        (
            {"id": "x", "title": "T", "contents": "other", "url": "u"},
            Passage("x", "T", "other", "u"),
        ),
    ],
)
def test_both_corpus_schemas_become_one(tmp_path, row, expected):
    assert Corpus(write_rows(tmp_path / "corpus.jsonl", [row]))[0] == expected


@pytest.mark.parametrize(
    ("row", "body"),
    [
        ({"contents": '"Alpha"\nBody.\nMore.'}, "Body.\nMore."),
        ({"title": '"Alpha" ', "contents": "Alpha\nBody."}, "Body."),
        ({"title": "T", "text": "Body."}, "Body."),
        ({"title": ' "T" ', "text": "Body."}, "Body."),
        ({"title": "T", "contents": "First.\nSecond."}, "First.\nSecond."),
        ({"title": "T", "contents": "One line."}, "One line."),
    ],
)
def test_the_body_lacks_the_first_line_only_where_that_is_the_title(tmp_path, row, body):
    assert Corpus(write_rows(tmp_path / "corpus.jsonl", [row]))[0].body == body


def test_records_end_at_a_newline_only_and_blank_lines_are_skipped(tmp_path):
    rows = '\n{"title": "A\u2028B", "text": "x\u0085y"}\r\n   \n\n{"title": "C", "text": "z"}'  # no newline at the end
    corpus = Corpus(_file(tmp_path, rows))
    assert [p.title for p in corpus] == ["A\u2028B", "C"]


def test_a_byte_order_mark_is_no_bad_row(tmp_path):
    assert Corpus(_file(tmp_path, b'\xef\xbb\xbf{"title": "A", "text": "x"}\n'))[0].title == "A"


@pytest.mark.parametrize(
    ("value", "golds"),
    [
        ("Paris", ["Paris"]),
        (["Paris", "City of Light"], ["Paris", "City of Light"]),
        (1912, ["1912"]),
        ([None, "x"], ["x"]),
    ],
)
def test_solutions_may_be_one_or_many(tmp_path, value, golds):
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": "Who?", "solutions": value}])
    assert read_tasks(path, "train")[0].answer == golds


@pytest.mark.parametrize("key", ["golden_answers", "answers", "answer"])
def test_gold_answers_are_found_under_the_names_of_the_field(tmp_path, key):
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": "Who?", key: ["Ann"]}])
    task = read_tasks(path, "train")[0]
    assert task.answer == ["Ann"] and key not in task.metadata


def test_a_prompt_is_verbatim_and_a_question_gets_the_template(tmp_path):
    messages = [{"role": "user", "content": "Who?"}]
    rows = [
        {
            "prompt": " as it {stands}\n",
            "question": "ignored",
            "solutions": "x",
            "hops": 2,
            "kind": "bridge",
        },
        {"question": "who was {it}?", "solutions": "x", "id": "q9"},
        {"prompt": messages, "solutions": "x"},
    ]
    tasks = read_tasks(write_rows(tmp_path / "val.jsonl", rows), "val", "short")
    assert tasks[0].prompt == " as it {stands}\n"
    assert tasks[0].metadata == {"question": "ignored", "hops": 2, "kind": "bridge"}
    assert tasks[1].prompt == "Question: who was {it}?\n"
    assert tasks[2].prompt == messages
    assert [task.id for task in tasks] == ["val-0", "q9", "val-2"]


def test_task_ids_are_unique_even_where_the_file_repeats_them(tmp_path):
    rows = [{"id": "same", "prompt": str(i), "solutions": "x"} for i in range(3)]
    assert [task.id for task in read_tasks(write_rows(tmp_path / "t.jsonl", rows), "train")] == [
        "same",
        "same@1",
        "same@2",
    ]


def test_task_ids_are_unique_over_many_files_with_equal_rows(tmp_path):
    path = write_rows(
        tmp_path / "t.jsonl", [{"prompt": "p", "solutions": "x", "id": i // 2} for i in range(6)]
    )
    ids = [task.id for task in read_tasks([path] * 5, "train")]
    assert len(set(ids)) == len(ids) == 30 and ids[:3] == ["t-0", "t-0@1", "t-1"]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_half_characters_and_deep_nesting_are_dealt_with_in_arrays_too(tmp_path, name):
    row = '{"question": "who \\ud83d?", "answer": "a"}'
    path = _file(tmp_path, f"[{row}]" if name == "rows.json" else row, name)
    assert "\ufffd" in read_tasks(path, "train")[0].prompt
    with pytest.raises(DataError, match="nested too deeply"):
        read_tasks(_file(tmp_path, "[" * 200_000, name), "train")


def test_all_bad_rows_are_counted_and_named_by_their_line(tmp_path):
    lines = [
        json.dumps({"prompt": "ok", "solutions": "x"}),
        "",
        "{not json}",
        json.dumps({"prompt": "no gold"}),
        json.dumps({"prompt": "empty gold", "solutions": ["", "  "]}),
        json.dumps({"solutions": "no prompt"}),
        json.dumps(["a", "list"]),
    ]
    path = _file(tmp_path, "\n".join(lines))
    with pytest.raises(DataError) as raised:
        read_tasks(path, "train")
    message = str(raised.value)
    assert str(path) in message and "5 of 6 rows" in message
    assert (
        "line 3: not JSON" in message
        and "line 4: no gold answer" in message
        and "and 2 more" in message
    )
    assert "\n" not in message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "solutions": {"target": "x"}}, "an object"),
        ({"prompt": "q", "solutions": True}, "true/false"),
        ({"prompt": [], "solutions": "x"}, "'prompt'"),
        ({"prompt": [{"role": "user"}], "solutions": "x"}, "'prompt'"),
        ({"question": "  ", "solutions": "x"}, "'question'"),
    ],
)
def test_a_bad_question_row_says_what_is_wrong(tmp_path, row, reason):
    with pytest.raises(DataError, match=reason):
        read_tasks(write_rows(tmp_path / "t.jsonl", [row]), "train")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b'{"id": 1}', "no 'contents'"),
        (b'{"contents": 3}', "'contents': expected text, found a number"),
        (b'{"text": "no title"}', "'title'"),
        (b'{"contents": "a", "title": ["x"]}', "'title': expected text, found a list"),
        (b'{"contents": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_passage_says_what_is_wrong(tmp_path, record, reason):
    with pytest.raises(DataError, match=reason):
        Corpus(_file(tmp_path, b'{"contents": "fine"}\n' + record))


@pytest.mark.parametrize("read", [Corpus, lambda path: read_tasks(path, "train")])
def test_a_missing_an_empty_and_a_directory_are_each_one_clear_error(tmp_path, read):
    with pytest.raises(DataError, match=r"nothing there\. Give the path"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="a directory there"):
        read(tmp_path)
    with pytest.raises(DataError, match="empty file"):
        read(_file(tmp_path, "\n \n"))
    with pytest.raises(DataError, match="empty file"):
        read(_file(tmp_path, ""))


def test_rows_without_text_are_rows(tmp_path):
    empty = b'{"contents": ""}\n' * 3
    for read in (Corpus, lambda path: check_beginning(path, 1 << 20)):
        with pytest.raises(DataError, match="1 of 5 rows of the corpus are bad"):
            read(_file(tmp_path, empty + b'{"contents": "fine"}\n{}\n'))
        with pytest.raises(DataError, match="found 3 rows without text"):
            read(_file(tmp_path, empty))


def test_a_gzipped_corpus_is_told_by_name(tmp_path):
    with pytest.raises(DataError, match=r"found gzip\. Unpack it: gunzip"):
        Corpus(_file(tmp_path, gzip.compress(b'{"contents": "x"}\n' * 9), "rows.jsonl.gz"))


def test_pages_round_trip(tmp_path):
    pages = {"u0": "Title\n\ntext\u2028more", "u1": "x"}
    assert read_pages(write_pages(tmp_path / "deep" / "pages.jsonl", pages)) == pages


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"a": 1}])
    with pytest.raises(TypeError):
        write_rows(path, [{"a": object()}])
    assert path.read_text() == '{"a": 1}\n'
