"""Claims about recipes/searchr1/build_qdrant.sh: a collection in a Qdrant server."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from rlflow_environments.retrieval.commands import build
from tests.unit.environments.retrieval.search_servers import write_corpus
from tests.unit.recipes.test_launch_server import FAKE_PYTHON

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, *arguments: str, python: Path = Path(sys.executable), **variables: str):
    environment = {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **variables,
    }
    environment.pop("RLFLOW_VENV", None)  # the Python that is asked for here is to be used
    command = ["bash", str(ROOT / "recipes" / "searchr1" / "build_qdrant.sh"), *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_a_server_is_taken_from_the_flags_or_the_environment(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON.replace("{root}", str(ROOT)))
    python.chmod(0o755)
    corpus, log = str(write_corpus(tmp_path)), tmp_path / "log"

    def parsed(*arguments: str, **variables: str) -> argparse.Namespace:
        done = run(
            tmp_path,
            "--corpus_path",
            corpus,
            *arguments,
            python=python,
            FAKE_LOG=str(log),
            **variables,
        )
        assert done.returncode == 0, done.stderr
        _, *rest = log.read_text().splitlines()
        assert rest[:3] == ["-m", "rlflow_environments.retrieval", "build"]
        parser = argparse.ArgumentParser()
        build.add_arguments(parser)
        return parser.parse_args(rest[3:])

    args = parsed(
        "--retriever_name",
        "E5",
        "--device",
        "cpu",
        QDRANT_URL="http://h:1",
        RETRIEVER_PATH="models/x",
    )
    assert (args.url, args.collection, args.out) == (
        "http://h:1",
        "wiki_collection_m32_cef512",
        None,
    )
    assert (args.corpus, args.index, args.encoder, args.family) == (
        corpus,
        "qdrant",
        "models/x",
        "e5",
    )
    args = parsed(
        "--qdrant_url",
        "http://g:2",
        "--qdrant_collection_name",
        "own",
        "--batch",
        "7",
        QDRANT_URL="http://h:1",
    )
    assert (args.url, args.collection, args.encoder, args.batch) == (
        "http://g:2",
        "own",
        "intfloat/e5-base-v2",
        7,
    )


def test_help_and_a_missing_corpus(tmp_path):
    assert "--qdrant_collection_name NAME" in run(tmp_path, "--help").stdout
    done = run(tmp_path)
    assert done.returncode == 2 and "expected --corpus_path FILE" in done.stderr
