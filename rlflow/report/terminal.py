"""The progress of a run in the terminal: a live panel, a line per step, or nothing."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rlflow.errors import ConfigError, did_you_mean
from rlflow.report.charts import printable
from rlflow.report.lines import (
    clock,
    ending,
    evaluated_line,
    evaluation_line,
    numbers,
    phase_seconds,
    sparkline,
    step_line,
    summary_text,
)
from rlflow.report.metrics import PHASES, Metrics, label, scores
from rlflow.report.timer import Clock

if TYPE_CHECKING:  # rlflow.types brings torch
    from rlflow.types import Trajectory

KINDS = ("auto", "rich", "plain", "none")
SMOOTHED = 8  # steps that the remaining time is estimated from
LABEL_WIDTH = 11
TEXT_LINES = 3  # of the rollout that is shown
LONGEST_TEXT = 400  # characters of it that are looked at


class Progress:
    """What a run does now and has done, told as it happens; shown as `kind` says.

    auto: a panel that redraws itself on a terminal, else plain. plain: a line per step and
    evaluation. none: silent. `first_step` is the step that a resumed run starts from. `registered`
    are the environment's metrics, set once it is made. Raises ConfigError for an unknown kind."""

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
        if kind not in KINDS:
            expected = f"expected one of {', '.join(KINDS)}, found '{kind}'"
            hint = did_you_mean(kind, KINDS)
            raise ConfigError(f"metrics.progress: {expected}.{hint}")
        self.steps, self.done, self.title = steps, first_step, title
        self.clock = clock or Clock()
        self.registered: Metrics = {}
        self.metrics: Mapping[str, float] = {}
        self.curves: dict[str, list[float]] = {}
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self.rollout: Trajectory | None = None
        self._doing, self._since, self._counted = "starting", time.monotonic(), ""
        self._durations: list[float] = []
        stream = stream or sys.stderr
        panel = kind == "rich" or (kind == "auto" and stream.isatty())
        self._panel = Panel(self, stream) if panel else None
        self._lines = None if panel or kind == "none" else stream
        if self._lines:
            self.message(title)

    # ------------------------------------------------------------ told by the run

    def phase(self, name: str, detail: str = "") -> None:
        """The run does this from now on: one of PHASES, or free text."""
        self._doing, self._since = f"{name} {detail}".strip(), time.monotonic()
        self._counted = ""
        if self._lines and name not in PHASES:
            self.message(self._doing)

    def episode(self, ended: int, total: int, trajectory: Trajectory) -> None:
        """So many of the phase's episodes have ended. Comes from another thread."""
        self._counted, self.rollout = f" {ended}/{total}", trajectory

    def restore(self, records: Sequence[Mapping[str, float]]) -> None:
        """Takes in what earlier sessions of a resumed run logged, by ascending step."""
        for record in records:
            if "train/reward" in record:
                self._note(record)
            if any(name.startswith("eval/") for name in record):
                self.evaluations.append((int(record["step"]), record))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ended with these metrics."""
        self.done = step
        if math.isfinite(metrics.get("time/step_s", math.nan)):
            self._durations = [*self._durations, metrics["time/step_s"]][-SMOOTHED:]
        self._note(metrics)
        if self._lines:
            ends = "" if self.remaining_s is None else f"  ETA {clock(self.remaining_s)}"
            self.message(step_line(step, self.steps, metrics, self.registered) + ends)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation ended; metrics are `eval/...`."""
        self.evaluations.append((step, metrics))
        if self._lines:
            self.message(evaluated_line(step, self.steps, metrics, self.registered))

    def message(self, text: str) -> None:
        """A line that stays on the screen."""
        if self._panel:
            self._panel.message(text)
        elif self._lines:
            print(text, file=self._lines, flush=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended; `summary` is what summary.json holds."""
        self._doing = ending(summary)
        if self._panel:
            self._panel.close("done")
        self.message(summary_text(summary, self.registered))

    def close(self) -> None:
        """Nothing more comes."""
        if self._panel:
            self._panel.close(f"stopped in: {self._doing}")

    def _note(self, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics
        for name in ("reward", *scores(self.registered)[:1]):
            self.curves.setdefault(name, []).append(metrics.get(f"train/{name}", math.nan))

    # ------------------------------------------------------------ in words

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the last step at the pace of the last few; None before the first step."""
        if not self._durations:
            return None
        return (self.steps - self.done) * sum(self._durations) / len(self._durations)

    def status(self, ended: str = "") -> str:
        """`4 of 20  ·  0:12  ·  ETA 0:50  ·  rollout 3/8 2 s`. ended: how, if it did."""
        seconds = time.monotonic() - self._since
        parts = [f"{self.done} of {self.steps}", clock(self.clock.seconds)]
        if self.remaining_s is not None and not ended:
            parts.append(f"ETA {clock(self.remaining_s)}")
        parts.append(ended or f"{self._doing}{self._counted} {seconds:.0f} s")
        return "  ·  ".join(parts)

    def rows(self, ended: str = "") -> list[tuple[str, str]]:
        """(label, line) of the panel: step, curves, policy, time, first and last evaluation."""
        rows = [("step", self.status(ended))]
        for name, values in self.curves.items():
            last = f"{values[-1]:.3f}" if math.isfinite(values[-1]) else "-"
            rows.append((label(name), f"{last}  {sparkline(values)}"))
        policy = numbers(self.metrics, self.registered, leading=False)
        rows += [("policy", "  ·  ".join(policy)), ("time", phase_seconds(self.metrics))]
        shown = self.evaluations[:1] + self.evaluations[1:][-1:]  # the others are held against it
        for step, metrics in shown:
            rows.append((f"eval at {step}", evaluation_line(metrics, self.registered)))
        return [(name, line) for name, line in rows if line]


class Panel:
    """A progress that redraws itself in place; the terminal does not print `^C` into it."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._progress, self._ended = progress, ""
        self.console = Console(file=stream)
        terminal = self.console.is_terminal
        self._restore_keys = hidden_control_keys(sys.stdin) if terminal else _nothing
        self._live = Live(get_renderable=self.drawn, console=self.console, refresh_per_second=4)
        self._live.start()

    def message(self, text: str) -> None:
        """Prints a line above the panel, or below it once it has ended."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, ended: str) -> None:
        """Leaves the panel as it is; only the first call says how the run ended."""
        self._ended = self._ended or ended
        self._live.stop()
        self._restore_keys()

    def drawn(self) -> Any:
        """The panel as rich draws it."""
        from rich.panel import Panel as Box
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="dim", no_wrap=True, width=LABEL_WIDTH)
        grid.add_column(ratio=1)
        grid.add_row("", ProgressBar(total=max(progress.steps, 1), completed=progress.done))
        for name, line in progress.rows(self._ended):
            grid.add_row(name[:LABEL_WIDTH], Text(line))
        room = self.console.width - LABEL_WIDTH - 6
        for name, line, style in rollout_lines(progress.rollout, room):
            grid.add_row(name, Text(line, no_wrap=True, overflow="ellipsis", style=style))
        title = Text(progress.title, style="bold")
        return Box(grid, title=title, title_align="left", border_style="dim", padding=(0, 1))


def rollout_lines(trajectory: Trajectory | None, width: int) -> Iterator[tuple[str, str, str]]:
    """(label, line, style): the end of what the policy was shown last, its answer, its reward."""
    if trajectory is None or not trajectory.turns or width < 20:
        return
    turns = trajectory.turns
    before = turns[-2].observation if len(turns) > 1 else trajectory.prompt
    shown = _one_line(before[-LONGEST_TEXT:])
    said = _one_line(turns[-1].response[:LONGEST_TEXT]) or "(nothing)"
    lines = [(said[at : at + width], "cyan") for at in range(0, len(said), width)][:TEXT_LINES]
    if shown:
        cut = shown if len(shown) <= width else f"…{shown[1 - width :]}"
        lines.insert(0, (cut, "dim"))
    count = f"{len(turns)} turn{'' if len(turns) == 1 else 's'}"
    lines.append((f"reward {trajectory.reward:g}, {count}, {trajectory.stop.value}", "dim"))
    for place, (line, style) in enumerate(lines):
        yield "" if place else "rollout", line, style


def _one_line(text: str) -> str:
    """The text without line breaks, and without what could steer the terminal."""
    return printable(" ".join(text.split()))


def hidden_control_keys(keyboard: TextIO) -> Callable[[], None]:
    """Stops the terminal from printing Ctrl-C as `^C`; returns what undoes it.

    Of no effect in the background or without a terminal."""
    try:
        import termios

        descriptor = keyboard.fileno()
        if not os.isatty(descriptor) or os.tcgetpgrp(descriptor) != os.getpgrp():
            return _nothing  # the system stops a background process that changes its terminal
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, AttributeError, termios.error):
        return _nothing
    quiet = termios.tcgetattr(descriptor)
    quiet[3] &= ~termios.ECHOCTL

    def undo() -> None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    return undo


def _nothing() -> None: ...
