"""Random JSON, bytes and HTTP against a retrieval server that goes on answering right in between."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fuzzing import nonsense
from fuzzing.cases import NOISE, Wrong
from fuzzing.passages import build, write_corpus

ANSWER_S = 10.0  # a question has its answer by then, whatever else is sent
PATHS = (
    "/",
    "/health",
    "/ready",
    "/info",
    "/metrics",
    "/retrieve",
    "/access",
    "/admin/reload",
    "/nowhere",
    "/%00",
    "/..",
)
GROWTH = 1.10
SETTLED = 0.3  # share of the cases after which memory is not to grow
SETTLED_CASES = (
    2000  # and so many at the least: a new process takes what it needs for its first reloads
)


class Server:
    """One server process for all cases."""

    def prepare(self, folder: Path) -> None:
        self._folder = folder
        self._corpus = folder / "corpus.jsonl"
        asked = write_corpus(self._corpus)
        self._index = build(self._corpus, folder / "index", "Flat", folder)
        self._served = folder / "served"  # a link, which a reload follows anew
        self._serve_folder(self._index)
        token = folder / "token"
        token.write_text("a token of this run alone\n", encoding="ascii")
        self._token = {"Authorization": "Bearer a token of this run alone"}
        self._port = _free_port()
        self._errors = folder / "server.stderr"
        flags = [
            "--index",
            str(self._served),
            "--corpus",
            str(self._corpus),
            "--port",
            str(self._port),
            "--cache-mb",
            "1",
        ]
        flags += ["--admin-token", str(token), "--query-log", str(folder / "queries.jsonl")]
        program = [sys.executable, "-m", "rlflow_environments.retrieval", "serve", *flags]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                program, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        self._await_ready()
        self._known = {
            question: self._ask({"queries": [question], "topk": 5})["result"][0]
            for question in asked
        }
        self._check_known()
        self._memory: list[float] = []

    def case(self, draw: random.Random, folder: Path) -> bool:
        kind = draw.random()
        if kind < 0.5:
            accepted = self._request(draw)
        elif kind < 0.7:
            accepted = self._bytes(draw)
        elif kind < 0.85:
            accepted = self._http(draw)
        else:
            accepted = self._reload(draw, folder)
        question = draw.choice(list(self._known))
        self._same(
            self._ask({"queries": [question], "topk": 3})["result"],
            [self._known[question][:3]],
            "the next question",
        )
        self._memory.append(_resident_mib(self._process.pid))
        return accepted

    def close(self) -> dict[str, float]:
        ended = self._process.poll()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        stopped = self._process.poll()
        self._process.kill()
        errors = self._errors.read_text(encoding="utf-8", errors="replace")
        if ended is not None or stopped != 0:
            raise Wrong(
                f"the server ended with {ended}, or did not on SIGTERM ({stopped}): {errors[-3000:]}"
            )
        found = min((errors.find(word) for word in NOISE if word in errors), default=-1)
        if found >= 0:
            raise Wrong(f"on the server's stderr: ...{errors[max(0, found - 300) : found + 6000]}")
        early = self._memory[: max(SETTLED_CASES, round(SETTLED * len(self._memory)))]
        growth = max(self._memory) / max(early) if self._memory else 1.0
        if growth > GROWTH:
            raise Wrong(f"memory grew from {max(early):.0f} to {max(self._memory):.0f} MiB")
        return {"memory_mib": max(self._memory, default=0.0), "memory_growth": growth}

    # ------------------------------------------------------------ what is sent

    def _request(self, draw: random.Random) -> bool:
        """A request of the wire format, right or with something else in one place; answers with 200 must fit it."""
        questions = draw.choices(list(self._known), k=draw.randint(0, 4))
        message: dict[str, Any] = {
            "queries": questions,
            "topk": draw.randint(0, 5),
            "return_scores": draw.random() < 0.3,
        }
        if draw.random() < 0.75:
            message = nonsense.damaged_json(message, draw)
        path = draw.choice(["/retrieve"] * 5 + ["/access"])
        if path == "/access":
            message["urls"] = draw.choice(
                [nonsense.value(draw), [nonsense.value(draw)], ["doc://1", nonsense.text(draw)]]
            )
        status, body = self._post(
            path, json.dumps(message, default=str).encode("utf-8", "surrogatepass")
        )
        if status == 200:
            self._fits(path, message, json.loads(body))
        return status == 200

    def _bytes(self, draw: random.Random) -> bool:
        """Bodies that are no JSON, or JSON of no use."""
        whole = json.dumps(
            {"queries": list(self._known)[:3], "topk": 2, "return_scores": True}
        ).encode()
        body = draw.choice(
            [
                lambda: nonsense.damaged(whole, draw),
                lambda: draw.randbytes(draw.randint(0, 300)),
                lambda: json.dumps(nonsense.value(draw)).encode("utf-8", "surrogatepass"),
                lambda: b"[" * draw.choice([10, 1000, 200_000]),
                lambda: b'{"queries":' + b"[" * 1000 + b"]" * 1000 + b"}",
                lambda: (
                    b'{"queries":["a"],"topk":' + b"9" * draw.choice([30, 5000, 500_000]) + b"}"
                ),
                lambda: b'{"queries":["' + b"a " * draw.choice([10, 100_000, 300_000]) + b'"]}',
                lambda: json.dumps({"queries": ["a b"] * draw.choice([100, 8192, 9000])}).encode(),
                lambda: b'{"queries":["\\ud83d \xed\xa0\xbd x"]}',
                lambda: whole.replace(b'"topk": 2', b'"topk": NaN'),
            ]
        )()
        return (
            self._post(draw.choice(["/retrieve", "/retrieve", "/access", "/admin/reload"]), body)[0]
            == 200
        )

    def _http(self, draw: random.Random) -> bool:
        """Requests that are no HTTP, or not whole."""
        body = json.dumps({"queries": ["x"]}).encode()
        path = draw.choice(PATHS)
        method = draw.choice(["GET", "POST", "PUT", "HEAD", "DELETE", "NONE", "OPTIONS"])
        head = f"{method} {path} HTTP/1.1\r\nHost: h\r\n".encode()
        length = draw.choice(
            [
                b"%d" % len(body),
                b"0",
                b"-1",
                b"99999999999",
                b"abc",
                b"7",
                b"1\r\nContent-Length: 5",
            ]
        )
        extra = draw.choice(
            [b"", b"Expect: 100-continue\r\n", b"Transfer-Encoding: chunked\r\n", b"X: " + b"a" * 100_000 + b"\r\n",
            b"\x00: \xff\r\n",
             b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"X-Deadline-S: nan\r\n", b"X-Rlflow-Deadline: -inf\r\n"]
        )  # fmt: skip
        sent = head + b"Content-Length: " + length + b"\r\n" + extra + b"\r\n" + body
        if draw.random() < 0.4:
            sent = nonsense.damaged(sent, draw)
        if draw.random() < 0.2:
            sent = draw.randbytes(200)
        answer = self._raw(
            sent[: draw.randint(1, max(1, len(sent)))] if draw.random() < 0.2 else sent
        )
        if answer.startswith(b"HTTP/1.1 5") and not answer.startswith(b"HTTP/1.1 503"):
            raise Wrong(f"{sent[:300]!r} -> {answer[:500]!r}")
        return answer.startswith(b"HTTP/1.1 200")

    def _reload(self, draw: random.Random, folder: Path) -> bool:
        """Another index, which may be damaged: what is served after it must be right."""
        copy = shutil.copytree(self._index, folder / "index")
        what = nonsense.damage_folder(copy, draw) if draw.random() < 0.9 else "nothing"
        asked: dict[str, Any] = {"retriever": {"name": "faiss", "nprobe": 3}}
        if draw.random() < 0.3:
            asked, what = nonsense.damaged_json(asked, draw), "the request"
        else:
            self._serve_folder(copy)
        status, body = self._post(
            "/admin/reload", json.dumps(asked).encode("utf-8", "surrogatepass")
        )
        accepted = status == 200
        if accepted:
            self._check_known(f"after a reload of an index with {what} damaged")
        self._serve_folder(self._index)
        status, body = self._post("/admin/reload", b"{}")
        if status != 200:
            raise Wrong(f"the old index is not taken back after {asked}: {status} {body[:500]!r}")
        self._check_known(f"after {asked} and back")
        return accepted

    def _serve_folder(self, folder: Path) -> None:
        """What the next reload loads."""
        aside = self._served.with_suffix(".new")
        aside.symlink_to(folder)
        os.replace(aside, self._served)

    # ------------------------------------------------------------ what must hold

    def _fits(self, path: str, message: dict[str, Any], answer: Any) -> None:
        found = answer["result"]
        if path == "/access":
            if len(found) != len(message["urls"]):
                raise Wrong(f"{len(found)} pages for {message['urls']!r:.300}")
            return
        queries = message.get("queries")
        queries = [message["query"]] if queries is None else queries
        if len(found) != len(queries):
            raise Wrong(f"{len(found)} answers to {queries!r:.300}")
        top_k = int(message.get("topk") or 3)
        for question, passages in zip(queries, found):
            if message.get("return_scores"):
                passages = [scored["document"] for scored in passages]
            if question in self._known:
                self._same(
                    passages[:5], self._known[question][:top_k], f"{question!r} of {message!r:.300}"
                )
            if len(passages) > top_k:
                raise Wrong(f"{len(passages)} passages, {top_k} were asked for: {message!r:.300}")

    def _check_known(self, when: str = "at the start") -> None:
        asked = list(self._known)
        self._same(
            self._ask({"queries": asked, "topk": 5})["result"],
            [self._known[question] for question in asked],
            when,
        )

    def _same(self, found: Any, expected: Any, when: str) -> None:
        if found != expected:
            raise Wrong(f"another answer {when}: {found!r:.500}, expected {expected!r:.500}")

    def _ask(self, message: dict[str, Any]) -> Any:
        status, body = self._post("/retrieve", json.dumps(message).encode())
        if status != 200:
            raise Wrong(f"a right question is answered with {status} {body[:500]!r}")
        return json.loads(body)

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """(status, body) of an answer in time. Raises Wrong for none, for 5xx but 503, and for an error without its text."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            connection.request(
                "POST", path, body, {"Content-Type": "application/json", **self._token}
            )
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as problem:
            raise Wrong(f"POST {path} {body[:300]!r}: {type(problem).__name__} {problem}") from None
        finally:
            connection.close()
        if response.status >= 500 and response.status != 503:
            raise Wrong(f"POST {path} {body[:300]!r} -> {response.status} {answer[:500]!r}")
        if response.status != 200 and not json.loads(answer).get("detail"):
            raise Wrong(
                f"POST {path} {body[:300]!r} -> {response.status} without a reason: {answer[:500]!r}"
            )
        return response.status, answer

    def _raw(self, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self._port), timeout=1.0) as connection:
            try:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                return connection.recv(4096)
            except OSError:  # closed, or waiting for the rest
                return b""

    def _await_ready(self) -> None:
        for _ in range(600):
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"the server did not come up: {self._errors.read_text()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _resident_mib(process: int) -> float:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        raise Wrong("the server is gone") from None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
