"""What a person sees while a run goes on: a live panel on a terminal, else one line per step."""

from __future__ import annotations

import collections
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from rlflow.errors import ConfigError, MissingPackageError, did_you_mean
from rlflow.metrics.names import PHASES, Metrics, label, leading_score, scores, shown

KINDS = ("auto", "rich", "plain", "none")
_SMOOTHED = 8  # steps that the remaining time is estimated from
_SPARKS = "▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """Told what happens; shows it."""

    registered: Metrics
    """Of the environment; set once it is made."""

    def phase(self, name: str, detail: str = "") -> None:
        """What the run does from now on: a phase name (`metrics.names.PHASES`), or free text such as "loading the model"."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ended with these metrics."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation ended; metrics are `eval/...`."""

    def message(self, text: str) -> None:
        """One line that stays on the screen."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended; `summary` is what summary.json holds."""

    def close(self) -> None: ...


def make_progress(
    kind: str = "auto", *, steps: int, title: str = "rlflow", first_step: int = 0, stream: TextIO | None = None
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
    if kind == "rich" or (kind == "auto" and stream.isatty()):
        try:
            return RichProgress(Pace(steps, first_step), title, stream)
        except ImportError:
            if kind == "rich":
                raise MissingPackageError(
                    "metrics.progress: the package 'rich' is not installed: pip install rich."
                ) from None
    return PlainProgress(Pace(steps, first_step), title, stream)


class Pace:
    """Elapsed and remaining time, from the last few steps."""

    def __init__(self, steps: int, first_step: int = 0) -> None:
        self.steps = steps
        self.done = first_step
        self.started = time.monotonic()
        self.durations: collections.deque[float] = collections.deque(maxlen=_SMOOTHED)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done = step
        if math.isfinite(metrics.get("time/step_s", math.nan)):
            self.durations.append(metrics["time/step_s"])

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the last step at the pace of the last few; None before the first step."""
        if not self.durations:
            return None
        return (self.steps - self.done) * sum(self.durations) / len(self.durations)


class NoProgress:
    """Shows nothing."""

    registered: Metrics = {}

    def phase(self, name: str, detail: str = "") -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None: ...

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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pace.step(step, metrics)
        width = len(str(self.pace.steps))
        parts = [f"step {step:>{width}}/{self.pace.steps}", *headline(metrics, self.registered), phase_seconds(metrics)]
        if self.pace.remaining_s is not None:
            parts.append(f"ETA {clock(self.pace.remaining_s)}")
        self.message("  ".join(part for part in parts if part))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        width = len(str(self.pace.steps))
        self.message(f"eval {step:>{width}}/{self.pace.steps}  {evaluation_line(metrics, self.registered)}")

    def message(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self.message(summary_text(summary, self.registered))

    def close(self) -> None: ...


class RichProgress:
    """A panel that redraws itself in place: bar, learning curves, seconds per phase, last evaluation."""

    registered: Metrics = {}

    def __init__(self, pace: Pace, title: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.pace, self.title = pace, title
        self.doing, self.doing_since = "starting", time.monotonic()
        self.metrics: dict[str, float] = {}
        self.curves: dict[str, list[float]] = {}
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.console = Console(file=stream)
        self.live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4, transient=False)
        self.live.start()

    def phase(self, name: str, detail: str = "") -> None:
        self.doing, self.doing_since = f"{name} {detail}".strip(), time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pace.step(step, metrics)
        self.metrics = dict(metrics)
        for name in ("reward", *scores(self.registered)[:1]):
            self.curves.setdefault(name, []).append(metrics.get(f"train/{name}", math.nan))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((step, dict(metrics)))

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def finished(self, summary: Mapping[str, Any]) -> None:
        self.close()
        self.message(summary_text(summary, self.registered))

    def close(self) -> None:
        self.doing = "done"
        self.live.stop()

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="dim", no_wrap=True, width=11)
        rows.add_column(ratio=1)
        rows.add_row("", ProgressBar(total=max(self.pace.steps, 1), completed=self.pace.done))
        for name, line in self._lines():
            rows.add_row(name, Text(line, no_wrap=True, overflow="ellipsis"))
        return Panel(rows, title=Text(self.title, style="bold"), title_align="left", border_style="dim", padding=(0, 1))

    def _lines(self) -> list[tuple[str, str]]:
        remaining = self.pace.remaining_s
        ends = f"  ·  ETA {clock(remaining)}" if remaining is not None else ""
        now = f"{self.doing} {time.monotonic() - self.doing_since:.0f} s" if self.doing != "done" else "done"
        lines = [("step", f"{self.pace.done} of {self.pace.steps}  ·  {clock(self.pace.elapsed_s)}{ends}  ·  {now}")]
        if self.metrics:
            curves = [(label(name), f"{_number(values[-1])}  {sparkline(values)}") for name, values in self.curves.items()]
            policy = "  ·  ".join(headline(self.metrics, self.registered, leading=False))
            lines += [*curves, ("policy", policy), ("time", phase_seconds(self.metrics))]
        for step, metrics in self.evaluations[-2:]:
            lines.append((f"eval at {step}", evaluation_line(metrics, self.registered)))
        return [(name, line) for name, line in lines if line]


def headline(metrics: Mapping[str, float], registered: Metrics, leading: bool = True) -> list[str]:
    """The numbers that a person looks at first, the absent ones left out; with `leading`, reward and first score come first."""
    parts = []
    if leading and "train/reward" in metrics:
        parts.append(f"reward {metrics['train/reward']:.3f}")
    if leading:
        parts += _registered_parts(metrics, registered, scores(registered)[:1], "train/")
    parts += _formatted(metrics, (("{:,.0f} tokens/s", "speed/tokens_per_s"),))
    parts += _registered_parts(metrics, registered, shown_names(registered), "rollout/")
    parts += _formatted(
        metrics,
        (("gap {:.1e}", "train/logprob_gap"), ("entropy {:.2f}", "train/entropy"), ("grad {:.2f}", "train/gradient_norm")),
    )
    for name, words in (
        ("rollout/aborted", "ABORTED"),
        ("rollout/truncated_max_tokens", "cut at tokens"),
        ("rollout/truncated_max_turns", "cut at turns"),
    ):
        if metrics.get(name, 0) > 0:
            parts.append(f"{words} {metrics[name]:.0%}")
    return parts


def _formatted(metrics: Mapping[str, float], templates: Sequence[tuple[str, str]]) -> list[str]:
    return [template.format(metrics[name]) for template, name in templates if name in metrics]


def shown_names(registered: Metrics) -> list[str]:
    """The registered metrics that are no scores and stand in the progress line."""
    return [name for name, metric in registered.items() if metric.shown and not metric.score]


def _registered_parts(
    metrics: Mapping[str, float], registered: Metrics, names: Sequence[str], section: str
) -> list[str]:
    """The registered metrics of these names; a name without a section is looked up as `section` + name."""
    keys = {name: name if "/" in name else section + name for name in names}
    return [shown(name, registered[name], metrics[key]) for name, key in keys.items() if key in metrics]


def phase_seconds(metrics: Mapping[str, float]) -> str:
    """`rollout 1.2 + update 0.8 = 2.1 s`: seconds per phase, and of the whole step."""
    parts = [
        f"{phase} {metrics[f'time/{phase}_s']:.1f}" for phase in PHASES if metrics.get(f"time/{phase}_s", 0) >= 0.05
    ]
    total = metrics.get("time/step_s")
    return " + ".join(parts) + (f" = {total:.1f} s" if total is not None and parts else "")


def evaluation_line(metrics: Mapping[str, float], registered: Metrics) -> str:
    """The first score with its 95% interval (without one the reward), the other scores, what is shown, failed tasks."""
    first = leading_score(registered, metrics, "eval")
    parts = []
    if first in registered:
        low, high = metrics.get(f"eval/{first}_low"), metrics.get(f"eval/{first}_high")
        band = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        parts.append(shown(first, registered[first], metrics[f"eval/{first}"]) + band)
    elif "eval/reward" in metrics:
        parts.append(f"reward {metrics['eval/reward']:.3f}")
    others = [name for name in scores(registered) if name != first]
    parts += _registered_parts(metrics, registered, [*others, *shown_names(registered)], "eval/")
    parts += _formatted(metrics, (("turns {:.2f}", "eval/turns"), ("{:.0f} tasks", "eval/questions")))
    if metrics.get("eval/failed", 0) > 0:
        parts.append(f"{metrics['eval/failed']:.0f} FAILED")
    return "  ".join(parts)


def summary_text(summary: Mapping[str, Any], registered: Metrics) -> str:
    """The short summary at the end of a run: how it ended, validation before and after, what was written where."""
    steps, status = summary["steps"], summary["status"]
    lines = [f"{status} after {steps:,} step{'' if steps == 1 else 's'} and {clock(summary['seconds'])}"]
    if status != "finished":
        lines[0] += "; --resume continues the run"
    rows = [("before", evaluation_line(summary.get("first_evaluation") or {}, registered)),
            ("after", evaluation_line(summary.get("last_evaluation") or {}, registered))]  # fmt: skip
    gap = summary.get("export_logprob_difference")
    for name, path in summary.get("written", {}).items():
        rows.append(
            (
                name,
                path
                + (f"  (log-probs within {gap:.0e} of the trainer's)" if name == "export" and gap is not None else ""),
            )
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join([*lines, *(f"  {name:<{width}}  {text}" for name, text in rows if text)])


def sparkline(values: list[float], width: int = 40) -> str:
    """The values as block characters scaled to their own range, neighbours averaged to at most `width` characters."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in means)


def clock(seconds: float) -> str:
    """`4 s`, `3:05` (minutes:seconds) or `2:03:05`."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
