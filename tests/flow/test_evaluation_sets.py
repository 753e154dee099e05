"""`rlflow eval --data FOLDER` scores every evaluation set in the folder, and their mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.commands.cli import main
from rlflow_environments.retrieval.corpus import write_rows

POLICY = Path(__file__).resolve().parents[2] / "recipes" / "searchr1" / "starting_policy"


def test_sets_of_a_folder_are_scored_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = tmp_path / "sets"
    for name, count in (("Bamboogle/test", 1), ("NQ_rand1000/test", 3)):
        (sets / name).parent.mkdir(parents=True)
        rows = [
            {"question": f"Where was Dalvund {i} born?", "answer": ["Nusk"], "id": i}
            for i in range(count)
        ]
        write_rows(sets / f"{name}.jsonl", rows)
    write_rows(
        tmp_path / "corpus.jsonl", [{"title": "Dalvund", "text": "Dalvund was born in Nusk."}]
    )
    corpus, out = str(tmp_path / "corpus.jsonl"), str(tmp_path / "out")
    options = [
        "--env",
        "search",
        "--model",
        str(POLICY),
        "--data",
        str(sets),
        "--corpus",
        corpus,
        "--out",
        out,
    ]
    overrides = [
        "environment.retriever=bm25",
        "environment.prompt_template=short",
        "rollout.max_response_tokens=16",
    ]
    assert main(["eval", *options, *overrides]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {name: scores["eval/questions"] for name, scores in summary["sets"].items()} == {
        "nq": 3,
        "bamboogle": 1,
    }
    scores = [scores["eval/exact_match"] for scores in summary["sets"].values()]
    assert summary["exact_match_mean_over_sets"] == pytest.approx(sum(scores) / 2)
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == ["nq", "bamboogle", "mean over sets", "all tasks"]
