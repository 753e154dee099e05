"""The commands of docs/own_documents.md run as they are printed, in order; only the sizes are smaller."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import string
import sys
from pathlib import Path

import pytest

from rlflow.commands import cli
from rlflow.commands.cli import metadata
from rlflow.errors import COMMAND_PLUG_INS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "own_documents.md").read_text(encoding="utf-8")
SIZES = re.search(r"<!-- test: sizes -->\n```bash\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = re.findall(r"<!-- test -->\n```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    metadata.EntryPoint("search", "rlflow_environments.search.commands:add", COMMAND_PLUG_INS),
    metadata.EntryPoint("show", "rlflow_tools.view.commands.show:add", COMMAND_PLUG_INS),
]


def printed_commands(sizes: dict[str, str]) -> list[list[str]]:
    """The page's commands as words, with these sizes for its variables."""
    assert SIZES and dict(pair.split("=") for pair in SIZES[1].split()).keys() == sizes.keys()
    lines = "\n".join(BLOCKS).replace("\\\n", " ").splitlines()
    return [
        shlex.split(string.Template(line).substitute(sizes), comments=True)
        for line in lines
        if line.strip()
    ]


def run_page(folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, str]) -> None:
    """Runs the commands in this process, in a folder from which the repository's files are seen where they lie."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(folder)
    installed = metadata.entry_points
    monkeypatch.setattr(
        metadata,
        "entry_points",
        lambda group: COMMANDS if group == COMMAND_PLUG_INS else installed(group=group),
    )
    for program, *arguments in printed_commands(sizes):
        if program == "rlflow":
            assert cli.main(arguments) == 0, arguments
        else:
            assert program == "python"
            monkeypatch.setattr(sys, "argv", arguments)
            runpy.run_path(arguments[0], run_name="__main__")


def test_the_page_goes_from_documents_to_an_evaluation() -> None:
    words = printed_commands(
        {"articles": "1", "train": "1", "val": "1", "steps": "1", "prompts": "1"}
    )
    actions = [command[2] if command[1] == "search" else command[1] for command in words]
    assert actions == [
        "recipes/searchr1/example_documents.py",
        "qa",
        "build",
        "query",
        "eval",
        "train",
        "eval",
        "show",
    ]


def exact_match(folder: Path, run: str) -> float:
    return json.loads((folder / "runs" / run / "summary.json").read_text())["eval/exact_match"]


@pytest.mark.slow
def test_the_page_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(
        tmp_path,
        monkeypatch,
        {"articles": "0.1", "train": "24", "val": "6", "steps": "1", "prompts": "2"},
    )
    metrics = [
        json.loads(line)
        for line in (tmp_path / "runs" / "own-documents" / "metrics.jsonl").read_text().splitlines()
    ]
    assert any("train/gradient_norm" in row for row in metrics)
    assert (
        0 <= exact_match(tmp_path, "own-before") <= 1
        and 0 <= exact_match(tmp_path, "own-after") <= 1
    )
    assert "6 questions" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_small_version_of_the_page_learns_to_answer_about_unseen_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's own sizes give 0.35 -> 0.78 in 40 steps, and 0.73 after 10."""
    run_page(
        tmp_path,
        monkeypatch,
        {"articles": "0.5", "train": "600", "val": "100", "steps": "10", "prompts": "16"},
    )
    assert exact_match(tmp_path, "own-after") > exact_match(tmp_path, "own-before") + 0.15
