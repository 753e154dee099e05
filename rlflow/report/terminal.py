"""The progress of a run: lines per step in the terminal and the log file, one of what goes on."""

from __future__ import annotations

import logging
import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlflow.report.lines import (
    clock,
    columns,
    ending,
    evaluation_parts,
    explanations,
    fitted,
    numbers,
    phase_times,
    summary_text,
)
from rlflow.report.metrics import PHASES, Metrics
from rlflow.report.timer import Clock
from rlflow.storage.redaction import redact_text
from rlflow.texts import printable

if TYPE_CHECKING:
    from rich.live import Live

logger = logging.getLogger(__name__)

SMOOTHED = 8  # steps that the remaining time is estimated from


class Progress:
    """A run's present and past work, told as it happens; shown as `kind` says.

    plain: a line per step and evaluation. rich: below them a line of what goes on, redrawn in
    place. auto: rich on a terminal, else plain. none: silent. Lines are as wide as the terminal,
    with what fits there, most telling first; the log has them whole. `first_step` is the step that a
    resumed run starts from. Set once they are known: `registered`, the environment's metrics, and
    `tasks_after`, the tasks that evaluations from a step on will still ask."""

    def __init__(
        self,
        kind: str = "none",
        *,
        steps: int = 0,
        title: str = "rlflow",
        first_step: int = 0,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.steps, self.done, self.title = steps, first_step, title
        self.clock = clock or Clock()
        self.registered: Metrics = {}
        self.tasks_after: Callable[[int], int] = lambda step: 0
        self._doing, self._since, self._counted = "starting", time.monotonic(), ""
        self._durations: list[float] = []
        self._task_s = math.nan  # of an evaluation, per task
        self._explained: set[str] = set()
        stream = stream or sys.stderr
        self._width = columns(stream)
        self._stream = None if kind == "none" else stream
        redrawn = kind == "rich" or (kind == "auto" and stream.isatty())
        self._live = _redrawn_line(self, stream) if redrawn else None
        self.message(title)

    # ------------------------------------------------------------ told by the run

    def phase(self, name: str, detail: str = "") -> None:
        """The run does this from now on: one of PHASES, or free text."""
        self._doing, self._since = f"{name} {detail}".strip(), time.monotonic()
        self._counted = ""
        if name not in PHASES:
            self.message(self._doing)

    def episode(self, ended: int, total: int, trajectory: object) -> None:
        """So many of the phase's episodes have ended. Comes from another thread."""
        self._counted = f" {ended}/{total}"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ended with these metrics."""
        self.done = step
        seconds = metrics.get("time/step_s", math.nan)
        if math.isfinite(seconds):
            self._durations = [*self._durations, seconds][-SMOOTHED:]
        if math.isnan(self._task_s):
            episodes = metrics.get("rollout/episodes") or math.nan
            self._task_s = metrics.get("time/rollout_s", math.nan) / episodes
        parts = numbers(metrics, self.registered)
        times = phase_times(metrics)
        self._log("step", step, [*parts, times] if times else parts)
        ends = [f"{seconds:.1f} s"] if math.isfinite(seconds) else []
        if self.remaining_s is not None:
            ends.append(f"ETA {clock(self.remaining_s)}")
        self._show("step", step, parts, ends)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation ended; metrics are `eval/...`."""
        tasks = metrics.get("eval/questions") or math.nan
        self._task_s = metrics.get("time/evaluate_s", math.nan) / tasks
        parts = evaluation_parts(metrics, self.registered)
        self._log("eval", step, parts)
        self._show("eval", step, parts)

    def _place(self, what: str, step: int) -> str:
        return f"{what} {step:>{len(str(self.steps))}}/{self.steps}"

    def _log(self, what: str, step: int, parts: Sequence[str]) -> None:
        logger.info("%s", "  ".join([self._place(what, step), *parts]))

    def _show(self, what: str, step: int, parts: Sequence[str], ends: Sequence[str] = ()) -> None:
        """The line, as much as fits; first what its words mean, where they are new."""
        end = "".join(f"  {part}" for part in ends)
        line = fitted([self._place(what, step), *parts], self._width - len(end))
        shown = [part for part in (*parts, *ends) if part in line + end]
        meanings = explanations(shown, self.registered)
        new = {word: text for word, text in meanings.items() if word not in self._explained}
        self._explained |= new.keys()
        if new:
            told = "; ".join(f"{word}: {text}" for word, text in new.items())
            self.message(textwrap.fill(f"({told})", self._width, subsequent_indent=" "))
        self.message(line + end)

    def message(self, text: str) -> None:
        """A line that stays on the screen."""
        text = printable(text)
        if self._live:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._stream:
            print(text, file=self._stream, flush=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended; `summary` is what summary.json holds."""
        self._doing = ending(summary)
        self.close()
        logger.info("%s", summary_text(summary, self.registered))
        self.message(summary_text(summary, self.registered, self._width))

    def close(self) -> None:
        """Nothing more comes."""
        if self._live:
            self._live.stop()

    # ------------------------------------------------------------ in words

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the end at the pace of the last few steps, evaluations included; None before
        the first step. Until the first evaluation its tasks are taken to last as a step's do."""
        if not self._durations:
            return None
        steps_s = (self.steps - self.done) * sum(self._durations) / len(self._durations)
        tasks = self.tasks_after(self.done)
        return steps_s + (tasks * self._task_s if math.isfinite(self._task_s) else 0.0)

    def status(self) -> str:
        """`4 of 20  ·  0:12  ·  ETA 0:50  ·  rollout 3/8 2 s`."""
        seconds = time.monotonic() - self._since
        parts = [f"{self.done} of {self.steps}", clock(self.clock.seconds)]
        if self.remaining_s is not None:
            parts.append(f"ETA {clock(self.remaining_s)}")
        return "  ·  ".join([*parts, f"{self._doing}{self._counted} {seconds:.0f} s"])


def _redrawn_line(progress: Progress, stream: TextIO) -> Live:
    """The status below all messages; it leaves nothing behind."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def drawn() -> Text:
        return Text(progress.status(), no_wrap=True, overflow="ellipsis", style="dim")

    console = Console(file=stream)
    live = Live(get_renderable=drawn, console=console, refresh_per_second=4, transient=True)
    live.start()
    return live


# ---------------------------------------------------------------- the log file


class RunLog:
    """Keeps rlflow's log records while active: in memory, and in a file from `write_to` on."""

    def __init__(self) -> None:
        self._handler = MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL)
        self._file: logging.FileHandler | None = None
        self._level = logging.NOTSET

    def write_to(self, path: Path) -> None:
        """Appends what was kept, and every later record at once."""
        self._file = _LogFile(path, encoding="utf-8")
        self._file.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handler.setTarget(self._file)
        self._handler.flush()
        self._handler.flushLevel = logging.DEBUG

    def __enter__(self) -> RunLog:
        logger = logging.getLogger("rlflow")
        self._level = logger.level
        # For scripts that set up no logging
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
        logger.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises OSError where the last lines cannot be written."""
        logger = logging.getLogger("rlflow")
        logger.setLevel(self._level)
        logger.removeHandler(self._handler)
        self._handler.close()
        if self._file is not None:
            self._file.close()


class _Redacting(logging.Formatter):
    """Keeps passwords in the URLs of services out of the file, and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))


class _LogFile(logging.FileHandler):
    """A log that a full disk cuts short silently; checkpoints stop the run and say why."""

    def handleError(self, record: logging.LogRecord) -> None: ...
