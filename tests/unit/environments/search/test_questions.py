"""Claims about the questions of the field's releases: each layout, each container, the seven evaluation sets."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.corpus import write_rows
from rlflow_environments.search.questions import EVALUATION_SETS, ROW_FORMATS, find_sets, read_tasks

PROMPT = [{"role": "user", "content": "Answer the question: who wrote it?"}]
SEARCH_R1 = {
    "id": "train_0", "question": "who wrote it?", "golden_answers": ["Ann Lee"], "data_source": "nq", "prompt": PROMPT,
    "ability": "fact-reasoning", "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann Lee", "A. Lee"]}},
    "extra_info": {"split": "train", "index": 0},
}  # fmt: skip
SKYRL = {"data_source": "searchR1_hotpotqa", "env_class": "search", "prompt": PROMPT,
         "reward_spec": {"method": "rule", "ground_truth": {"target": ["Ann Lee"]}}, "extra_info": {"index": 4}}  # fmt: skip
BASE = {
    "question": "Who?",
    "answer": ["Ann Lee"],
    "source": "compose_chain_qa",
    "aug_answer": ["A. Lee"],
    "qid": "q-9",
}
LRM = {"question": "Who?", "answer": "Ann Lee", "source": "lrm", "id": "x-3", "idx": 7}
FLASHRAG = {
    "id": "test_5",
    "question": "Who?",
    "golden_answers": ["Ann Lee"],
    "metadata": {"type": "bridge"},
}
RLINF = {"prompt": "already templated: who?\n", "solutions": "Ann Lee"}


def write_parquet(path: Path, rows: list[dict]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("row", "task_id", "golds", "prompt"),
    [
        (SEARCH_R1, "nq-train_0", ["Ann Lee", "A. Lee"], PROMPT),
        (SKYRL, "hotpotqa-4", ["Ann Lee"], PROMPT),
        (BASE, "q-9", ["Ann Lee"], "Question: Who?\n"),
        (LRM, "7", ["Ann Lee"], "Question: Who?\n"),
        (FLASHRAG, "test_5", ["Ann Lee"], "Question: Who?\n"),
        (RLINF, "train-0", ["Ann Lee"], "already templated: who?\n"),
        ({"question": "Who?", "answers": ["Ann Lee"]}, "train-0", ["Ann Lee"], "Question: Who?\n"),
        (
            {"question": "Who?", "answers": [1969.0, float("nan"), 2.5, 3]},
            "train-0",
            ["1969", "2.5", "3"],
            "Question: Who?\n",
        ),
    ],
    ids=[
        "searchr1",
        "skyrl",
        "asearcher-base",
        "asearcher-lrm",
        "flashrag",
        "rlinf",
        "plain",
        "numbers",
    ],
)
def test_every_release_is_recognised_by_its_rows(tmp_path, row, task_id, golds, prompt):
    (task,) = read_tasks(write_rows(tmp_path / "anything.txt", [row]), "train", "short")
    assert (task.id, task.answer, task.prompt) == (task_id, golds, prompt)


def test_what_a_scorer_may_want_stays_in_the_metadata(tmp_path):
    (task,) = read_tasks(write_rows(tmp_path / "t.jsonl", [BASE]), "train")
    assert (
        task.metadata["aug_answer"] == ["A. Lee"] and task.metadata["source"] == "compose_chain_qa"
    )
    (task,) = read_tasks(write_rows(tmp_path / "t.jsonl", [FLASHRAG]), "train")
    assert task.metadata["metadata"] == {"type": "bridge"}


def test_parquet_a_json_array_and_gzip_hold_the_same_tasks_as_lines(tmp_path):
    rows = [SEARCH_R1, {**SEARCH_R1, "id": "train_1", "data_source": "hotpotqa"}]
    lines = read_tasks(write_rows(tmp_path / "rows.jsonl", rows), "train")
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "rows.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    assert read_tasks(write_parquet(tmp_path / "no_suffix", rows), "train") == lines
    assert read_tasks(tmp_path / "rows.json", "train") == lines
    assert read_tasks(tmp_path / "rows.gz", "train") == lines
    assert [task.metadata["set"] for task in lines] == ["nq", "hotpotqa"]


def test_a_bad_parquet_row_is_named_by_its_number(tmp_path):
    rows = [{"question": "Who?", "golden_answers": golds} for golds in (["x"], [], ["y"], None)]
    with pytest.raises(
        DataError, match=r"2 of 4 rows .* row 2: no gold answer .* row 4: no gold answer"
    ):
        read_tasks(write_parquet(tmp_path / "test.parquet", rows), "val")


def test_damaged_files_are_one_clear_error(tmp_path):
    whole = write_parquet(tmp_path / "test.parquet", [SEARCH_R1]).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"cut\.parquet: expected the val questions as parquet, found"
    ):
        read_tasks(tmp_path / "cut.parquet", "val")
    (tmp_path / "cut.gz").write_bytes(
        gzip.compress(b'{"question": "Who?", "answer": "x"}\n' * 9)[:-9]
    )
    with pytest.raises(
        DataError, match=r"cut\.gz: expected the val questions as gzipped JSON Lines"
    ):
        read_tasks(tmp_path / "cut.gz", "val")


def test_records_end_at_a_newline_only(tmp_path):
    text = "who\u2028wrote\u0085it\u2029?\x0b"
    (tmp_path / "t.jsonl").write_bytes(
        b"\n"
        + json.dumps({"question": text, "answer": "x"}, ensure_ascii=False).encode()
        + b"\r\n  \n\n"
    )
    (task,) = read_tasks(tmp_path / "t.jsonl", "train", "{question}")
    assert task.prompt == text.strip()


def test_an_unknown_layout_lists_what_was_looked_for_and_what_is_there(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{"query": "Who?", "gold": ["x"]}])
    with pytest.raises(DataError) as raised:
        read_tasks(path, "train")
    message = str(raised.value)
    assert (
        all(name in message for name in ROW_FORMATS)
        and "solutions" in message
        and "golden_answers" in message
    )
    assert "query (text), gold (a list)" in message and "\n" not in message


def test_bad_rows_are_skipped_only_when_allowed_and_then_counted(tmp_path, caplog):
    path = write_rows(
        tmp_path / "t.jsonl", [RLINF, {"prompt": "no gold"}, RLINF, {"solutions": "no prompt"}]
    )
    with pytest.raises(DataError, match="2 of 4 rows"):
        read_tasks({"path": path}, "train")
    with caplog.at_level(logging.WARNING):
        tasks = read_tasks({"path": path, "skip_bad_rows": True}, "train")
    assert [task.id for task in tasks] == ["train-0", "train-2"]
    assert (
        "2 of 4 rows" in caplog.text
        and "line 2: no gold answer" in caplog.text
        and "line 4" in caplog.text
    )
    only_bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "x", "solutions": ""}])
    with pytest.raises(DataError, match="1 bad ones only"):
        read_tasks({"path": only_bad, "skip_bad_rows": True}, "train")


def test_options_are_checked_by_name(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [RLINF])
    with pytest.raises(ConfigError, match="Did you mean 'skip_bad_rows'"):
        read_tasks({"path": path, "skip_bad_row": True}, "train")
    with pytest.raises(ConfigError, match="Did you mean 'flashrag'"):
        read_tasks({"path": path, "layout": "flashrack"}, "train")
    with pytest.raises(ConfigError, match=r"environment\.val: expected the path"):
        read_tasks({"first": 3}, "val")


def test_a_layout_that_is_named_is_the_one_that_counts(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [{**SEARCH_R1, "solutions": ["from solutions"]}])
    assert read_tasks(path, "train")[0].answer == ["Ann Lee", "A. Lee"]
    assert read_tasks({"path": path, "layout": "rlinf"}, "train")[0].answer == ["from solutions"]


def test_prompts_are_made_again_where_that_is_asked_for(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", [SEARCH_R1])
    assert read_tasks(path, "train", "short")[0].prompt == PROMPT
    (task,) = read_tasks({"path": path, "rewrite_prompts": True}, "train", "short")
    assert task.prompt == "Question: who wrote it?\n"
    with pytest.raises(DataError, match="'question': expected text, found nothing"):
        read_tasks(
            {"path": write_rows(tmp_path / "r.jsonl", [RLINF]), "rewrite_prompts": True}, "train"
        )


def test_unanswerable_rows_of_asearcher_are_pointed_out_and_can_be_left_out(tmp_path, caplog):
    path = write_rows(
        tmp_path / "t.jsonl", [BASE, {**BASE, "source": "compose_chain_qa_invalid", "qid": "q-10"}]
    )
    with caplog.at_level(logging.WARNING):
        assert len(read_tasks(path, "train")) == 2
    assert "1 of 2 questions have the source compose_chain_qa_invalid" in caplog.text
    tasks = read_tasks({"path": path, "skip_sources": ["compose_chain_qa_invalid"]}, "train")
    assert [task.id for task in tasks] == ["q-9"]


FLASHRAG_FOLDERS = {
    "nq/test.jsonl": "nq", "nq/train.jsonl": "", "triviaqa/test.jsonl": "triviaqa", "popqa/test.jsonl": "popqa",
    "hotpotqa/dev.jsonl": "hotpotqa", "hotpotqa/train.jsonl": "", "2wikimultihopqa/dev.jsonl": "2wikimultihopqa",
    "musique/dev.jsonl": "musique", "bamboogle/test.jsonl": "bamboogle",
}  # fmt: skip
ASEARCHER_FOLDERS = {
    "NQ_rand1000/test.jsonl": "nq", "TriviaQA_rand1000/test.jsonl": "triviaqa", "PopQA_rand1000/test.jsonl": "popqa",
    "HotpotQA_rand1000/test.jsonl": "hotpotqa", "2WikiMultihopQA_rand1000/test.jsonl": "2wikimultihopqa",
    "Musique_rand1000/test.jsonl": "musique", "Bamboogle/test.jsonl": "bamboogle", "GAIA/test.json": "GAIA",
}  # fmt: skip
FLAT_FILES = {f"{name}.jsonl": name for name in EVALUATION_SETS} | {
    "corpus.jsonl": "",
    "notes.txt": "",
}


@pytest.mark.parametrize(
    "files",
    [FLASHRAG_FOLDERS, ASEARCHER_FOLDERS, FLAT_FILES],
    ids=["flashrag", "asearcher", "flat"],
)
def test_the_seven_evaluation_sets_are_found_in_the_folders_of_the_releases(tmp_path, files):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, [{"question": f"{name}?", "answer": "x", "id": "same"}])
    expected = {name: tmp_path / file for file, name in files.items() if name}
    found = find_sets(tmp_path)
    assert found == expected and tuple(found)[:7] == EVALUATION_SETS
    tasks = read_tasks(tmp_path, "val")
    assert [task.metadata["set"] for task in tasks] == list(found)
    assert len({task.id for task in tasks}) == len(found)  # although every row has the id "same"


def test_some_of_the_sets_are_chosen_by_name(tmp_path):
    for name in ("nq", "musique", "bamboogle"):
        write_rows(
            tmp_path / f"{name}.jsonl",
            [{"question": "a?", "answer": "x"}, {"question": "b?", "answer": "x"}],
        )
    tasks = read_tasks({"path": tmp_path, "sets": ["musique", "nq"], "first": 1}, "val")
    assert [task.metadata["set"] for task in tasks] == ["nq", "musique"]
    assert len(read_tasks({"path": tmp_path, "sets": "nq"}, "val")) == 2
    with pytest.raises(ConfigError, match="Did you mean 'musique'"):
        read_tasks({"path": tmp_path, "sets": ["musiqe"]}, "val")
    both = read_tasks([tmp_path / "nq.jsonl", str(tmp_path / "musique.jsonl")], "val")
    assert [task.metadata["set"] for task in both] == ["nq", "nq", "musique", "musique"]


def test_one_file_of_search_r1_holds_all_sets(tmp_path):
    rows = [
        {**SEARCH_R1, "data_source": name, "id": f"test_{index}"}
        for index, name in enumerate(EVALUATION_SETS)
    ]
    write_parquet(tmp_path / "test.parquet", rows)
    for source in (tmp_path / "test.parquet", tmp_path):
        assert tuple(task.metadata["set"] for task in read_tasks(source, "val")) == EVALUATION_SETS


def test_a_folder_without_sets_or_with_one_twice_is_an_error(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"found a directory there without any.*bamboogle"):
        find_sets(tmp_path)
    for name in ("nq", "NQ_rand1000"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "test.jsonl", [FLASHRAG])
    with pytest.raises(DataError, match="the set nq is there twice"):
        find_sets(tmp_path)
