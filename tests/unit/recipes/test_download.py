"""Claims about recipes/searchr1/download.py, against a local server that speaks what huggingface_hub asks a hub."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
COMMIT = "c0ffee" + "0" * 34
CORPUS = b"".join(json.dumps({"id": str(i), "contents": f'"T{i}"\ntext'}).encode() + b"\n" for i in range(300))
INDEX = random.Random(0).randbytes(3_000_000)


class Hub:
    """files: {repository: {name: content}}. sent: (name, first byte) of every transfer. cut: the connection breaks in the
    middle of this file, and then whenever it is asked for the rest. damaged: this file comes with a wrong byte so many times."""

    def __init__(self) -> None:
        self.files = {
            "PeterJinGo/wiki-18-corpus": {"wiki-18.jsonl.gz": gzip.compress(CORPUS), "README.md": b"read me"},
            "PeterJinGo/wiki-18-e5-index": {
                "part_aa": INDEX[:2_000_000],
                "part_ab": INDEX[2_000_000:],
                "README.md": b"x",
            },
        }
        self.sent: list[tuple[str, int]] = []
        self.cut = ""
        self.damaged: dict[str, int] = {}
        self.endpoint = ""

    def listing(self, repo: str) -> dict:
        siblings = []
        for name, content in self.files[repo].items():
            row = {"rfilename": name, "size": len(content), "blobId": "b"}
            if name != "README.md":
                sha = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 134}
            siblings.append(row)
        return {
            "id": repo,
            "sha": COMMIT,
            "siblings": siblings,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/datasets/"):
                repo = "/".join(path.split("/")[3:5])
                if repo in state.files:
                    return self._send(
                        200, json.dumps(state.listing(repo)).encode(), body, {"Content-Type": "application/json"}
                    )
                return self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            if not path.startswith("/datasets/"):
                return self._send(404, b"{}", body, {})
            _, _, owner, name, _, _, *rest = path.split("/")
            file = "/".join(rest)
            content = state.files[f"{owner}/{name}"][file]
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
            if not body:
                return self._send(200, content, False, headers)
            state.sent.append((file, start))
            if state.damaged.get(file, 0):
                state.damaged[file] -= 1
                content = bytes([content[0] ^ 1]) + content[1:]
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            if state.cut == file:
                return self._send(
                    206 if start else 200, content[start:], True, headers, cut=1 if start else len(content) // 2
                )
            return self._send(206 if start else 200, content[start:], True, headers)

        def _send(
            self, status: int, content: bytes, body: bool, headers: dict[str, str], cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content[:cut])
            self.close_connection = cut is not None

        def log_message(self, *arguments) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state
    server.shutdown()
    server.server_close()


def run(hub: Hub, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    hub_variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, **hub_variables, "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "recipes" / "searchr1" / "download.py"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)


def test_corpus_and_index_arrive_unpacked_joined_and_whole_and_are_not_fetched_twice(hub, tmp_path):
    save = tmp_path / "wiki"
    done = run(hub, "wiki-18", "--repo_id", "PeterJinGo/wiki-18-e5-index", "--save_path", str(save), home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (save / "wiki-18.jsonl").read_bytes() == CORPUS and (save / "e5_Flat.index").read_bytes() == INDEX
    assert not (save / "part_aa").exists() and not (save / "README.md").exists()
    assert f"ready: {save / 'e5_Flat.index'}" in done.stdout
    fetched = len(hub.sent)
    again = run(hub, "wiki-18", "wiki-18-e5", "--save_path", str(save), home=tmp_path)
    assert again.returncode == 0 and len(hub.sent) == fetched and "there and whole" in again.stdout


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
    assert hub.sent[before:] == [("part_aa", 10 * MIB), ("part_ab", 0)]
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
