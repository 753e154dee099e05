"""A retrieval service that lives as long as the run: started as a process of its own, checked, and
stopped at the end."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rlflow.components import check_options
from rlflow.errors import ConfigError
from rlflow.net.http import Retryable, backoff_s, fetch
from rlflow.storage.child import Child
from rlflow.values import PositiveFloat
from rlflow_environments.retrieval.client.client import HttpRetriever
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.retrieval.indices.make import RETRIEVER, retriever_facts

logger = logging.getLogger(__name__)

STOP_S = 12.0  # the server itself takes at most 10
NAME = "environment.managed: the retrieval service"
STARTING = {"stage": "starting", "progress": 0.0}
POLL_S, REPORT_EVERY_S = 0.2, 10.0  # before it is started again, at first and at most
MAX_RESTARTS = 5  # of a service that dies again before it has lived for STEADY_S
STEADY_S = 300.0
_ADDRESS = re.compile(r"serving on (http://\S+)")


class ManagedServer:
    """`rlflow search serve` as a child process on a free port of this machine.

    It ends with `stop`, with this object, and when this process ends in whatever way. Where it ends
    by itself once it was ready, it is started again on its port; searches wait for it as for any
    server."""

    def __init__(
        self,
        component: Mapping[str, Any],
        corpus: str | Path | None,
        *,
        wait_s: PositiveFloat = 3600.0,
        client: Mapping[str, Any] | None = None,
        server: Sequence[str] = (),
        log: str | Path | None = None,
    ) -> None:
        """Returns when the service is ready. component: the retriever. wait_s: for that. client:
        options of HttpRetriever. server: further flags of `rlflow search serve`. log: where the
        service's output goes (default: kept until the end). Raises ConfigError: the service ended
        or was not ready in time; with what it said."""
        self._folder = Path(tempfile.mkdtemp(prefix="rlflow-search-"))
        self.log = Path(log) if log is not None else self._folder / "server.log"
        # In a folder of this user alone, as every user can read a command line; kept to the end, as
        # a service may be restarted.
        described = self._folder / "retriever.json"
        described.write_text(json.dumps(dict(component)), encoding="utf-8")
        arguments = ["--retriever", f"@{described}"]
        if corpus is not None:
            arguments += ["--corpus", str(Path(corpus).expanduser().resolve())]
        self.log.write_bytes(b"")
        self._service = _Service([*arguments, *map(str, server)], self.log, self._folder)
        self._stop = weakref.finalize(self, self._service.end)
        try:
            self.url = self._wait(wait_s)
            self._service.keep(self.url)
            self.client: dict[str, Any] = {**dict(client or {}), "urls": self.url}
            self.retriever = HttpRetriever(**self.client)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the service; nothing happens the second time."""
        if self._stop.alive and hasattr(self, "retriever"):
            self.retriever.close()
        self._stop()

    def _wait(self, wait_s: float) -> str:
        """The service's URL, once it is ready."""
        seen: dict[str, Any] = {}

        def ready() -> str | None:
            match = _ADDRESS.search(self.log.read_text(encoding="utf-8", errors="replace"))
            seen.update(_health(match[1]) if match else STARTING)
            return match[1] if match and seen.get("status") == "ready" else None

        def state() -> str:
            return f"{seen.get('stage')}, {seen.get('progress', 0.0):.0%} done"

        return self._service.child.wait_until(ready, wait_s, "managed.wait_s", state)


def start_managed(
    component: Any,
    corpus: str | Path | None,
    options: bool | Mapping[str, Any],
    pages: str | Path | None = None,
    host: str | None = None,
) -> ManagedServer:
    """The service of an environment's `retriever` and `managed` options. pages: a .jsonl file that
    it is to serve. host: where it listens, None: 127.0.0.1. Raises ConfigError."""
    described, given = managed_options(component, options)
    flags = [] if host is None else ["--host", host]
    if pages is not None:
        flags += ["--pages", str(Path(pages).expanduser().resolve())]
    # The last of several counts.
    return ManagedServer(
        described, corpus, **{**given, "server": [*flags, *given.get("server", ())]}
    )


def managed_options(
    component: Any, options: bool | Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the retriever to serve, options of ManagedServer). Raises ConfigError."""
    if isinstance(component, Retriever):
        raise ConfigError(
            "environment.managed: expected the retriever by name and options, found an object."
        )
    described = RETRIEVER.component(component, "environment.retriever")
    if retriever_facts(described, "environment.retriever").elsewhere:
        raise ConfigError(
            f"environment.managed: the retriever is {described['name']}, a server that runs "
            "already. Name the one to start."
        )
    given = {} if isinstance(options, bool) else options
    where, reserved = "environment.managed", ("component", "corpus")
    return described, check_options(given, ManagedServer, where=where, reserved=reserved)


def _health(url: str) -> dict[str, Any]:
    try:
        return fetch(f"{url}/health").json()
    except (Retryable, ValueError):
        return STARTING


class _Service:
    """The child process, started again where it dies."""

    def __init__(self, arguments: Sequence[str], log: Path, folder: Path) -> None:
        """Starts it on a free port. folder: removed at the end."""
        self._arguments, self._log, self._folder = list(arguments), log, folder
        self._over = threading.Event()
        self._changing = threading.Lock()
        self._port = self._deaths = 0
        self.child = self._start()

    def keep(self, url: str) -> None:
        """From now on the process is started again where it ends, at the same address."""
        self._port = int(url.rpartition(":")[2])
        self.child.ended.add_done_callback(self._start_again)

    def end(self) -> None:
        """Ends the process, by force if it must, and removes the folder."""
        self._over.set()
        with self._changing:
            self.child.stop(STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> Child:
        self._started = time.monotonic()
        command = [sys.executable, "-P", "-m", "rlflow_environments.retrieval", "serve"]
        return Child(
            NAME,
            [*command, "--port", str(self._port), *self._arguments],
            self._log,
            variables={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            error=ConfigError,
        )

    def _start_again(self, ended: Future[int]) -> None:
        """In the thread that has waited for the child's end."""
        if self._over.is_set():
            return
        if time.monotonic() - self._started > STEADY_S:
            self._deaths = 0
        self._deaths += 1
        then = f"it is started again on port {self._port}"
        if self._deaths > MAX_RESTARTS:
            then = f"it is given up, after {self._deaths} times in a row"
        logger.warning("the retrieval service ended with code %s: %s", ended.result(), then)
        if self._deaths > MAX_RESTARTS or self._over.wait(
            backoff_s(POLL_S, REPORT_EVERY_S, self._deaths)
        ):
            return
        with self._changing:
            if not self._over.is_set():
                self.child.stop(0)
                self.child = self._start()
                self.child.ended.add_done_callback(self._start_again)
