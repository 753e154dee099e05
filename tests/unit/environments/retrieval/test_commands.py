"""Claims about `rlflow search`: a dispatch table whose commands load on use."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys

import pytest

from rlflow.commands import cli
from rlflow.commands.cli import metadata
from rlflow.errors import COMMAND_PLUG_INS, ConfigError
from rlflow_environments.retrieval.commands import source_arguments
from rlflow_environments.retrieval.server.loading import ServedSource
from rlflow_environments.search.__main__ import main
from rlflow_environments.search.commands import COMMANDS
from tests.unit.environments.retrieval.search_servers import search_server, write_corpus

ENTRY = metadata.EntryPoint("search", "rlflow_environments.search.commands:add", COMMAND_PLUG_INS)


@pytest.fixture
def installed(monkeypatch):
    """rlflow's command line with this plug-in, whatever was installed when the environment was made."""
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [ENTRY] if group == COMMAND_PLUG_INS else []
    )


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
    assert all(re.search(rf"\n    {name}\s", shown) for name in COMMANDS)
    code = "import sys; from rlflow_environments.search.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'numpy', 'transformers', 'faiss') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_plug_in_parses_and_runs_a_command(installed, tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Harbour", "text": "boats lie here"}\n')
    assert (
        cli.main(["search", "query", "--corpus", str(corpus), "--retriever", "bm25", "boats"]) == 0
    )
    assert "Harbour" in capsys.readouterr().out


def searched(text: str):
    """(component, corpus) that a command line of `serve` or `query` names."""
    parser = argparse.ArgumentParser()
    source_arguments.add_source_arguments(parser)
    return source_arguments.read_source(parser.parse_args(text.split()))


def test_an_index_folder_says_itself_what_it_is(tmp_path):
    corpus = write_corpus(tmp_path)
    for kind, name in (("bm25", "bm25"), ("Flat", "faiss")):
        folder = tmp_path / kind
        assert main(["build", "--corpus", str(corpus), "--out", str(folder), "--index", kind]) == 0
        assert searched(f"--index {folder}") == ({"name": name, "path": str(folder)}, str(corpus))
    corpus.rename(tmp_path / "elsewhere.jsonl")
    assert searched(f"--index {folder}")[1] is None


def test_what_is_searched_follows_from_the_flags(tmp_path):
    assert searched("--corpus c.jsonl") == ({"name": "dense"}, "c.jsonl")
    assert searched('--corpus c.jsonl --retriever {"name":"bm25","k1":2}') == (
        {"name": "bm25", "k1": 2},
        "c.jsonl",
    )
    assert searched("--retriever_name BM25 --corpus_path c.jsonl") == ({"name": "bm25"}, "c.jsonl")
    named = searched("--retriever_name bm25 --corpus c.jsonl --index indexes/bm25")
    assert named[0] == {"name": "bm25", "path": "indexes/bm25"}  # it is not left aside
    with pytest.raises(ConfigError, match="--retriever: expected a name"):
        searched("--retriever [1]")
    with pytest.raises(ConfigError, match="qdrant_collection_name"):
        searched("--qdrant_url http://h:6333")


def test_queries_are_read_from_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("number5\n\nnumber7 harbour\n"))
    assert (
        main(
            [
                "query",
                "--corpus",
                str(write_corpus(tmp_path)),
                "--retriever",
                "bm25",
                "--top-k",
                "1",
            ]
        )
        == 0
    )
    assert [line for line in capsys.readouterr().out.splitlines() if "1 passages" in line] == [
        "'number5': 1 passages",
        "'number7 harbour': 1 passages",
    ]


def test_a_running_server_is_queried_like_an_index(tmp_path, capsys):
    source = ServedSource({"name": "bm25"}, str(write_corpus(tmp_path)))
    with search_server(source.load) as (url, _):
        assert main(["query", "number5", "--url", url, "--top-k", "2", "--full"]) == 0
    assert "[d5]" in capsys.readouterr().out
    assert main(["query", "x", "--url", url]) == 2
    assert "no server is ready" in capsys.readouterr().err
