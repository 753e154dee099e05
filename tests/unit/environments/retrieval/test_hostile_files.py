"""Claims about corpora and index folders as they come: rows without text, repeated ids, files that somebody edited."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from rlflow.errors import DataError
from rlflow_environments.retrieval import records
from rlflow_environments.retrieval.building import BuildRequest, build_index
from rlflow_environments.retrieval.commands import check
from rlflow_environments.retrieval.commands.source_arguments import (
    add_source_arguments,
    read_source,
)
from rlflow_environments.retrieval.corpus import Corpus
from rlflow_environments.retrieval.encoders import make_encoder
from rlflow_environments.retrieval.indices import make_retriever
from rlflow_environments.retrieval.indices.faiss_index import import_faiss
from rlflow_environments.retrieval.server.index import DocumentSearch

ROWS = [
    {"contents": '"A"\nharbour'},
    {"contents": ""},
    {"title": "T", "text": " "},
    {"contents": '"B"\nmarket'},
    {"id": "x", "contents": " \n", "url": "u"},
    {"id": "x", "contents": '"C"\nriver', "url": "u"},
    {"id": "x", "contents": '"D"\nmill', "url": "u"},
]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_without_text_keep_their_number_are_never_found_and_said_once(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(records, "KEPT_FROM", 0)
    path = write(tmp_path / "corpus.jsonl", ROWS)
    for _ in range(2):  # the second time from the offsets file
        caplog.clear()
        passages = [passage for passage in Corpus(path) if passage.contents]
        assert [(passage.id, passage.title) for passage in passages] == [
            ("0", "A"),
            ("3", "B"),
            ("x", "C"),
            ("x", "D"),
        ]
        lines = [record.message.partition(": ")[2] for record in caplog.records]
        assert lines == ["3 of 7 rows have no text and are never found; the first is row 1"]
    again = Corpus(path)
    assert again.empty == {1, 2, 4}
    assert [json.loads(again.document(row))["id"] for row in (0, 3, 5, 6)] == [
        "0",
        "3",
        "x",
        "x",
    ] and again[3].id == "3"
    for name in ("bm25", "faiss", "random"):
        hits = make_retriever(name, again).search(["market", "mill"], 4)
        assert all(hit.contents for found in hits for hit in found) and hits[0][0].contents
        assert name in ("bm25", "random") or sorted(hit.title for hit in hits[0]) == [
            "A",
            "B",
            "C",
            "D",
        ]


def test_an_index_of_search_r1_fits_a_corpus_with_empty_rows(tmp_path):
    """It holds a vector for every row, the empty ones included; here these are the nearest to every question."""
    faiss = import_faiss()
    corpus = Corpus(write(tmp_path / "corpus.jsonl", ROWS))
    encoder = {"name": "hashed", "dimensions": 64}
    vectors = make_encoder(encoder, corpus).encode_passages(list(corpus))
    vectors[[1, 2, 4]] = make_encoder(encoder, corpus).encode_queries(["market"])
    index = faiss.IndexFlatIP(64)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "e5_Flat.index"))
    retriever = make_retriever(
        {"name": "faiss", "path": str(tmp_path / "e5_Flat.index"), "encoder": encoder}, corpus
    )
    (hits,) = retriever.search(["market"], 2)
    assert hits[0].title == "B" and len(hits) == 2 and all(hit.contents for hit in hits)
    (served,) = DocumentSearch(retriever).search(["market"], 1)
    assert json.loads(served[0][0])["contents"] == '"B"\nmarket'


def test_a_collection_has_a_point_for_each_row_with_text_under_its_number(tmp_path):
    """As RLinf fills one."""
    pytest.importorskip("qdrant_client")
    from rlflow_environments.retrieval.indices.qdrant import Collection, fill

    corpus = Corpus(write(tmp_path / "corpus.jsonl", ROWS))
    encoder = make_encoder({"name": "hashed", "dimensions": 64}, corpus)
    collection = Collection(None, "corpus", create=encoder.dimensions)
    for added in (4, 0):
        assert fill(collection, encoder, corpus, lambda *progress: None) == added
    assert sorted(point.id for point in collection.points(range(len(ROWS)))) == [0, 3, 5, 6]


def test_a_corpus_without_any_text_is_refused(tmp_path):
    path = write(tmp_path / "corpus.jsonl", [{"contents": ""}])
    with pytest.raises(DataError):
        Corpus(path)


@pytest.mark.parametrize(
    "row", ['{"id": ' + "1" * 5000 + ', "contents": "x"}', "[" * 200_000, '{"contents": 5}']
)
def test_hostile_rows_are_bad_rows(tmp_path, row):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"contents": "x"}\n' + row + "\n")
    with pytest.raises(DataError, match=r"row"):
        Corpus(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("built")
    corpus = write(folder / "corpus.jsonl", ROWS)
    build_index(Corpus(corpus), folder / "index", BuildRequest(), lambda *progress: None)
    return corpus, folder / "index"


@pytest.mark.parametrize(
    "edit",
    [
        {"count": "four"},
        {"count": -1},
        {"dimensions": None},
        {"corpus": []},
        {"corpus": {}},
        {"encoder": "e5"},
        {"encoder": {}},
        {"kind": 3},
        {"encoder": {"family": "e5", "sha256": ""}},
        {"encoder": {"family": "e5", "sha256": "", "path": "x"}},
        {"encoder": {"family": "hashed", "sha256": "", "x": json.loads("[" * 600 + "]" * 600)}},
    ],
)
def test_an_edited_meta_is_one_clear_error(built, tmp_path, edit):
    corpus, index = built
    copy = tmp_path / "index"
    copy.mkdir()
    for file in index.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    meta = json.loads((copy / "meta.json").read_text())
    meta.pop("crc32")  # as one of an earlier version
    (copy / "meta.json").write_text(json.dumps({**meta, **edit}))
    with pytest.raises(DataError, match=r"meta.json: cannot be read"):
        make_retriever({"name": "faiss", "path": str(copy)}, Corpus(corpus))


def source(*arguments: str) -> dict:
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    return read_source(parser.parse_args(list(arguments)))[0]


@pytest.mark.parametrize("name", ["e5", "e5-base", "E5-base-v2"])
def test_the_fields_names_of_retrievers_give_their_family(tmp_path, name):
    index = tmp_path / "e5_Flat.index"
    index.write_bytes(b"x")
    assert source("--index_path", str(index), "--retriever_name", name)["encoder"]["family"] == "e5"


def _copied(built: tuple[Path, Path], folder: Path, kind: str) -> tuple[Path, Path]:
    rows = [
        {"id": f"{row:04}", "contents": f'"Town {row:04}"\nharbour and market'}
        for row in range(600)
    ]
    corpus = write(folder / "corpus.jsonl", rows)
    build_index(Corpus(corpus), folder / "index", BuildRequest(kind=kind), lambda *progress: None)
    return corpus, folder / "index"


def test_random_bytes_in_an_index_are_refused_at_the_start(built, tmp_path):
    corpus, index = _copied(built, tmp_path, "Flat")
    component, file = {"name": "faiss", "path": str(index)}, "index.faiss"
    assert make_retriever(component, Corpus(corpus)).search(["town"], 1)
    data = bytearray((index / file).read_bytes())
    data[len(data) // 2 :] = b"\x3c" * (len(data) - len(data) // 2)
    (index / file).write_bytes(data)
    with pytest.raises(DataError, match=r"is not what the build wrote"):
        make_retriever(component, Corpus(corpus))
    meta = json.loads((index / "meta.json").read_text())
    meta.pop("crc32")  # as one of an earlier version
    (index / "meta.json").write_text(
        json.dumps({**meta, "files": None})
    )  # of an earlier version: the passages tell
    with pytest.raises(DataError, match=r"cosine|passage"):
        make_retriever(component, Corpus(corpus))


def test_a_corpus_in_another_order_is_refused_though_its_times_are_kept(built, tmp_path):
    corpus, index = _copied(built, tmp_path, "bm25")
    before, opened = corpus.stat(), Corpus(corpus)
    reversed_lines = corpus.read_text().splitlines(keepends=True)[::-1]
    corpus.write_text("".join(reversed_lines))
    os.utime(corpus, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert corpus.stat().st_size == before.st_size and opened.sha256 != Corpus(corpus).sha256
    with pytest.raises(DataError, match=r"another corpus"):
        make_retriever({"name": "bm25", "path": str(index)}, Corpus(corpus))


def test_a_deep_check_reads_every_byte(built, tmp_path, capsys):
    corpus, index = _copied(built, tmp_path, "Flat")
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    assert check.run(parser.parse_args([str(index), "--deep"])) == 0
    assert "every byte" in capsys.readouterr().out
    file = index / "index.faiss"
    data = bytearray(file.read_bytes())
    place = (len(data) - (1 << 15)) // 31 // 2 + (
        1 << 14
    )  # between two samples, where the file is large enough for that
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"is not what the build wrote"):
        check.run(parser.parse_args([str(index), "--deep"]))
    data[place] ^= 1
    file.write_bytes(data)
    corpus.write_text(corpus.read_text().replace("0300", "9300"))
    with pytest.raises(DataError, match=r"is not the corpus"):
        check.run(parser.parse_args([str(index), "--deep"]))
