"""The timeline of an asynchronous run, for chrome://tracing and ui.perfetto.dev: what the trainer did, and every episode."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

from rlflow.run.journal import AttemptJournal
from rlflow.storage.files import write_json

TRAINER, EPISODES = 1, 2


def write_trace(journal: AttemptJournal, path: str | Path) -> int:
    """Writes the trace as JSON in Chrome's format; returns the number of its spans. Raises OSError."""
    events = trace_events(journal)
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
    return sum(event["ph"] == "X" for event in events)


def trace_events(journal: AttemptJournal) -> list[dict[str, Any]]:
    """Chrome's events: names of the two processes, then spans in microseconds since the first one began. Episodes that overlap
    lie in different lanes, each in the first that is free."""
    phases, played = journal.phases(), journal.played()
    zero = min([begun for _, begun, _ in phases] + [row[2] for row in played], default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in ((TRAINER, "trainer"), (EPISODES, "episodes"))
    ]
    events += [_span(TRAINER, 0, name, begun - zero, ended - zero) for name, begun, ended in phases]
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # until when, lane
    for group, sample, begun, ended, oldest, newest, step in played:
        while busy and busy[0][0] <= begun:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ended, lane))
        facts = {"sample": sample, "oldest version": oldest, "newest version": newest, "trained in step": step}
        events.append(_span(EPISODES, lane, group, begun - zero, ended - zero, facts))
    return events


def _span(
    process: int, lane: int, name: str, begin_s: float, end_s: float, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    times = {"ts": round(begin_s * 1e6), "dur": round((end_s - begin_s) * 1e6)}
    return {"ph": "X", "name": name, "pid": process, "tid": lane, **times, "args": facts or {}}
