"""What a run tells while it goes on, and its display as lines: one per step, where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rlflow.report.lines import clock as read_clock
from rlflow.report.lines import evaluated_line, step_line, summary_text
from rlflow.report.metrics import PHASES, Metrics
from rlflow.report.pace import Pace

if TYPE_CHECKING:  # rlflow.types brings torch
    from rlflow.types import Trajectory


class Progress:
    """Told what happens; this one shows nothing of it."""

    registered: Metrics = {}
    """Of the environment; set once it is made."""

    def phase(self, name: str, detail: str = "") -> None:
        """What the run does from now on: a phase name (`metrics.names.PHASES`), or free text such as "loading the model"."""

    def episode(self, ended: int, total: int, trajectory: Trajectory) -> None:
        """So many of the episodes of this phase have ended, the given one just now. Comes from another thread."""

    def restore(self, records: Sequence[Mapping[str, float]]) -> None:
        """What earlier sessions of a resumed run logged, by ascending step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ended with these metrics."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation ended; metrics are `eval/...`."""

    def message(self, text: str) -> None:
        """One line that stays on the screen."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended; `summary` is what summary.json holds."""

    def close(self) -> None:
        """Nothing more comes."""


class PlainProgress(Progress):
    """One line per step and per evaluation: for logs, CI and pipes."""

    def __init__(self, pace: Pace, title: str, stream: TextIO) -> None:
        self.pace, self.stream = pace, stream
        self.message(title)

    def phase(self, name: str, detail: str = "") -> None:
        if name not in PHASES:
            self.message(f"{name} {detail}".strip())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pace.step(step, metrics)
        remaining = self.pace.remaining_s
        ends = "" if remaining is None else f"  ETA {read_clock(remaining)}"
        self.message(step_line(step, self.pace.steps, metrics, self.registered) + ends)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.message(evaluated_line(step, self.pace.steps, metrics, self.registered))

    def message(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self.message(summary_text(summary, self.registered))
