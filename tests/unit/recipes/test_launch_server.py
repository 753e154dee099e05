"""The launch scripts turn the flags and variables of the field's scripts into those of `rlflow search serve`.

A stand-in for Python records what it is asked to run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.retrieval.commands import serve
from rlflow_environments.retrieval.commands.source_arguments import read_source

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "recipes" / "searchr1"
FAKE_PYTHON = """#!/bin/bash
case "$*" in
*find_spec*) echo "{root}/rlflow"; echo ;;
*) printf '%s\\n' "$CUDA_VISIBLE_DEVICES" "$@" > "$FAKE_LOG" ;;
esac
"""


@pytest.fixture
def launch(tmp_path):
    """Runs a script with arguments and variables; returns (visible GPUs, arguments of serve), or what it failed with."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON.replace("{root}", str(ROOT)))
    python.chmod(0o755)

    def run(script: str, *arguments: str, **variables: str):
        kept = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        environment = {
            **kept,
            "PATH": f"{python.parent}:/usr/bin:/bin",
            "FAKE_LOG": str(tmp_path / "log"),
            **variables,
        }
        command = ["bash", str(RECIPES / script), *arguments]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            return done
        gpus, *rest = (tmp_path / "log").read_text().splitlines()
        assert rest[:3] == [
            "-m",
            "rlflow_environments.retrieval",
            "build" if script == "build_index.sh" else "serve",
        ]
        return gpus, rest[3:]

    return run


def parsed(arguments: list[str]):
    import argparse

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(arguments)


def wiki(folder: Path) -> Path:
    for name in ("e5.index/e5_Flat.index", "wiki_corpus.jsonl", "wiki_webpages.jsonl"):
        path = folder / "data" / "wiki2018" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return folder / "data" / "wiki2018"


def test_the_flags_of_the_faiss_servers(launch):
    given = [
        "--index_path",
        "e5.index",
        "--corpus_path",
        "c.jsonl",
        "--pages_path",
        "p.jsonl",
        "--retriever_name",
        "e5",
    ]
    gpus, arguments = launch(
        "launch_server.sh", *given, "--retriever_model", "models/e5", "--faiss_gpu", "--topk", "5"
    )
    args = parsed(arguments)
    assert (gpus, args.topk, args.port, args.host, args.pages) == (
        "",
        5,
        8000,
        "127.0.0.1",
        "p.jsonl",
    )
    encoder = {"name": "models/e5", "family": "e5"}
    assert read_source(args) == (
        {"name": "faiss", "path": "e5.index", "encoder": encoder, "gpu": True},
        "c.jsonl",
    )


def test_an_index_that_is_not_there_is_no_missing_corpus(tmp_path):
    with pytest.raises(ConfigError, match=r"--index: .*absent: nothing there; expected a folder"):
        read_source(parsed(["--index", str(tmp_path / "absent")]))


def test_astraflows_variables_and_data_folder(launch, tmp_path):
    data = wiki(tmp_path)
    variables = {"PORT": "7001", "RETRIEVER_PATH": "m", "TOPK": "4", "RAG_SERVER_ADDR_DIR": "addr"}
    gpus, arguments = launch("launch_server.sh", "2,3", DATA_DIR=str(data), **variables)
    args = parsed(arguments)
    assert (gpus, args.port, args.topk, args.save_address_to, args.faiss_gpu) == (
        "2,3",
        7001,
        4,
        "addr",
        True,
    )
    assert (args.index, args.corpus, args.pages) == tuple(
        str(data / name)
        for name in ("e5.index/e5_Flat.index", "wiki_corpus.jsonl", "wiki_webpages.jsonl")
    )
    assert not parsed(
        launch("launch_server.sh", "2", DATA_DIR=str(data), USE_FAISS_GPU="0")[1]
    ).faiss_gpu


def test_astraflows_form_listens_at_its_port_and_the_others_at_theirs(launch, tmp_path):
    wiki(tmp_path)
    assert parsed(launch("launch_server.sh", "6,7")[1]).port == 7000
    assert parsed(launch("launch_server.sh", "6,7", PORT="7001")[1]).port == 7001
    assert parsed(launch("launch_server.sh")[1]).port == 8000


@pytest.mark.parametrize(
    "variables", [{}, {"WIKI2018_WORK_DIR": "elsewhere"}], ids=["default", "WIKI2018_WORK_DIR"]
)
def test_what_build_index_builds_is_what_launch_server_serves(launch, tmp_path, variables):
    data = Path(variables.get("WIKI2018_WORK_DIR", "data/wiki2018"))
    (tmp_path / data).mkdir(parents=True)
    failed = launch("build_index.sh", **variables)
    assert failed.returncode == 2 and f"{data}/wiki_corpus.jsonl: no such file" in failed.stderr
    (tmp_path / data / "wiki_corpus.jsonl").write_text("x")
    built = launch("build_index.sh", "--use_fp16", "--device", "cpu", **variables)[1]
    assert built[built.index("--corpus") + 1] == f"{data}/wiki_corpus.jsonl"
    folder = Path(built[built.index("--out") + 1])
    assert folder == tmp_path / data / "e5.index" / "e5_Flat"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    args = parsed(launch("launch_server.sh", **variables)[1])
    assert (args.index, args.corpus) == (
        f"{data}/e5.index/e5_Flat",
        None,
    )  # a folder knows its corpus
    (folder.parent / "e5_Flat.index").write_text("x")
    args = parsed(launch("launch_server.sh", **variables)[1])
    assert (args.index, args.corpus) == (
        f"{data}/e5.index/e5_Flat.index",
        f"{data}/wiki_corpus.jsonl",
    )


def test_an_index_of_a_named_corpus_is_found_where_it_was_built(launch, tmp_path):
    (tmp_path / "c.jsonl").write_text("x")
    built = launch("build_index.sh", "--corpus_path", "c.jsonl", "--device", "cpu")[1]
    folder = Path(built[built.index("--out") + 1])
    assert folder == tmp_path / "indexes" / "e5_Flat"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    assert parsed(launch("launch_server.sh")[1]).index == "indexes/e5_Flat"


def test_asearchers_port_and_address_folder(launch, tmp_path):
    wiki(tmp_path)
    args = parsed(launch("launch_server.sh", "5005", "addresses", "--host", "0.0.0.0")[1])
    assert (args.port, args.save_address_to, args.host, args.faiss_gpu) == (
        5005,
        "addresses",
        "0.0.0.0",
        False,
    )


def test_a_missing_file_is_named(launch, tmp_path):
    failed = launch("launch_server.sh")
    assert failed.returncode == 2 and "data/wiki2018/e5.index/e5_Flat.index" in failed.stderr
    args = parsed(
        launch("launch_server.sh", "--retriever_name", "bm25", "--corpus_path", "c.jsonl")[1]
    )
    assert read_source(args) == ({"name": "bm25"}, "c.jsonl")


def test_the_flags_of_the_qdrant_server(launch):
    component, corpus = read_source(parsed(launch("launch_server_qdrant.sh")[1]))
    assert corpus is None and component == {
        "name": "qdrant",
        "url": "http://localhost:6333",
        "collection": "wiki_collection_m32_cef512",
        "encoder": {"name": "intfloat/e5-base-v2"},
        "hnsw_ef": 256,
    }
    given = [
        "--qdrant_search_param",
        '{"exact": true}',
        "--qdrant_search_quant_param",
        '{"rescore": true}',
    ]
    component, _ = read_source(
        parsed(launch("launch_server_qdrant.sh", *given, QDRANT_URL="http://q:6333", TOPK="9")[1])
    )
    assert component["url"] == "http://q:6333"
    assert (component["exact"], component["quantization"], "hnsw_ef" in component) == (
        True,
        {"rescore": True},
        False,
    )
    with pytest.raises(ConfigError, match="Did you mean 'hnsw_ef'"):
        read_source(
            parsed(launch("launch_server_qdrant.sh", "--qdrant_search_param", '{"hsnw_ef": 1}')[1])
        )


@pytest.mark.parametrize("script", ["launch_server.sh", "launch_server_qdrant.sh"])
def test_help_is_there(script):
    done = subprocess.run(["bash", str(RECIPES / script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--topk" in done.stdout
