"""A retrieval service that lives as long as the run: started as a process of its own, checked, and
stopped at the end."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.components import check_options
from rlflow.errors import ConfigError
from rlflow.http import Retryable, backoff_s, fetch
from rlflow.types import Task
from rlflow.values import PositiveFloat, PositiveInt, Share
from rlflow_environments.retrieval.client.client import HttpRetriever
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.errors import RetrievalError
from rlflow_environments.retrieval.indices import Retriever
from rlflow_environments.retrieval.indices.make import RETRIEVER
from rlflow_environments.retrieval.server.records import StoredCorpus
from rlflow_environments.search.rewards import scoring

logger = logging.getLogger("rlflow.search.managed")  # under `rlflow`, so that a run's log has it

STOP_S = 12.0  # the server itself takes at most 10
POLL_S = 0.2
REPORT_EVERY_S = 10.0
MAX_RESTARTS = 5  # of a service that dies again before it has lived for STEADY_S
STEADY_S = 300.0
OPENING_WORDS = 12  # of a passage, asked for with its title
RECALL = ("questions", "min_recall")
"""The options of `managed` that `check_recall` takes."""
_ADDRESS = re.compile(r"serving on (http://\S+)")


class ManagedServer:
    """`rlflow search serve` as a child process on a free port of this machine.

    It ends with `stop`, with this object, and when this process ends in whatever way: it watches
    for its parent. Where it ends by itself once it was ready, it is started again on its port;
    searches wait for it as for any server."""

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
        arguments = ["--retriever", f"@{described}", "--parent", str(os.getpid())]
        if corpus is not None:
            arguments += ["--corpus", str(Path(corpus).expanduser().resolve())]
        self.log.write_bytes(b"")
        self._service = _Service([*arguments, *map(str, server)], self.log, self._folder)
        self._stop = weakref.finalize(self, self._service.end)
        try:
            self.url = self._wait(wait_s)
            self._service.supervise(self.url)
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
        start = reported = time.monotonic()
        while True:
            match = _ADDRESS.search(self._output())
            health = _health(match[1]) if match else {"stage": "starting", "progress": 0.0}
            if match and health.get("status") == "ready":
                logger.info(
                    "the retrieval service is ready at %s after %.1f s",
                    match[1],
                    time.monotonic() - start,
                )
                return match[1]
            state = f"{health.get('stage')}, {health.get('progress', 0.0):.0%} done"
            if (code := self._service.ended()) is not None:
                raise ConfigError(
                    f"environment.managed: the retrieval service ended with code {code}: "
                    f"{self._last_words()}"
                )
            now = time.monotonic()
            if now - start > wait_s:
                raise ConfigError(
                    f"environment.managed: the retrieval service is not ready after {wait_s:g} s: "
                    f"{state}."
                )
            if now - reported >= REPORT_EVERY_S:
                reported = now
                logger.warning("waiting for the retrieval service (%.0f s): %s", now - start, state)
            time.sleep(POLL_S)

    def _output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _last_words(self) -> str:
        lines = [line for line in self._output().splitlines() if line.strip()]
        return lines[-1].removeprefix("rlflow: ") if lines else "it said nothing."


def start_managed(
    component: Any,
    corpus: str | Path | None,
    options: bool | Mapping[str, Any],
    tasks: Sequence[Task],
    top_k: int,
    pages: str | Path | None = None,
    host: str | None = None,
) -> ManagedServer:
    """The service of an environment's `retriever` and `managed` options, with its recall checked
    where there is a corpus.

    pages: a .jsonl file that it is to serve. host: where it listens, None: 127.0.0.1. Raises
    ConfigError."""
    described, given, recall = managed_options(component, options)
    if host is not None:
        given["server"] = ["--host", host, *given.get("server", ())]  # the last of several counts
    if pages is not None:
        given["server"] = [
            "--pages",
            str(Path(pages).expanduser().resolve()),
            *given.get("server", ()),
        ]
    service = ManagedServer(described, corpus, **given)
    try:
        if corpus is not None:
            check_recall(service.retriever, StoredCorpus(corpus), tasks, top_k, **recall)
    except BaseException:
        service.stop()
        raise
    return service


def managed_options(
    component: Any, options: bool | Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(the retriever to serve, options of ManagedServer, options of `check_recall`). Raises
    ConfigError."""
    if isinstance(component, Retriever):
        raise ConfigError(
            "environment.managed: expected the retriever by name and options, found an object."
        )
    described = RETRIEVER.component(component, "environment.retriever")
    if described.get("name") == "http":
        raise ConfigError(
            "environment.managed: the retriever is http, a server that runs already. Name the one "
            "to start."
        )
    given: dict[str, Any] = {}
    if not isinstance(options, bool):
        reserved = ("component", "corpus", "retriever", "tasks", "top_k")
        given = check_options(
            options, ManagedServer, check_recall, where="environment.managed", reserved=reserved
        )
    recall = {key: given.pop(key) for key in RECALL if key in given}
    return described, given, recall


def check_recall(
    retriever: Retriever,
    corpus: Sequence[Passage],
    tasks: Sequence[Task],
    top_k: int,
    *,
    questions: PositiveInt = 20,
    min_recall: Share = 0.5,
) -> dict[str, float]:
    """Asks for what is known to be there; returns the shares that were found.

    passages: of passages spread over the corpus, asked for by title and first words, found under
    their title. answers: of the first training questions, asked as they stand, with a gold answer
    in the results (many need a second search: for information). Raises ConfigError where fewer
    passages are found than `min_recall`: index and corpus do not belong together."""
    count = min(questions, len(corpus))
    spread = [corpus[place * len(corpus) // count] for place in range(count)]
    known = [passage for passage in spread if passage.contents]
    asked = [
        f"{passage.title} {' '.join(passage.body.split()[:OPENING_WORDS])}" for passage in known
    ]
    asking = [task for task in tasks if isinstance(task.metadata.get("question"), str)][:questions]
    try:
        found = retriever.search(asked, top_k)
        results = retriever.search([task.metadata["question"] for task in asking], top_k)
    except RetrievalError as problem:
        raise ConfigError(
            f"environment.managed: the retrieval service does not answer: {problem}"
        ) from None
    passages = [
        any(hit.title == passage.title for hit in hits)
        for passage, hits in zip(known, found, strict=True)
    ]
    answers = [
        any(scoring.contains_gold(hit.contents, task.answer) for hit in hits)
        for task, hits in zip(asking, results, strict=True)
    ]
    shares = {"passages": sum(passages) / max(1, len(passages))}
    if answers:
        shares["answers"] = sum(answers) / len(answers)
    logger.info(
        "recall@%d before the first step: %s",
        top_k,
        ", ".join(f"{name} {share:.2f}" for name, share in shares.items()),
    )
    if shares["passages"] < min_recall:
        raise ConfigError(
            f"environment.managed: of {len(known)} passages of the corpus, asked for by their own "
            "words, the index finds "
            f"{shares['passages']:.0%}, expected {min_recall:.0%}. Was it built on another corpus "
            "or with another encoder? Lower "
            "managed.min_recall to go on."
        )
    return shares


def _health(url: str) -> dict[str, Any]:
    try:
        return fetch(f"{url}/health").json()
    except (Retryable, ValueError):
        return {"stage": "starting", "progress": 0.0}


class _Service:
    """The child process, started again where it dies."""

    def __init__(self, arguments: Sequence[str], log: Path, folder: Path) -> None:
        """Starts it on a free port. folder: removed at the end."""
        self._arguments, self._log, self._folder = list(arguments), log, folder
        self._over = threading.Event()
        self._changing = threading.Lock()
        self.process = self._start(0)

    def ended(self) -> int | None:
        """The code that the process ended with, None while it runs."""
        return self.process.poll()

    def supervise(self, url: str) -> None:
        """From now on the process is started again where it ends, at the same address."""
        port = int(url.rpartition(":")[2])
        threading.Thread(
            target=self._watch, args=(port,), name="managed-service", daemon=True
        ).start()

    def end(self) -> None:
        """Ends the process, by force if it must, and removes the folder."""
        self._over.set()
        with self._changing:
            process = self.process
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rlflow_environments.retrieval",
                    "serve",
                    "--port",
                    str(port),
                    *self._arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the run, which then stops the service
            )

    def _watch(self, port: int) -> None:
        deaths = 0
        started = time.monotonic()
        while not self._over.wait(POLL_S):
            code = self.ended()
            if code is None:
                deaths = 0 if time.monotonic() - started > STEADY_S else deaths
                continue
            deaths += 1
            if deaths > MAX_RESTARTS:
                logger.error(
                    "the retrieval service ended with code %s, %d times in a row: it is given up",
                    code,
                    deaths,
                )
                return
            logger.warning(
                "the retrieval service ended with code %s: it is started again on port %d",
                code,
                port,
            )
            if self._over.wait(backoff_s(POLL_S, REPORT_EVERY_S, deaths)):
                return
            with self._changing:
                if not self._over.is_set():
                    self.process = self._start(port)
            started = time.monotonic()
