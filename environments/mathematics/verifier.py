"""Checks of answers in processes of their own, each with a deadline and a memory limit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, PolicyError, RLFlowError, install_command, needing
from rlflow.storage.child import last_said, start_answering

WORKER = Path(__file__).with_name("worker.py")
START_S, GRACE_S = 60.0, 2.0
PARSER, OLDEST_PARSER = "antlr4-python3-runtime", (4, 13, 2)
MOST_WAITS = 6  # a check may take so many times its seconds of a processor, on a busy machine
MOST_CHARACTERS = 2_000  # of an answer that is looked at
OF_THE_ANSWER = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that end a process for what it computes: formulas that are nested too deeply."""


def check_parser(version: str) -> None:
    """Raises ConfigError for a version of the parser with which math-verify reads percents wrongly."""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST_PARSER:
        oldest = ".".join(map(str, OLDEST_PARSER))
        raise ConfigError(
            f"environment mathematics: expected {PARSER} {oldest} or newer, found {version}, with "
            rf"which math-verify reads 50\% as 50: pip install '{PARSER}>={oldest}' (omegaconf before "
            "2.4 holds an older one), or set checks=numbers."
        )


class VerifierError(RLFlowError):
    """A check failed, by no fault of the answer's: it is neither right nor wrong."""


class UncheckableAnswerError(PolicyError):
    """The answer is too long, or its check takes more time or memory than there is."""


class Verifier:
    """At most `at_once` processes of math-verify, started when they are needed and again after one
    that ended. Its methods may be called from many threads.

    timeout_s: of a check, in seconds of a processor. memory_mb: of a process. Raises
    MissingPackageError without math-verify or its parser, ConfigError for a parser that is too
    old."""

    def __init__(
        self, at_once: int, timeout_s: float, memory_mb: int, program: Path = WORKER
    ) -> None:
        with needing("environment mathematics", install_command("mathematics")):
            if importlib.util.find_spec("math_verify") is None:
                raise ImportError(name="math-verify")
            parser_version = importlib.metadata.version(PARSER)
        check_parser(parser_version)
        self._counts: Counter[str] = Counter()
        self._timeout_s, self._command = timeout_s, (str(program), str(memory_mb))
        self._places = threading.Semaphore(at_once)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def same(self, wanted: str, found: str) -> bool:
        """Whether the answers are equal. Raises UncheckableAnswerError, VerifierError."""
        outcome = "unchecked"
        try:
            if len(found) > MOST_CHARACTERS:
                raise UncheckableAnswerError(
                    f"mathematics: an answer of {len(found):,} characters is not checked; at most "
                    f"{MOST_CHARACTERS:,}."
                )
            with self._places:
                same = self._asked({"wanted": wanted, "found": found, "limit_s": self._timeout_s})
            outcome = "checks"
            return same
        finally:
            with self._lock:
                self._counts[outcome] += 1

    def report(self) -> dict[str, float]:
        """How many answers were checked, and could not be, since the last call."""
        with self._lock:
            told, self._counts = self._counts, Counter()
        return {f"mathematics/{name}": float(told[name]) for name in ("checks", "unchecked")}

    def close(self) -> None:
        """Ends the processes, those that are busy when their check is over."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            _end(process)

    def _asked(self, question: dict[str, Any]) -> bool:
        process = self._taken()
        try:
            answer = _exchange(process, question, MOST_WAITS * self._timeout_s + GRACE_S)
        except BaseException:
            _end(process)
            raise
        with self._lock:
            closed = self._closed
            self._idle += [] if closed else [process]
        if closed:
            _end(process)
        if "same" not in answer:
            raise UncheckableAnswerError(
                f"mathematics: a check failed: {answer.get('failed', answer)}."
            )
        return bool(answer["same"])

    def _taken(self) -> subprocess.Popen[bytes]:
        """A process that waits for a question; a new one where none does."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._closed = False
        process = start_answering(*self._command)
        try:
            _exchange(process, None, START_S)
        except BaseException:
            _end(process)
            raise
        return process


def _exchange(
    process: subprocess.Popen[bytes], question: dict[str, Any] | None, limit_s: float
) -> dict[str, Any]:
    """The next line of a process, after a question. Raises VerifierError."""
    assert process.stdin is not None and process.stdout is not None
    until, data = time.monotonic() + limit_s, b""
    try:
        if question is not None:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not data.endswith(b"\n"):
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise VerifierError(f"mathematics: a check did not end within {limit_s:g} s.")
                more = os.read(process.stdout.fileno(), 1 << 16)
                if not more:
                    raise _ended(process)
                data += more
        answer: dict[str, Any] = json.loads(data)
    except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
        raise VerifierError(f"mathematics: a check's process failed: {problem}.") from None
    return answer


def _ended(process: subprocess.Popen[bytes]) -> RLFlowError:
    """What the end of a check's process says: its own signals are the answer's doing."""
    code = process.wait(GRACE_S)
    if code == -signal.SIGPROF:
        return UncheckableAnswerError("mathematics: a check took too much time.")
    if -code in OF_THE_ANSWER:
        return UncheckableAnswerError(f"mathematics: a check ended with code {code}.")
    told = f"the process of a check ended with code {code}: {last_said(process)}"
    return VerifierError(f"mathematics: {told}.")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    process.wait()
