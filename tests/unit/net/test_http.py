"""Claims about the one retry policy: what is tried again, how often, and after which pauses."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow.net.http import (
    GaveUp,
    HttpClient,
    Retryable,
    RetryPolicy,
    backoff_s,
    check_status,
    fetch,
    model_client,
    retry_after_s,
)

QUICK = RetryPolicy(tries=4, first_pause_s=0.001, longest_pause_s=0.002)


class Service:
    """Fails as its script says, then answers with the number of the attempt."""

    def __init__(self, *script: Exception) -> None:
        self.script = list(script)
        self.attempts = 0

    def __call__(self) -> int:
        self.attempts += 1
        if self.script:
            raise self.script.pop(0)
        return self.attempts

    async def asynchronous(self, deadline: float) -> int:
        return self()


def both(policy: RetryPolicy, service: Service, *, asynchronous: bool) -> int:
    if asynchronous:
        return asyncio.run(policy.call_async(service.asynchronous, random.Random(0)))
    return policy.call(service, random.Random(0))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_may_pass_is_tried_until_it_does(asynchronous: bool) -> None:
    assert both(QUICK, Service(Retryable("a"), Retryable("b")), asynchronous=asynchronous) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_failure_is_told_after_all_tries(asynchronous: bool) -> None:
    service = Service(*[Retryable(str(number)) for number in range(9)])
    with pytest.raises(GaveUp) as found:
        both(QUICK, service, asynchronous=asynchronous)
    assert (service.attempts, found.value.attempts, str(found.value.last)) == (4, 4, "3")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_anything_else_ends_at_once(asynchronous: bool) -> None:
    service = Service(Retryable("a"), KeyError("no"))
    with pytest.raises(KeyError):
        both(QUICK, service, asynchronous=asynchronous)
    assert service.attempts == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_pause_that_the_deadline_does_not_allow_is_not_begun(asynchronous: bool) -> None:
    policy = RetryPolicy(tries=9, first_pause_s=0.001, longest_pause_s=0.002, timeout_s=1.0)
    start = time.monotonic()
    with pytest.raises(GaveUp, match="1 attempts"):
        both(policy, Service(Retryable("busy", retry_after_s=20.0)), asynchronous=asynchronous)
    assert time.monotonic() - start < 1.0


def test_the_deadline_ends_an_attempt_that_hangs() -> None:
    async def hang(deadline: float) -> None:
        assert 0 < deadline - time.monotonic() <= 0.1
        await asyncio.sleep(60)

    with pytest.raises(GaveUp) as found:
        asyncio.run(RetryPolicy(3, 0.001, 0.002, timeout_s=0.1).call_async(hang, random.Random(0)))
    assert (found.value.attempts, found.value.last) == (1, None)


def test_the_server_says_when_it_wants_to_be_asked_again() -> None:
    start = time.monotonic()
    QUICK.call(Service(Retryable("busy", retry_after_s=0.2)), random.Random(0))
    assert time.monotonic() - start >= 0.2


def test_at_once_means_without_a_pause() -> None:
    policy = RetryPolicy(tries=9, first_pause_s=60.0, longest_pause_s=60.0)
    start = time.monotonic()
    assert policy.call(Service(*[Retryable("unreadable", at_once=True)] * 8), random.Random(0)) == 9
    assert time.monotonic() - start < 1.0


def test_pauses_double_up_to_a_bound() -> None:
    assert [backoff_s(0.1, 2.0, failures) for failures in (1, 2, 3, 5, 6, 10_000)] == [
        0.1,
        0.2,
        0.4,
        1.6,
        2.0,
        2.0,
    ]


@pytest.mark.parametrize(
    ("status", "server_failed"), [(429, False), (500, True), (502, True), (503, True), (504, True)]
)
def test_too_many_requests_and_failures_of_the_server_may_pass(
    status: int, server_failed: bool
) -> None:
    with pytest.raises(Retryable, match=f"there: status {status}: why") as found:
        check_status("there: ", status, {"retry-after": "7"}, "why")
    assert (found.value.server_failed, found.value.retry_after_s) == (server_failed, 7.0)


@pytest.mark.parametrize("status", [200, 204, 302, 400, 401, 404, 413, 422])
def test_other_statuses_are_the_callers_to_judge(status: int) -> None:
    check_status("", status, {}, "")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("9999", 30.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after_is_read_in_seconds_and_bounded(header: str, seconds: float) -> None:
    assert retry_after_s({"retry-after": header}) == seconds


def test_no_retry_after_is_no_wait() -> None:
    assert retry_after_s({}) == 0.0


class Server(threading.Thread):
    """Answers one request after the other with `replies`, and keeps what it was sent."""

    def __init__(self, *replies: bytes) -> None:
        super().__init__(daemon=True)
        self.listener, self.replies, self.asked = (
            socket.create_server(("127.0.0.1", 0)),
            replies,
            [],
        )
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        for reply in self.replies:
            connection, _ = self.listener.accept()
            with connection:
                self.asked.append(connection.recv(65536))
                connection.sendall(reply)


def answer(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def test_an_answer_is_whole_whatever_its_status() -> None:
    server = Server(answer(b'{"a": 1}'), answer(b"gone \xff", "404 Not Found"))
    assert fetch(server.url).json() == {"a": 1}
    missing = fetch(f"{server.url}/x", headers={"Authorization": "Bearer key"})
    assert (missing.status, missing.text) == (404, "gone \ufffd")
    assert server.asked[1].startswith(b"GET /x HTTP/1.1\r\n") and b"Bearer key" in server.asked[1]


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.net.http.LONGEST_ANSWER", 100_000)
    packed = gzip.compress(bytes(200_000))
    bomb = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    server = Server(answer(bytes(100_000)), answer(bytes(200_000)), bomb + packed)
    assert len(fetch(server.url).content) == 100_000
    for _ in range(2):
        with pytest.raises(Retryable, match="an answer of more than 0 MiB"):
            fetch(server.url)


def test_a_body_is_sent_as_json_from_any_thread_and_event_loop() -> None:
    server = Server(answer(b"1"), answer(b"2"))
    client = HttpClient(at_once=1)
    ask, asked = client.session.ask, ("POST", server.url, {"text": "\ud83d"})

    async def scenario() -> bytes:
        return (await asyncio.wrap_future(client.submit(ask, *asked))).content

    assert (client.call(ask, *asked).content, asyncio.run(scenario())) == (b"1", b"2")
    assert all(
        b"application/json" in one and one.endswith(b'{"text": "\\ud83d"}') for one in server.asked
    )
    client.close()
    assert client.closed


def test_what_brought_no_answer_may_pass_and_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Retryable, match=r"^no answer within 0\.1 s$"):
            fetch(url, timeout_s=0.1)
    with pytest.raises(Retryable, match=r"^no connection to 127.0.0.1:\d+: Connection refused$"):
        fetch(url)
    with pytest.raises(Retryable, match=r"^ServerDisconnectedError"):
        fetch(Server(b"", b"").url)  # aiohttp asks twice by itself


def test_a_closed_client_cancels_what_is_under_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = HttpClient()
        future = client.submit(
            client.session.ask, "GET", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        silent.accept()
        client.close()
        assert future.cancelled()


def test_who_waits_for_a_client_that_is_closed_hears_of_it() -> None:
    """Also where no connection was opened, whose end would keep the loop going."""
    client = HttpClient()
    future = client.submit(asyncio.sleep, 60)
    client.close()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(5)
    with pytest.raises(RuntimeError, match="this HTTP client is closed"):
        client.submit(asyncio.sleep, 0)


def test_a_proxy_of_the_environment_is_for_those_who_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(answer(b"direct"), answer(b"by proxy"))
    (tmp_path / ".netrc").write_text("machine nowhere.invalid login a password b\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch(server.url).content == b"direct"
    key = {"Authorization": "Bearer key"}
    assert fetch("http://nowhere.invalid/v1", proxies=True, headers=key).content == b"by proxy"
    assert (
        server.asked[1].startswith(b"GET http://nowhere.invalid/v1")
        and b"Bearer key" in server.asked[1]
    )


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirection_to_another_origin_gets_neither_the_key_nor_the_request(status: int) -> None:
    seen: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(f"{self.server.server_port} {self.headers.get('X-Api-Key')}")
            self.send_response(status if self.server is servers[0] else 200)
            self.send_header("Location", f"http://127.0.0.1:{servers[1].server_port}/")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *arguments: object) -> None: ...

    servers = [HTTPServer(("127.0.0.1", 0), Elsewhere) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    first, url = servers[0].server_port, f"http://127.0.0.1:{servers[0].server_port}/"
    client = HttpClient(headers={"X-Api-Key": "secret"}, timeout_s=5.0)
    try:
        for method, body in (("POST", b"{}"), ("GET", None)):
            assert client.call(client.session.ask, method, url, body).status == status
    finally:
        client.close()
        for server in servers:
            server.shutdown()
            server.server_close()
    assert seen == [f"{first} secret"] * 2


@pytest.mark.parametrize("pasted", ["/v1", "/v1/", "/v1/completions"])
def test_the_client_of_a_model_takes_the_address_as_it_was_pasted_and_sends_the_key(
    pasted: str,
) -> None:
    server = Server(answer(b"{}"))
    address, client = model_client(
        "--server", server.url + pasted, "/completions", "secret", 2, 5.0
    )
    client.call(client.session.ask, "POST", address + "/completions", {})
    client.close()
    assert address == server.url + "/v1" and b"POST /v1/completions" in server.asked[0]
    assert b"Authorization: Bearer secret" in server.asked[0]
    with pytest.raises(
        ConfigError, match=r"^--server: expected an address such as .* found 'localhost:8000'"
    ):
        model_client("--server", "localhost:8000", "/completions", None, 2, 5.0)
