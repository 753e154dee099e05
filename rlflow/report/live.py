"""The page of a run that goes on: what `rlflow view` writes, served; its report at the end."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from pathlib import Path

from rlflow.errors import RLFlowError
from rlflow.report.page import (
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
from rlflow.report.page_server import RULES, PageServer
from rlflow.report.recorded import RunFiles
from rlflow.report.terminal import Progress

logger = logging.getLogger(__name__)

REST = 10.0  # times what a look at the files took, until the next one: 10% of a processor at most
_CHUNK = re.compile(r"chunk-(train|eval)-(\d+)-(\d+)")


class LivePage:
    """Shows a run's files as they are now, at `url`. Where it cannot be served or written, one line
    in the log says so, and the run goes on."""

    def __init__(self, progress: Progress) -> None:
        self.run: Path | None = None  # once there is a directory
        self._progress = progress
        self._lock = threading.Lock()
        self._content = Content(progress.title, opens="run")
        self._version, self._look_at = 0, 0.0
        self._seen: tuple[int, ...] = ()
        self._entries: dict[tuple[str, int], list[Entry]] = {}
        self._server: PageServer | None = None
        try:
            self._server = PageServer(self._answer)
        except OSError as error:
            told = "metrics.page: the page cannot be served (%s); the run goes on without it"
            logger.warning(told, error.strerror or error)
        else:
            progress.message(f"page: {self.url}")

    @property
    def url(self) -> str:
        """Where the page is; empty where it is not served."""
        return self._server.url if self._server is not None else ""

    def write(self, path: Path) -> None:
        """Writes the page as a file, as the run's report."""
        if self.run is None:
            return
        try:
            write_page(RunFiles.open(self.run), path, opens="run")
        except (OSError, RLFlowError) as error:
            told = "metrics.page: %s cannot be written (%s); the run goes on without it"
            logger.warning(told, path, error)

    def close(self) -> None:
        """Ends the service."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _answer(self, path: str, nonce: str) -> str | None:
        if not path:
            content = self._look()
            content.status = self._progress.status()
            index = f"let version = {self._version};\n"
            live = index + template("live.js")
            return shell(content, RULES.format(nonce=nonce), nonce, live) + "</body></html>\n"
        if path.startswith("now-"):
            return self._now(path.removeprefix("now-"))
        asked = _CHUNK.fullmatch(path)
        if asked is None or self.run is None:
            return None
        kind, step, part = asked[1], int(asked[2]), int(asked[3])
        run = RunFiles.open(self.run)
        if (kind, step) not in steps_of(run):
            return None
        for place, groups in enumerate(parts(run, kind, step)):
            if place == part:
                return packed(chunk_of(run, groups, kind, step))
        return None

    def _now(self, known: str) -> str:
        """The status; and what else is on the page, if the browser does not know it yet."""
        content = self._look()
        told = {"status": self._progress.status(), "version": self._version}
        if known != str(self._version):
            names = ("holds", "findings", "overview", "index")
            told |= {name: getattr(content, name) for name in names}
        return json.dumps(told)

    def _look(self) -> Content:
        """The content, made anew where there is more and the last look was a while ago."""
        with self._lock:
            began = time.monotonic()
            seen = _state(self.run) if self.run is not None else ()
            if self.run is None or seen == self._seen or began < self._look_at:
                return self._content
            run = RunFiles.open(self.run)
            for kind, step in steps_of(run):
                if (kind, step) not in self._entries:
                    self._entries[kind, step] = [
                        entry
                        for part, groups in enumerate(parts(run, kind, step))
                        for entry in entries(run, groups, kind, step, part)
                    ]
            groups = [entry for place in steps_of(run) for entry in self._entries[place]]
            self._content, _ = content_of(run, groups, opens="run")
            self._seen, self._version = seen, self._version + 1
            self._look_at = time.monotonic() + REST * (time.monotonic() - began)
            return self._content


def _state(run: Path) -> tuple[int, ...]:
    """What differs once the run has written more."""
    names = ("metrics.jsonl", "trajectories", "tokens", "evaluations", "summary.json")
    there = [run / name for name in names if (run / name).exists()]
    return tuple(path.stat().st_mtime_ns for path in there)
