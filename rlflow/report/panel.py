"""The live panel of a run on a terminal: bar, learning curves, seconds per phase, evaluations, one rollout's text."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rlflow.report.lines import clock, evaluation_line, headline, number, phase_seconds, sparkline, summary_text
from rlflow.report.metrics import label, scores
from rlflow.report.pace import Pace
from rlflow.report.progress import Progress

if TYPE_CHECKING:  # rlflow.types brings torch
    from rlflow.types import Trajectory

LABEL_WIDTH = 11
TEXT_LINES = 3  # of the rollout that is shown
LONGEST_TEXT = 400  # characters of it that are looked at


class RichProgress(Progress):
    """A panel that redraws itself in place. While it is there the terminal does not print `^C`, which would tear it."""

    def __init__(self, pace: Pace, title: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.pace, self.title = pace, title
        self.doing, self.doing_since, self.counted = "starting", time.monotonic(), ""
        self.metrics: dict[str, float] = {}
        self.curves: dict[str, list[float]] = {}
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.rollout: Trajectory | None = None
        self.console = Console(file=stream)
        self.live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4, transient=False)
        self._restore_keys = hidden_control_keys(sys.stdin) if self.console.is_terminal else _nothing
        self.live.start()

    def phase(self, name: str, detail: str = "") -> None:
        self.doing, self.doing_since, self.counted = f"{name} {detail}".strip(), time.monotonic(), ""

    def episode(self, ended: int, total: int, trajectory: Trajectory) -> None:
        self.counted, self.rollout = f" {ended}/{total}", trajectory

    def restore(self, records: Sequence[Mapping[str, float]]) -> None:
        for record in records:
            if "train/reward" in record:
                self._draw(record)
            if any(name.startswith("eval/") for name in record):
                self.evaluations.append((int(record["step"]), dict(record)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pace.step(step, metrics)
        self._draw(metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((step, dict(metrics)))

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self.doing = "done"
        self.close()
        self.message(summary_text(summary, self.registered))

    def close(self) -> None:
        self.doing = "done" if self.doing == "done" else f"stopped in: {self.doing.removeprefix('stopped in: ')}"
        self.live.stop()
        self._restore_keys()

    def _draw(self, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)
        for name in ("reward", *scores(self.registered)[:1]):
            self.curves.setdefault(name, []).append(metrics.get(f"train/{name}", math.nan))

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="dim", no_wrap=True, width=LABEL_WIDTH)
        rows.add_column(ratio=1)
        rows.add_row("", ProgressBar(total=max(self.pace.steps, 1), completed=self.pace.done))
        for name, line in self._lines():
            rows.add_row(name[:LABEL_WIDTH], Text(line))
        for name, line, style in rollout_lines(self.rollout, self.console.width - LABEL_WIDTH - 6):
            rows.add_row(name, Text(line, no_wrap=True, overflow="ellipsis", style=style))
        return Panel(rows, title=Text(self.title, style="bold"), title_align="left", border_style="dim", padding=(0, 1))

    def _lines(self) -> list[tuple[str, str]]:
        remaining = self.pace.remaining_s
        ends = f"  ·  ETA {clock(remaining)}" if remaining is not None and self.doing != "done" else ""
        ended = self.doing == "done" or self.doing.startswith("stopped in: ")
        now = self.doing if ended else f"{self.doing}{self.counted} {time.monotonic() - self.doing_since:.0f} s"
        lines = [("step", f"{self.pace.done} of {self.pace.steps}  ·  {clock(self.pace.elapsed_s)}{ends}  ·  {now}")]
        if self.metrics:
            curves = [
                (label(name), f"{number(values[-1])}  {sparkline(values)}") for name, values in self.curves.items()
            ]
            policy = "  ·  ".join(headline(self.metrics, self.registered, leading=False))
            lines += [*curves, ("policy", policy), ("time", phase_seconds(self.metrics))]
        for step, metrics in self._shown_evaluations():
            lines.append((f"eval at {step}", evaluation_line(metrics, self.registered)))
        return [(name, line) for name, line in lines if line]

    def _shown_evaluations(self) -> list[tuple[int, dict[str, float]]]:
        """The first, which all others are held against, and the last."""
        return self.evaluations if len(self.evaluations) < 2 else [self.evaluations[0], self.evaluations[-1]]


def rollout_lines(trajectory: Trajectory | None, width: int) -> Iterator[tuple[str, str, str]]:
    """(label, line, style) of an episode: the end of what the policy was shown last, what it answered, and its reward."""
    if trajectory is None or not trajectory.turns or width < 20:
        return
    turns = trajectory.turns
    shown = turns[-2].observation if len(turns) > 1 else trajectory.prompt
    name = "rollout"
    if line := _one_line(shown[-LONGEST_TEXT:]):
        yield name, line if len(line) <= width else f"…{line[1 - width :]}", "dim"
        name = ""
    said = _one_line(turns[-1].response[:LONGEST_TEXT]) or "(nothing)"
    for start in range(0, min(len(said), TEXT_LINES * width), width):
        yield name, said[start : start + width], "cyan"
        name = ""
    yield (
        "",
        f"reward {trajectory.reward:g}, {len(turns)} turn{'' if len(turns) == 1 else 's'}, {trajectory.stop.value}",
        "dim",
    )


def _one_line(text: str) -> str:
    """The text without line breaks, and without what could steer the terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in " ".join(text.split()))


def hidden_control_keys(keyboard: TextIO) -> Callable[[], None]:
    """Stops the terminal from printing Ctrl-C as `^C`; returns what undoes it. Of no effect in the background or without a
    terminal."""
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
