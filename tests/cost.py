"""Prints which files of tests cost the most processor seconds: bash tests/run.sh -p tests.cost

Counted are the process of the tests and the children that it has waited for; not the processes of
Ray, which are others' children."""

from __future__ import annotations

import collections
import resource
from collections.abc import Iterator
from typing import Any

import pytest

SHOWN = 25
OUTPUT = "cost"
"""Where a worker of xdist leaves its seconds for the process that prints."""


def processor_seconds() -> float:
    """User and system seconds of this process and its ended children."""
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


class Cost:
    """Seconds by file. What happens between two tests (collection, a fixture's end) is the next
    one's."""

    def __init__(self) -> None:
        self.by_file: collections.Counter[str] = collections.Counter()
        self._before = 0.0

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        yield
        now = processor_seconds()
        self.by_file[item.nodeid.partition("::")[0]] += now - self._before
        self._before = now

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[OUTPUT] = dict(self.by_file)

    @pytest.hookimpl(optionalhook=True)  # of xdist
    def pytest_testnodedown(self, node: Any) -> None:
        self.by_file.update(getattr(node, "workeroutput", {}).get(OUTPUT, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = sum(self.by_file.values())
        terminalreporter.section(f"{total:.0f} processor seconds, by file")
        for file, seconds in self.by_file.most_common(SHOWN):
            terminalreporter.line(f"{seconds:7.1f} s  {file}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cost(), "processor seconds by file")
