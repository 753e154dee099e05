"""Serves the page of a run on this machine: 127.0.0.1, under an address that holds a token. It can neither slow nor end the
run."""

from __future__ import annotations

import hmac
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
_RULES = "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"


class PageServer:
    """Answers `/TOKEN/` with the page and `/TOKEN/content` with its changing part. page, content: make them, in another thread;
    they get the nonce of the page's script."""

    def __init__(self, page: Callable[[str], str], content: Callable[[], str], port: int = 0) -> None:
        """Raises OSError where the port cannot be had."""
        self.token = secrets.token_urlsafe(16)
        self._server = _PageHost(("127.0.0.1", port), self._handler(page, content))
        self._thread = threading.Thread(target=self._server.serve_forever, name="rlflow-page", daemon=True)
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

    def _handler(self, page: Callable[[str], str], content: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
        token = self.token

        class PageHandler(BaseHTTPRequestHandler):
            timeout = REQUEST_S
            server_version, sys_version = "rlflow", ""

            def do_GET(self) -> None:
                nonce = secrets.token_urlsafe(12)
                port = cast(ThreadingHTTPServer, self.server).server_port
                # The name by which a browser was sent here: a page of another site may not read this one by a name of its own.
                host = self.headers.get("Host", "")
                given, _, rest = self.path.removeprefix("/").partition("/")
                known = hmac.compare_digest(given.encode(), token.encode())
                if host not in (f"127.0.0.1:{port}", f"localhost:{port}") or not known or rest not in ("", "content"):
                    self.send_error(404)
                    return
                try:
                    body = (page(nonce) if rest == "" else content()).encode("utf-8", "replace")
                except Exception:
                    logger.info("the page could not be made", exc_info=True)
                    self.send_error(500)
                    return
                self.send_response(200)
                rules = f"{_RULES}; script-src 'nonce-{nonce}'"
                for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body))),
                                    ("Content-Security-Policy", rules), ("Cache-Control", "no-store"),
                                    ("Referrer-Policy", "no-referrer"), ("X-Content-Type-Options", "nosniff")):  # fmt: skip
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        return PageHandler


class _PageHost(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a full one makes a newcomer wait a second before the kernel tries again

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._places = Places(MOST_CLIENTS)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """In a thread of its own."""
        self._places.take(request, client_address[0], lambda: _hang_up(cast(socket.socket, request)))
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
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
