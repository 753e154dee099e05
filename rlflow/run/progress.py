"""What a person sees while a run goes on: a live panel on a terminal, else one line per step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rlflow.errors import ConfigError, MissingPackageError, did_you_mean
from rlflow.metrics.names import PHASES, Metrics
from rlflow.run.clock import Clock
from rlflow.run.lines import clock as read_clock
from rlflow.run.lines import evaluated_line, step_line, summary_text
from rlflow.run.pace import Pace
from rlflow.run.panel import RichProgress

if TYPE_CHECKING:  # rlflow.types brings torch
    from rlflow.types import Trajectory

KINDS = ("auto", "rich", "plain", "none")


class Progress(Protocol):
    """Told what happens; shows it."""

    registered: Metrics
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

    def warned(self, step: int, text: str) -> None:
        """A sign that something goes wrong; it stands in the terminal and in the log already."""

    def message(self, text: str) -> None:
        """One line that stays on the screen."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended; `summary` is what summary.json holds."""

    def close(self) -> None: ...


def make_progress(
    kind: str = "auto",
    *,
    steps: int,
    title: str = "rlflow",
    first_step: int = 0,
    stream: TextIO | None = None,
    clock: Clock | None = None,
) -> Progress:
    """A display. auto: rich on a terminal, plain elsewhere. `first_step` is the step that a resumed run starts from.

    Raises:
        ConfigError: unknown kind.
        MissingPackageError: rich was asked for and is not installed.
    """
    stream = stream or sys.stderr
    if kind not in KINDS:
        raise ConfigError(
            f"metrics.progress: expected one of {', '.join(KINDS)}, found '{kind}'.{did_you_mean(kind, KINDS)}"
        )
    if kind == "none":
        return NoProgress()
    pace = Pace(steps, first_step, clock)
    if kind == "rich" or (kind == "auto" and stream.isatty()):
        try:
            return RichProgress(pace, title, stream)
        except ImportError:
            if kind == "rich":
                raise MissingPackageError(
                    "metrics.progress: the package 'rich' is not installed: pip install rich."
                ) from None
    return PlainProgress(pace, title, stream)


class NoProgress:
    """Shows nothing."""

    registered: Metrics = {}

    def phase(self, name: str, detail: str = "") -> None: ...

    def episode(self, ended: int, total: int, trajectory: Trajectory) -> None: ...

    def restore(self, records: Sequence[Mapping[str, float]]) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def warned(self, step: int, text: str) -> None: ...

    def message(self, text: str) -> None: ...

    def finished(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class PlainProgress:
    """One line per step and per evaluation: for logs, CI and pipes."""

    registered: Metrics = {}

    def __init__(self, pace: Pace, title: str, stream: TextIO) -> None:
        self.pace, self.stream = pace, stream
        self.message(title)

    def phase(self, name: str, detail: str = "") -> None:
        if name not in PHASES:
            self.message(f"{name} {detail}".strip())

    def episode(self, ended: int, total: int, trajectory: Trajectory) -> None: ...

    def restore(self, records: Sequence[Mapping[str, float]]) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pace.step(step, metrics)
        remaining = self.pace.remaining_s
        ends = "" if remaining is None else f"  ETA {read_clock(remaining)}"
        self.message(step_line(step, self.pace.steps, metrics, self.registered) + ends)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.message(evaluated_line(step, self.pace.steps, metrics, self.registered))

    def warned(self, step: int, text: str) -> None: ...

    def message(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self.message(summary_text(summary, self.registered))

    def close(self) -> None: ...
