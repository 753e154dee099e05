"""Claims about `rlflow search`: a dispatch table whose commands load on use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlflow import cli
from rlflow.cli import metadata
from rlflow_environments.search.commands import COMMANDS

ENTRY = metadata.EntryPoint("search", "rlflow_environments.search.commands:add", cli.PLUGINS)


@pytest.fixture
def installed(monkeypatch):
    """rlflow's command line with this plug-in, whatever was installed when the environment was made."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: [ENTRY] if group == cli.PLUGINS else [])


def test_help_lists_every_command_without_importing_one(installed, capsys):
    for arguments in (["search", "--help"], ["--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.parse(arguments)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "search" in shown
    with pytest.raises(SystemExit):
        cli.parse(["search", "--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in COMMANDS)
    code = "import sys; from rlflow_environments.search.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'numpy', 'transformers', 'faiss') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_plug_in_parses_and_runs_a_command(installed, tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Harbour", "text": "boats lie here"}\n')
    assert cli.main(["search", "query", "--corpus", str(corpus), "--retriever", "bm25", "boats"]) == 0
    assert "Harbour" in capsys.readouterr().out
