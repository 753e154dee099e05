"""Claims about recipes/searchr1/download.py, against a local server that speaks what huggingface_hub asks a hub."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from recipes.searchr1 import releases
from rlflow.errors import DataError, StorageError
from tests.unit.recipes.hub_stub import Hub, served

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
CORPUS = b"".join(
    json.dumps({"id": str(i), "contents": f'"T{i}"\ntext'}).encode() + b"\n" for i in range(300)
)
INDEX = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {
        "PeterJinGo/wiki-18-corpus": {
            "wiki-18.jsonl.gz": gzip.compress(CORPUS),
            "README.md": b"read me",
        },
        "PeterJinGo/wiki-18-e5-index": {
            "part_aa": INDEX[:2_000_000],
            "part_ab": INDEX[2_000_000:],
            "README.md": b"x",
        },
    }
    with served(Hub(files)) as state:
        yield state


def run(hub: Hub, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    hub_variables = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_secret",
    }
    variables = {
        **os.environ,
        **hub_variables,
        "PYTHONPATH": "",
    }  # as a script, which finds its modules by itself
    command = [sys.executable, str(ROOT / "recipes" / "searchr1" / "download.py"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)


def test_corpus_and_index_arrive_unpacked_joined_and_whole_and_are_not_fetched_twice(hub, tmp_path):
    save = tmp_path / "wiki"
    done = run(
        hub,
        "wiki-18",
        "--repo_id",
        "PeterJinGo/wiki-18-e5-index",
        "--save_path",
        str(save),
        home=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (save / "wiki-18.jsonl").read_bytes() == CORPUS and (
        save / "e5_Flat.index"
    ).read_bytes() == INDEX
    assert not (save / "part_aa").exists() and not (save / "README.md").exists()
    assert f"ready: {save / 'e5_Flat.index'}" in done.stdout
    fetched = len(hub.sent)
    again = run(hub, "wiki-18", "wiki-18-e5", "--save_path", str(save), home=tmp_path)
    assert again.returncode == 0 and len(hub.sent) == fetched and "there and whole" in again.stdout


def test_without_a_release_and_from_anywhere_it_fetches_what_rlinfs_script_does(
    hub, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    files = {
        name: name.encode()
        for name in ("wiki_corpus.jsonl", "wiki_webpages.jsonl", "wikilinks.jsonl")
    }
    hub.files["inclusionAI/ASearcher-Local-Knowledge"] = files
    done = run(hub, "--save_path", "wiki2018", home=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("wiki_corpus.jsonl", "wiki_webpages.jsonl"):
        assert (tmp_path / "wiki2018" / name).read_bytes() == files[name]
    assert not (tmp_path / "wiki2018" / "wikilinks.jsonl").exists()


def test_a_transfer_that_broke_off_goes_on_where_it_stopped(hub, tmp_path):
    big = random.Random(1).randbytes(22 * MIB)  # huggingface_hub writes blocks of 10 MiB
    hub.files["PeterJinGo/wiki-18-e5-index"]["part_aa"] = big
    hub.cut = "part_aa"
    arguments = ["wiki-18-e5", "--save_path", str(tmp_path / "wiki"), "--keep_parts"]
    failed = run(hub, *arguments, home=tmp_path)
    assert failed.returncode == 2 and "the same command goes on later" in failed.stderr
    assert not (tmp_path / "wiki" / "e5_Flat.index").exists()
    hub.cut, before = "", len(hub.sent)
    done = run(hub, *arguments, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(name, start) for name, start, _ in hub.sent[before:]] == [
        ("part_aa", 10 * MIB),
        ("part_ab", 0),
    ]
    assert (tmp_path / "wiki" / "e5_Flat.index").read_bytes() == big + INDEX[2_000_000:]
    assert (tmp_path / "wiki" / "part_aa").read_bytes() == big


def test_a_damaged_file_is_fetched_once_more_and_then_refused(hub, tmp_path):
    hub.damaged = {"part_ab": 1}
    done = run(hub, "wiki-18-e5", "--save_path", str(tmp_path / "a"), home=tmp_path)
    assert done.returncode == 0 and "fetched once more" in done.stdout
    assert (tmp_path / "a" / "e5_Flat.index").read_bytes() == INDEX
    hub.damaged = {"part_ab": 9}
    done = run(hub, "wiki-18-e5", "--save_path", str(tmp_path / "b"), home=tmp_path)
    assert done.returncode == 2 and "expected SHA-256" in done.stderr and "twice" in done.stderr
    assert not (tmp_path / "b" / "e5_Flat.index").exists()


def test_the_token_goes_to_the_hub_and_not_to_its_storage(hub, tmp_path):
    assert run(hub, "wiki-18", "--save_path", str(tmp_path / "x"), home=tmp_path).returncode == 0
    assert hub.greetings and all(
        headers["authorization"] == "Bearer hf_secret" for headers in hub.greetings
    )
    assert hub.sent and all(headers["authorization"] is None for _, _, headers in hub.sent)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["wiki-81"], "Did you mean 'wiki-18'?"),
        (["nobody/nothing"], "DownloadError: nobody/nothing"),
        (["wiki-18", "--file", "*.parquet"], "no file there matches *.parquet"),
    ],
)
def test_what_is_not_there_is_one_clear_line(hub, tmp_path, arguments, said):
    done = run(hub, *arguments, "--save_path", str(tmp_path / "x"), home=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def stub_hub(monkeypatch, folder: Path, size: int, **data: bytes) -> None:
    """A hub in this process, and a disk on which only the folder's files lie."""

    class StubHub:
        def __init__(self, *_: object) -> None:
            self.data = {name.replace("__", "."): content for name, content in data.items()}

        def files(self) -> list[releases.RemoteFile]:
            return [
                releases.RemoteFile(name, len(content), None) for name, content in self.data.items()
            ]

        def fetch(self, remote: releases.RemoteFile, partial: Path) -> None:
            have = partial.stat().st_size if partial.exists() else 0
            with partial.open("ab") as file:
                file.write(self.data[remote.name][have:])

    def usage(place: Path) -> object:
        used = sum(
            file.stat().st_size for file in folder.iterdir() if file.name != "downloads.json"
        )
        return namedtuple("Usage", "free")(size - used)

    monkeypatch.setattr(releases, "Hub", StubHub)
    monkeypatch.setattr(releases.shutil, "disk_usage", usage)


def test_a_file_of_the_users_own_is_refused_and_stays(monkeypatch, tmp_path):
    stub_hub(monkeypatch, tmp_path, 10**9, train__jsonl=b"released")
    own = tmp_path / "train.jsonl"
    for content in (b"mine", b"mine, and longer than that one"):
        own.write_bytes(content)
        with pytest.raises(DataError, match="not the file of the release"):
            releases.download("x", releases.Release("o/n", ""), tmp_path)
        assert own.read_bytes() == content
    own.write_bytes(b"released")
    assert releases.download("x", releases.Release("o/n", ""), tmp_path) == [own]
    stub_hub(monkeypatch, tmp_path, 10**9, train__jsonl=b"another revision")
    assert (
        releases.download("x", releases.Release("o/n", ""), tmp_path)[0].read_bytes()
        == b"another revision"
    )


def test_room_is_asked_for_what_is_missing_and_a_full_disk_is_one_line(monkeypatch, tmp_path):
    packed = gzip.compress(random.Random(0).randbytes(1000))
    corpus, joined = releases.Release("o/n", ""), releases.Release("o/n", "", ("part_*",), "whole")
    stub_hub(monkeypatch, tmp_path, 4 * len(packed), c__jsonl__gz=packed)
    for _ in range(2):  # all is there the second time
        assert releases.download("x", corpus, tmp_path)[0].stat().st_size == 1000
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "whole.1.2.partial").write_bytes(b"left by a kill")
    (folder / "part_b").write_bytes(b"b" * 500)
    stub_hub(monkeypatch, folder, 1999, part_a=b"a" * 1000, part_b=b"b" * 500)
    with pytest.raises(
        StorageError, match="are needed"
    ):  # the parts, and the second once more: 2000
        releases.download("x", joined, folder)
    stub_hub(monkeypatch, folder, 2000, part_a=b"a" * 1000, part_b=b"b" * 500)

    def full(source: BinaryIO, target: BinaryIO, *_: object) -> None:
        target.write(source.read(200))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", full)
        with pytest.raises(StorageError, match="No space left"):
            releases.download("x", joined, folder)
    monkeypatch.setattr(releases, "_fetch", lambda hub, remote, *_: fetched.append(remote.name))
    fetched: list[str] = []
    assert releases.download("x", joined, folder)[0].read_bytes() == b"a" * 1000 + b"b" * 500
    assert fetched == ["part_b"] and {file.name for file in folder.iterdir()} == {
        "whole",
        "downloads.json",
    }
    assert releases.download("x", joined, folder) == [folder / "whole"] and len(fetched) == 1
