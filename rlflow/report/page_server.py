"""A small server for the page of a run: on 127.0.0.1, under an address that holds a token.

It can neither slow nor end the run: clients that are slow or silent lose their place."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from rlflow.places import Places

logger = logging.getLogger(__name__)

REQUEST_S = 10.0  # for a whole request
MOST_CLIENTS = 16
RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
    "img-src data:; connect-src 'self'; base-uri 'none'"
)
"""Content-Security-Policy: nothing is loaded, and only the page's own script runs."""
Answer = Callable[[str, str], "str | None"]
"""(path behind the token, nonce of the page's script) -> the text; None: there is none."""


class PageServer:
    """Answers `/TOKEN/...` with what `answer` returns, which it calls in another thread."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        """Raises OSError where the port cannot be had."""
        self.token = secrets.token_urlsafe(16)
        self._server = _Host(("127.0.0.1", port), _Request)
        self._server.token, self._server.answer = self.token, answer
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, name="rlflow-page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self._server.server_port}/{self.token}/"

    def close(self) -> None:
        """Ends the service; answers that are under way are cut."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=REQUEST_S)


class _Request(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server_version, sys_version = "rlflow", ""

    def do_GET(self) -> None:
        host, nonce = cast(_Host, self.server), secrets.token_urlsafe(12)
        # By another name a page of another site may have sent the browser here, to read this one.
        names = [f"{name}:{host.server_port}" for name in ("127.0.0.1", "localhost")]
        given, _, rest = self.path.removeprefix("/").partition("/")
        known = secrets.compare_digest(given.encode(), host.token.encode())
        if not known or self.headers.get("Host", "") not in names:
            self.send_error(404)
            return
        try:
            text = host.answer(rest, nonce)
        except Exception:
            logger.info("the page could not be made", exc_info=True)
            self.send_error(500)
            return
        if text is None:
            self.send_error(404)
            return
        body = text.encode("utf-8", "replace")
        self.send_response(200)
        self.send_header("Content-Type", f"text/{'plain' if rest else 'html'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", RULES.format(nonce=nonce))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


class _Host(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a full one makes a newcomer wait a second before the kernel retries
    token: str
    answer: Answer

    def __init__(self, address: tuple[str, int], request: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, request)
        self._places = Places(MOST_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own."""
        self._places.take(request, client_address[0], lambda: _hang_up(request))
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.leave(request)

    def service_actions(self) -> None:
        """Twice a second: whoever takes longer than REQUEST_S for a whole request is left alone."""
        self._places.end(REQUEST_S)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nobody's problem."""


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
