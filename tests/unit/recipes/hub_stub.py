"""A stand-in for the HuggingFace hub: a listing with sizes and hashes, files in ranges, and storage at another address."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """files: {repository: {name: content}}. sent: (name, first byte, headers) of every transfer. cut: the connection breaks in
    the middle of this file, and then whenever it is asked for the rest. damaged: {file: how often it comes with a wrong byte}."""

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        self.files = files
        self.sent: list[tuple[str, int, Message]] = []
        self.cut = ""
        self.damaged: dict[str, int] = {}
        self.endpoint = ""
        self.storage = ""
        self.greetings: list[Message] = []

    def listing(self, repo: str) -> dict:
        siblings = []
        for name, content in self.files[repo].items():
            lfs = {
                "sha256": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 134,
            }
            large = {} if name == "README.md" else {"lfs": lfs}
            siblings.append({"rfilename": name, "size": len(content), "blobId": "b", **large})
        return {
            "id": repo,
            "sha": COMMIT,
            "siblings": siblings,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }

    def tree(self, repo: str) -> list[dict]:
        entries = []
        for one in self.listing(repo)["siblings"]:
            entries.append(
                {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": "b"}
            )
            if "lfs" in one:
                entries[-1]["lfs"] = {**one["lfs"], "oid": one["lfs"]["sha256"]}
        return entries

    def content(self, repo: str, file: str) -> bytes:
        content = self.files[repo][file]
        if self.damaged.get(file, 0):
            self.damaged[file] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        return content


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, _, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        parts = rest.split("/")
        if kind == "api" and parts[0] in ("datasets", "models"):
            return self._list("/".join(parts[1:3]), tree="tree" in parts[3:4])
        if kind == "datasets":
            return self._point_to_storage("/".join(parts[:2]), "/".join(parts[4:]))
        if kind == "storage":
            return self._transfer("/".join(parts[:2]), "/".join(parts[2:]))
        repo, _, file = self.path.partition("?")[0].removeprefix("/").partition("/resolve/")
        if file.partition("/")[2] in self.hub.files.get(
            repo, {}
        ):  # a model's: OWNER/NAME/resolve/REVISION/FILE
            return self._point_to_storage(repo, file.partition("/")[2])
        return self._send(404, {}, b"{}")

    def _list(self, repo: str, tree: bool) -> None:
        if repo in self.hub.files and tree:
            return self._send(
                200, {"Content-Type": "application/json"}, json.dumps(self.hub.tree(repo)).encode()
            )
        if repo in self.hub.files:
            return self._send(
                200,
                {"Content-Type": "application/json"},
                json.dumps(self.hub.listing(repo)).encode(),
            )
        return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}")

    def _point_to_storage(self, repo: str, file: str) -> None:
        self.hub.greetings.append(self.headers)
        content = self.hub.files[repo][file]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        linked = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": etag,
            "ETag": etag,
        }
        return self._send(
            302, {**linked, "Location": f"{self.hub.storage}/storage/{repo}/{file}"}, b""
        )

    def _transfer(self, repo: str, file: str) -> None:
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        content = self.hub.content(repo, file)
        self.hub.sent.append((file, start, self.headers))
        headers = (
            {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        )
        cut = None if self.hub.cut != file else 1 if start else len(content) // 2
        return self._send(206 if start else 200, headers, content[start:], cut)

    def _send(
        self, status: int, headers: Mapping[str, str], content: bytes, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
        self.close_connection = cut is not None

    def log_message(self, *arguments) -> None:
        pass


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    """The hub, answering at `hub.endpoint`; its storage has another host name."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint, hub.storage = (
        f"http://127.0.0.1:{server.server_port}",
        f"http://localhost:{server.server_port}",
    )
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
