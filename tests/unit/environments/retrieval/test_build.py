"""Claims about building indices: a folder serves what it was built from, a killed build goes on, a wrong folder is one error."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval import building
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.corpus import Corpus, Passage, write_corpus, write_rows
from rlflow_environments.retrieval.encoders import NgramEncoder
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.folder import read_meta
from rlflow_environments.search.__main__ import main
from tests.unit.environments.retrieval.search_corpora import passages

PASSAGES = passages(500)
QUERIES = [passage.title for passage in PASSAGES[:40]] + ["", "zzz"]
ENCODER = {"name": "hashed", "dimensions": 64}
OPTIONS = {"dimensions": 64}
KINDS = {
    # kind of the folder -> retriever that serves it, the same retriever built in memory
    "Flat": ({"name": "faiss"}, {"name": "dense", **OPTIONS}),
    "SQ8": ({"name": "faiss"}, {"name": "faiss", "index": "SQ8", **OPTIONS}),
    "IVF8,SQ8": (
        {"name": "faiss", "nprobe": 4},
        {"name": "faiss", "index": "IVF8,SQ8", "nprobe": 4, **OPTIONS},
    ),
    "bm25": ({"name": "bm25"}, {"name": "bm25"}),
}


def silent(stage, done, total):
    pass


@pytest.fixture
def small_blocks(monkeypatch):
    from rlflow_environments.retrieval.indices import dense

    for module in (building, dense):
        monkeypatch.setattr(module, "BLOCK", 64)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_serves_what_an_index_in_memory_serves(kind, corpus, tmp_path):
    served, in_memory = KINDS[kind]
    meta = build_index(corpus, tmp_path / "index", BuildRequest(kind, ENCODER), silent)
    assert read_meta(tmp_path / "index") == meta and meta.count == len(PASSAGES)
    found = make_retriever({**served, "path": str(tmp_path / "index")}, corpus).search(QUERIES, 5)
    assert found == make_retriever(in_memory, corpus).search(QUERIES, 5)


def test_the_streamed_flat_file_is_the_one_that_faiss_writes(corpus, tmp_path):
    import faiss

    build_index(corpus, tmp_path, BuildRequest("Flat", ENCODER), silent)
    vectors = NgramEncoder(corpus, dimensions=64).encode_passages(corpus[:])
    index = faiss.IndexFlatIP(64)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "by_faiss"))
    assert (tmp_path / "index.faiss").read_bytes() == (tmp_path / "by_faiss").read_bytes()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("kind", ["Flat", "IVF8,SQ8"])
def test_a_build_goes_on_wherever_it_was_stopped(kind, corpus, tmp_path, small_blocks):
    """Stopped at its first report, then at its second, and so on; the folder becomes the same, byte for byte."""
    request = BuildRequest(kind, ENCODER)
    build_index(corpus, tmp_path / "straight", request, silent)
    encoded: list[int] = []
    for stop in range(1, 100):
        calls = 0

        def report(stage, done, total, stop=stop):
            nonlocal calls
            calls += 1
            if stage == "encoding":
                encoded.append(done)
            if calls >= stop:
                raise Stopped

        try:
            build_index(corpus, tmp_path / "stopped", request, report)
            break
        except Stopped:
            pass
    assert stop > 3 and encoded == sorted(encoded), "it went on and never began anew"
    assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")


def test_kill_9_in_the_middle_loses_one_block_at_most(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(5000))
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    arguments = ["build", "--corpus", str(corpus), "--set", "dimensions=1024"]
    command = [
        sys.executable,
        "-m",
        "rlflow_environments.retrieval",
        *arguments,
        "--out",
        str(folder),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    progress = folder / "progress.json"
    while process.poll() is None and not (
        progress.is_file() and json.loads(progress.read_text())["encoded"]
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    encoded = json.loads(progress.read_text())["encoded"]
    assert 0 < encoded < 5000 and not (folder / "meta.json").exists()
    written = (folder / "vectors.partial").read_bytes()[: 45 + encoded * 4096]
    capsys.readouterr()
    assert main([*arguments, "--out", str(folder)]) == 0
    assert f"encoding: {encoded:,} of 5,000" in capsys.readouterr().err
    assert main([*arguments, "--out", str(straight)]) == 0
    assert contents(folder) == contents(straight)
    assert (folder / "index.faiss").read_bytes().startswith(written)


def test_a_stage_that_was_done_is_found_after_a_stop_between_renaming_and_the_end(corpus, tmp_path):
    folder = tmp_path / "index"
    build_index(corpus, folder, BuildRequest("Flat", ENCODER), silent)
    before = contents(folder)
    meta = json.loads((folder / "meta.json").read_text())
    meta.pop("crc32")  # as one of an earlier version
    (folder / "meta.json").unlink()
    meta["files"] = None  # it is stamped last of all
    wanted = {**meta, "corpus": meta["corpus"]["sha256"], "encoder": meta["encoder"]["sha256"]}
    (folder / "progress.json").write_text(json.dumps({"wanted": wanted, "encoded": len(corpus)}))
    build_index(corpus, folder, BuildRequest("Flat", ENCODER), silent)
    assert contents(folder) == before


def test_what_is_built_is_not_built_again(corpus, tmp_path):
    stages: list[str] = []

    def note(stage, done, total):
        stages.append(stage)

    for kind in ("Flat", "bm25"):
        build_index(corpus, tmp_path / kind, BuildRequest(kind, ENCODER), silent)
        build_index(corpus, tmp_path / kind, BuildRequest(kind, ENCODER), note)
    assert stages and not {"encoding", "writing the index"} & set(stages)


def test_a_folder_of_something_else_is_refused(corpus, tmp_path):
    build_index(corpus, tmp_path, BuildRequest("Flat", ENCODER), silent)
    for request in (
        BuildRequest("SQ8", ENCODER),
        BuildRequest("Flat", {"name": "hashed", "dimensions": 32}),
        BuildRequest("bm25"),
    ):
        with pytest.raises(DataError, match="holds another index"):
            build_index(corpus, tmp_path, request, silent)
    with pytest.raises(ConfigError, match="not an index_factory string"):
        build_index(corpus, tmp_path / "typo", BuildRequest("IFV8", ENCODER), silent)


def test_an_unfinished_build_of_something_else_is_refused_and_says_what_differs(
    corpus, tmp_path, small_blocks
):
    def stop(stage, done, total):
        if stage == "encoding" and done:
            raise Stopped

    with pytest.raises(Stopped):
        build_index(corpus, tmp_path, BuildRequest("Flat", ENCODER), stop)
    with pytest.raises(DataError, match=r"unfinished build of something else .*kind"):
        build_index(corpus, tmp_path, BuildRequest("SQ8", ENCODER), silent)
    with pytest.raises(DataError, match="a build that did not finish"):
        make_retriever({"name": "faiss", "path": str(tmp_path)}, corpus)


@pytest.fixture(scope="module")
def flat(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat")
    build_index(corpus, folder, BuildRequest("Flat", ENCODER), silent)
    return folder


def test_another_corpus_is_refused(flat, tmp_path):
    component = {"name": "faiss", "path": str(flat)}
    with pytest.raises(DataError, match="holds 500 passages, the corpus 499"):
        make_retriever(component, Corpus(write_corpus(tmp_path / "short.jsonl", PASSAGES[:-1])))
    swapped = [PASSAGES[1], PASSAGES[0], *PASSAGES[2:]]
    with pytest.raises(DataError, match="built on another corpus"):
        make_retriever(component, Corpus(write_corpus(tmp_path / "swapped.jsonl", swapped)))


def test_the_same_corpus_elsewhere_is_recognized(flat, corpus, tmp_path):
    copy = Corpus(shutil.copy(corpus.path, tmp_path / "copy.jsonl"))
    assert make_retriever({"name": "faiss", "path": str(flat)}, copy).search(["x"], 1)


def test_another_encoder_is_refused(flat, corpus, tmp_path):
    shutil.copytree(flat, tmp_path / "index")
    meta = json.loads((tmp_path / "index" / "meta.json").read_text())
    meta.pop("crc32")  # as one of an earlier version
    meta["encoder"].update(ngram_weight=0.1, sha256="0" * 64)
    (tmp_path / "index" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"another encoder \(ngram_weight: 0.1 then, 0.3 now"):
        make_retriever({"name": "faiss", "path": str(tmp_path / "index")}, corpus)


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"name": "faiss", "index": "SQ8"}, "decided when the index was built"),
        ({"name": "faiss", "dimensions": 3}, "options are stored there"),
        ({"name": "faiss", "nprobe": 3}, "only an IVF index"),
        ({"name": "bm25"}, "Set retriever.name to faiss"),
        ({"name": "bm25", "k1": 1.0}, "retriever.k1: decided when"),
    ],
)
def test_options_that_the_folder_decides_are_refused(component, message, flat, corpus):
    with pytest.raises(ConfigError, match=message):
        make_retriever({**component, "path": str(flat)}, corpus)


def test_damage_is_found(flat, corpus, tmp_path):
    shutil.copytree(flat, tmp_path / "index")
    path = tmp_path / "index" / "index.faiss"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="is not what the build wrote"):
        make_retriever({"name": "faiss", "path": str(path.parent)}, corpus)
    for text in ("{", '{"kind": "Flat"}'):
        (tmp_path / "index" / "meta.json").write_text(text)
        with pytest.raises(DataError, match="Build the index again"):
            make_retriever({"name": "faiss", "path": str(path.parent)}, corpus)
    with pytest.raises(DataError, match=r"found no meta\.json"):
        make_retriever({"name": "faiss", "path": str(tmp_path)}, corpus)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_embeddings(tmp_path):
    """Three times as many passages, 260 MB more of embeddings and as many more of index file: the peak is the same but for a
    fifth of the one."""
    code = (
        "import resource, sys; from rlflow_environments.search.__main__ import main\n"
        "assert main(sys.argv[1:]) == 0; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    peaks = {}
    for count in (8_000, 24_000):
        corpus = write_corpus(tmp_path / f"{count}.jsonl", passages(count))
        folder = tmp_path / f"index-{count}"
        arguments = [
            "build",
            "--corpus",
            str(corpus),
            "--out",
            str(folder),
            "--set",
            "dimensions=4096",
        ]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert (folder / "index.faiss").stat().st_size == 45 + 4 * 4096 * count
        peaks[count] = int(done.stdout.splitlines()[-1])
    more = 4 * 4096 * 16_000
    assert peaks[24_000] - peaks[8_000] < more / 5, peaks


def test_the_command_prints_what_it_took(corpus, tmp_path, capsys):
    assert main(["build", "--corpus", str(corpus.path), "--out", str(tmp_path / "index")]) == 0
    assert "peak memory" in capsys.readouterr().out
    assert main(["build", "--corpus", str(corpus.path)]) == 2
    assert "--out" in capsys.readouterr().err


def test_an_index_that_memory_may_not_hold_is_said_before_it_is_filled(
    corpus, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    build_index(corpus, tmp_path, BuildRequest("SQ8", ENCODER), silent)
    assert "SQ8 may need 0.0 GB of memory, 0.0 GB are free" in caplog.text


@pytest.mark.parametrize("kind", ["torch", "qdrant-edge"])
def test_a_folder_of_a_kind_that_is_gone_says_what_to_do(kind, corpus, tmp_path):
    build_index(corpus, tmp_path, BuildRequest("Flat", ENCODER), silent)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta.pop("crc32")  # as one of an earlier version
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "kind": kind, "embeddings": "float32"}))
    with pytest.raises(DataError, match=r"no longer torch.* Build the index again"):
        make_retriever({"name": "faiss", "path": str(tmp_path)}, corpus)


@pytest.mark.parametrize("damage", ['{"corp', '{"passages": 1}', "[" * 100_000])
def test_a_damaged_file_of_word_counts_is_one_line(corpus, tmp_path, damage):
    (tmp_path / "encoder.json").write_text(damage)
    with pytest.raises(DataError, match=r"encoder\.json: expected the counts .* Delete the folder"):
        build_index(corpus, tmp_path, BuildRequest("Flat", ENCODER), silent)


def test_an_index_without_the_first_lines_of_its_passages_is_noticed(tmp_path, monkeypatch):
    rows = [{"id": str(i), "title": f"T{i}", "contents": f"word{i} and more"} for i in range(20)]
    corpus = Corpus(write_rows(tmp_path / "corpus.jsonl", rows))
    with monkeypatch.context() as patched:  # as it was built before
        patched.setattr(
            Passage, "body", property(lambda passage: passage.contents.partition("\n")[2])
        )
        build_index(corpus, tmp_path / "index", BuildRequest("Flat", ENCODER), silent)
    with pytest.raises(DataError, match="has cosine"):
        make_retriever({"name": "faiss", "path": str(tmp_path / "index")}, corpus)
