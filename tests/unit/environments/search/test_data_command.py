"""Claims about `rlflow search data`: it says what a file is, and what it writes is the same data."""

from __future__ import annotations

import json

import pytest

from rlflow_environments.retrieval.corpus import Corpus, write_rows
from rlflow_environments.search.__main__ import main
from rlflow_environments.search.questions import read_tasks

BASE = [
    {"question": "Who?", "answer": ["Ann", "Ann Lee"], "source": "s", "qid": "q1"},
    {"question": "Where ?", "answer": ["x"], "qid": "q2", "aug_answer": ["y"]},
]
MESSAGES = [{"role": "user", "content": "who?"}]
RLINF = [{"prompt": "templated: who?", "solutions": "Ann"}, {"prompt": MESSAGES, "solutions": ["Bob"]}]
SEARCH_R1 = [
    {"id": "test_0", "data_source": name, "prompt": MESSAGES, "reward_model": {"ground_truth": {"target": ["Ann"]}}}
    for name in ("nq", "searchR1_musique")
]


@pytest.mark.parametrize("rows", [BASE, RLINF, SEARCH_R1], ids=["asearcher", "rlinf", "searchr1"])
def test_what_is_written_gives_the_same_tasks(tmp_path, rows, capsys):
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert main(["data", str(source), "--out", str(tmp_path / "out.jsonl")]) == 0
    assert "2 questions" in capsys.readouterr().out
    before, after = (read_tasks(path, "val", "short") for path in (source, tmp_path / "out.jsonl"))
    assert [(task.id, task.prompt, task.answer) for task in after] == [(task.id, task.prompt, task.answer) for task in before]
    assert [task.metadata for task in after] == [task.metadata for task in before]


def test_a_corpus_loses_its_bad_rows_only_when_that_is_allowed(tmp_path, capsys):
    lines = ['{"title": "A", "text": "x"}', "{broken", '{"id": "k", "contents": "B\\ny"}', '{"id": 3}']
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    arguments = ["data", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "clean.jsonl")]
    assert main(arguments) == 2
    assert "2 of 4 rows of the corpus are bad: line 2: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "clean.jsonl").exists()
    assert main([*arguments, "--skip-bad-rows"]) == 0
    assert "a corpus of 2 passages" in capsys.readouterr().out
    assert [(passage.id, passage.contents) for passage in Corpus(tmp_path / "clean.jsonl")] == [("0", '"A"\nx'), ("k", "B\ny")]


def test_sets_of_a_folder_are_counted(tmp_path, capsys):
    for name, count in (("nq", 2), ("bamboogle", 1)):
        write_rows(tmp_path / f"{name}.jsonl", [{"question": f"{i}?", "golden_answers": ["x"]} for i in range(count)])
    assert main(["data", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "3 questions" in shown and "sets: nq 2, bamboogle 1" in shown
    assert json.loads(shown.split("first: ")[1])["set"] == "nq"
