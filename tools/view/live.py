"""The page of a running run: the page of `rlflow view`, served, and written at the end.

It is served on 127.0.0.1, under an address that holds a token, and can neither slow nor end the
run: clients that are slow or silent lose their place."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from rlflow.errors import RLFlowError
from rlflow.net.places import Places
from rlflow.report.terminal import Progress
from rlflow.run.directory import RunDirectory
from rlflow.storage.daemon import start_daemon

from .page import (
    END,
    Content,
    Entry,
    chunk_of,
    content_of,
    entries,
    packed,
    parts,
    shell,
    steps_of,
    template,
    write_page,
)
from .recorded import RunFiles

logger = logging.getLogger(__name__)

REST = 10.0  # times what a look at the files took, until the next one: 10% of a processor at most
WRITTEN = ("metrics.jsonl", "trajectories", "tokens", "evaluations", "summary.json")
"""Files and folders in which something changes once the run has written more."""
REQUEST_S = 10.0  # for a whole request
MOST_CLIENTS = 16
ADDRESS = ("127.0.0.1", 0)
RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
    "img-src data:; connect-src 'self'; base-uri 'none'"
)
"""Content-Security-Policy: nothing is loaded, and only the page's own script runs."""
Answer = Callable[[str, str], "str | None"]
"""(path behind the token, nonce of the page's script) -> the text; None: there is none."""


class LivePage:
    """A sink that shows a run's files as they are now, at `url`, and writes them as a page in the
    end; a failure is one warning, not the run's."""

    def __init__(self, progress: Progress) -> None:
        self._run: Path | None = None  # once there is a directory
        self._progress = progress
        self._lock = threading.Lock()
        self._content = Content(progress.title, opens="run")
        self._version, self._look_at = 0, 0.0
        self._seen: list[int] = []
        self._entries: dict[tuple[str, int, int], list[Entry]] = {}
        self._server: PageServer | None = None
        self.url = ""  # where it is not served
        try:
            self._server = PageServer(self._answer)
        except OSError as error:
            found = error.strerror or error
            logger.warning("metrics.page: no page (%s); the run goes on without it", found)
        else:
            self.url = self._server.url
            progress.message(f"page: {self.url}")

    def open(self, directory: Path) -> None:
        """Shows the run in this directory from now on."""
        self._run = directory

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing: whoever looks at the page makes it look at the files."""

    def report_files(self) -> dict[str, Path]:
        """The report, which is written once nothing else is."""
        return {} if self._run is None else {"report": RunDirectory(self._run).report}

    def close(self) -> None:
        """Writes the page as a file, as the run's report."""
        if self._run is None:
            return
        path = RunDirectory(self._run).report
        try:
            write_page(RunFiles.open(self._run), path, opens="run")
        except (OSError, RLFlowError) as error:
            logger.warning("metrics.page: %s not written (%s); the run goes on", path, error)

    def stop(self) -> None:
        """Ends the service."""
        if self._server is not None:
            self._server.close()

    def _answer(self, path: str, nonce: str) -> str | None:
        content = self._look()
        content.status = self._progress.status()
        if path == "":
            live = f"let version = {self._version};\n{template('live.js')}"
            return shell(content, RULES.format(nonce=nonce), nonce, live) + END
        if path.startswith("now-"):
            told: dict[str, Any] = {"status": content.status, "version": self._version}
            # What else is on the page, if the browser does not know it yet
            if path != f"now-{self._version}":
                names = ("holds", "findings", "overview", "index")
                told |= {name: getattr(content, name) for name in names}
            return json.dumps(told)
        group = next((one for one in content.groups if one["chunk"] == path), None)
        if group is None or self._run is None:
            return None
        place, run = (group["kind"], group["step"]), RunFiles.open(self._run)
        part = parts(run, *place).get(path) if place in steps_of(run) else None
        return packed(chunk_of(run, part, *place)) if part else None

    def _look(self) -> Content:
        """The content, made anew where there is more and the last look was a while ago."""
        with self._lock:
            began = time.monotonic()
            if self._run is None or began < self._look_at:
                return self._content
            there = [self._run / name for name in WRITTEN]
            seen = [path.stat().st_mtime_ns for path in there if path.exists()]
            if seen == self._seen:
                return self._content
            run, groups = RunFiles.open(self._run), list[Entry]()
            for place in steps_of(run):
                # The last evaluation may be a second one at its step
                version = (*place, run.file(*place).stat().st_mtime_ns)
                if version not in self._entries:
                    self._entries[version] = [
                        entry
                        for name, part in parts(run, *place).items()
                        for entry in entries(run, part, *place, name)
                    ]
                groups += self._entries[version]
            self._content, _ = content_of(run, groups, opens="run")
            self._seen, self._version = seen, self._version + 1
            self._look_at = time.monotonic() + REST * (time.monotonic() - began)
            return self._content


class _Request(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server_version, sys_version = "rlflow", ""

    def do_GET(self) -> None:
        host, nonce = cast(PageServer, self.server), secrets.token_urlsafe(12)
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


class PageServer(ThreadingHTTPServer):
    """Answers `/TOKEN/...` with what `answer` returns, which it calls in another thread."""

    # A full one makes a newcomer wait a second before the kernel retries
    request_queue_size = 128

    def __init__(self, answer: Answer) -> None:
        """Raises OSError where the port cannot be had."""
        super().__init__(ADDRESS, _Request)
        self.answer, self.token = answer, secrets.token_urlsafe(16)
        self.url = f"http://{ADDRESS[0]}:{self.server_port}/{self.token}/"
        self._places = Places(MOST_CLIENTS)
        self._thread = start_daemon("rlflow-page", self.serve_forever)

    def close(self) -> None:
        """Ends the service; answers that are under way are cut."""
        self.shutdown()
        self.server_close()
        self._thread.join(timeout=REQUEST_S)

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
