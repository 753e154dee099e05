"""Commands whose output is no longer read end without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.storage.unread import end_quietly

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = {
    "ckpt_convert": ["-m", "tools.ckpt_convert", "--help"],
    "rlflow": ["-m", "rlflow", "config"],
    "search": ["-m", "rlflow_environments.search", "--help"],
}


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> int:
    """Standard output into a pipe whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w", buffering=4096)  # noqa: SIM115 -- closed below
    monkeypatch.setattr(sys, "stdout", stream)
    yield writing
    stream.close()


def test_what_nobody_reads_is_no_error_and_the_status_stays(unread: int) -> None:
    def run(status: int, size: int) -> int:
        print("x" * size)
        return status

    assert end_quietly(lambda: run(3, 10)) == 3  # noticed when it is flushed
    assert end_quietly(lambda: run(0, 100_000)) == 0
    print("more", flush=True)  # goes nowhere


def test_another_pipe_that_breaks_is_an_error() -> None:
    def run() -> int:
        raise BrokenPipeError("a worker's")

    with pytest.raises(BrokenPipeError, match="a worker's"):
        end_quietly(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_console_commands_end_quietly_behind_head(name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.run(
        [sys.executable, *COMMANDS[name]],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writing)
    assert (child.returncode, child.stderr) == (0, "")
