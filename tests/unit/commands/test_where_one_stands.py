"""Nothing in the folder that a command is started in stands in for an installed module, or runs unasked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLANTED = (
    "safetensors",
    "yaml",
    "torch",
    "transformers",
    "faiss",
    "fastapi",
    "argparse",
    "rlflow_environments",
)
SCRIPT = [
    "-c",
    "import sys; del sys.path[0]; from rlflow.commands.cli import main; sys.exit(main())",
]
"""As pip's script for the command begins: the folder of the script in front, which is not where one stands."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Modules under names of installed ones, and a plug-in, each of which tells when it runs."""
    for name in (*PLANTED, "planted", "mine"):
        told = f"with open({str(tmp_path / 'ran')!r}, 'a') as file:\n    file.write('{name} ')\nadd = print\n"
        (tmp_path / f"{name}.py").write_text(told)
    plug_in = tmp_path / "planted-1.dist-info"
    plug_in.mkdir()
    (plug_in / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (plug_in / "entry_points.txt").write_text("[rlflow.commands]\nplanted = planted:add\n")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_what_lies_in_a_downloaded_folder_is_not_imported(folder: Path) -> None:
    asked = [
        sys.executable,
        "-m",
        "rlflow",
        "eval",
        "--model",
        ".",
        "--env",
        "search",
        "--corpus",
        "config.json",
    ]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "ran").exists(), done.stderr


def test_the_retrieval_server_and_its_processes_import_nothing_from_there_either(
    folder: Path,
) -> None:
    (folder / "corpus.jsonl").write_text('{"id": "a", "contents": "a harbour"}\n')
    program = [
        sys.executable,
        "-m",
        "rlflow_environments.retrieval",
        "query",
        "--corpus",
        "corpus.jsonl",
        "--retriever",
        "bm25",
    ]
    (folder / "rlflow_environments.py").unlink()  # of -m itself, before any line of ours runs
    done = subprocess.run(
        [*program, "harbour"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "a harbour" in done.stdout, done.stderr
    assert not (folder / "ran").exists()


def test_the_users_own_module_alone_is_found_where_they_stand_behind_installed_ones(
    folder: Path,
) -> None:
    asked = [sys.executable, *SCRIPT, "env", "check", "mine:Missing"]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=120)
    assert "mine has no 'Missing'" in done.stderr and (folder / "ran").read_text() == "mine ", (
        done.stderr
    )
