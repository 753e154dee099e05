"""The timeline: spans where they belong, episodes side by side."""

from __future__ import annotations

import json
from pathlib import Path

from rlflow.run.journal import AttemptJournal
from rlflow.run.trace import write_trace


def test_phases_and_episodes_are_spans_in_microseconds_and_no_two_of_a_lane_overlap(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path / "journal.sqlite")
    number = journal.issue("a", 0, "0:a", 4)
    for sample, (begun, ended) in enumerate([(100.0, 103.0), (101.0, 102.0), (102.5, 104.0), (103.5, 105.0)]):
        journal.begin(number, sample, 1, 0, begun)
        journal.finish(number, sample, 1, b"", (0, sample), ended)
    journal.claim([number], 1)
    journal.note_phases([("rollout", 100.5, 105.0), ("update", 105.0, 106.25)])
    assert write_trace(journal, tmp_path / "trace.json") == 6
    journal.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(one["pid"], one["tid"], one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"]
    assert spans == [
        (1, 0, "rollout", 500_000, 4_500_000),
        (1, 0, "update", 5_000_000, 1_250_000),
        (2, 0, "0:a", 0, 3_000_000),
        (2, 1, "0:a", 1_000_000, 1_000_000),
        (2, 1, "0:a", 2_500_000, 1_500_000),
        (2, 0, "0:a", 3_500_000, 1_500_000),
    ]
    facts = {"sample": 3, "oldest version": 0, "newest version": 3, "trained in step": 1}
    assert events[-1]["args"] == facts


def test_a_run_that_has_done_nothing_has_an_empty_timeline(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path / "journal.sqlite")
    assert write_trace(journal, tmp_path / "trace.json") == 0
    journal.close()
