"""The timeline of an asynchronous run, for chrome://tracing and ui.perfetto.dev: what the trainer did, and every episode."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

from rlflow.report.charts import timeline_svg
from rlflow.run.journal import AttemptJournal
from rlflow.storage.files import write_json, write_text

TRAINER, EPISODES = 1, 2  # the processes of workers come behind


def write_trace(journal: AttemptJournal, path: str | Path) -> int:
    """Writes the trace as JSON in Chrome's format, or as a picture where the name ends in .svg; returns the number of its spans.
    Raises OSError."""
    events = trace_events(journal)
    if Path(path).suffix == ".svg":
        write_text(path, timeline_svg(events))
    else:
        write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
    return sum(event["ph"] == "X" for event in events)


def trace_events(journal: AttemptJournal) -> list[dict[str, Any]]:
    """Chrome's events: names of the processes, the trainer and each worker, then spans in microseconds since the first one began.
    Episodes that overlap lie in different lanes, each in the first that is free; those that were lost with a worker too."""
    phases, played = journal.phases(), journal.played()
    episodes: list[tuple[float, float, str, str, dict[str, Any]]] = []
    for group, sample, begun, ended, oldest, newest, step, worker in played:
        facts = {"sample": sample, "oldest version": oldest, "newest version": newest, "trained in step": step}
        episodes.append((begun, ended, worker, group, facts))
    episodes += [
        (begun, ended, worker, f"lost: {group}", {"sample": sample, "reason": reason})
        for group, sample, begun, ended, worker, reason in journal.losses()
    ]
    episodes.sort(key=lambda one: one[0])
    zero = min([begun for _, begun, _ in phases] + [one[0] for one in episodes], default=0.0)
    names = sorted({one[2] for one in episodes} or {""}, key=lambda name: (len(name), name))
    processes = {name: EPISODES + place for place, name in enumerate(names)}
    titles = {TRAINER: "trainer", **{pid: f"worker {name}" if name else "episodes" for name, pid in processes.items()}}
    events = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in titles.items()]
    events += [_span(TRAINER, 0, name, begun - zero, ended - zero) for name, begun, ended in phases]
    lanes = {name: _Lanes() for name in names}
    for begun, ended, worker, title, facts in episodes:
        events.append(
            _span(processes[worker], lanes[worker].take(begun, ended), title, begun - zero, ended - zero, facts)
        )
    return events


class _Lanes:
    """Gives each span the first lane that is free; spans come in the order in which they begin."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._busy: list[tuple[float, int]] = []  # until when, lane

    def take(self, begun: float, ended: float) -> int:
        while self._busy and self._busy[0][0] <= begun:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        lane = heapq.heappop(self._free) if self._free else len(self._busy)
        heapq.heappush(self._busy, (ended, lane))
        return lane


def _span(
    process: int, lane: int, name: str, begin_s: float, end_s: float, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    times = {"ts": round(begin_s * 1e6), "dur": round((end_s - begin_s) * 1e6)}
    return {"ph": "X", "name": name, "pid": process, "tid": lane, **times, "args": facts or {}}
