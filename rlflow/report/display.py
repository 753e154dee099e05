"""Which displays a run has: a live panel on a terminal or one line per step, and a page beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rlflow.errors import ConfigError, MissingPackageError, did_you_mean
from rlflow.report.live_page import LivePage
from rlflow.report.metrics import Metrics
from rlflow.report.pace import Clock, Pace
from rlflow.report.panel import RichProgress
from rlflow.report.progress import PlainProgress, Progress

KINDS = ("auto", "rich", "plain", "none")


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
        return Progress()
    pace = Pace(steps, first_step, clock)
    if kind == "rich" or (kind == "auto" and stream.isatty()):
        try:
            return RichProgress(pace, title, stream)
        except ImportError:
            if kind == "rich":
                raise MissingPackageError("metrics.progress: the package 'rich' is not installed: pip install rich") from None
    return PlainProgress(pace, title, stream)


def _told(name: str) -> Any:
    """A method that calls the one of that name of each display."""

    def tell(self: SeveralDisplays, *arguments: Any) -> None:
        for display in self._displays:
            getattr(display, name)(*arguments)

    return tell


class SeveralDisplays(Progress):
    """Tells each of several displays what it is told."""

    def __init__(self, displays: Sequence[Progress]) -> None:
        self._displays = displays

    @property
    def registered(self) -> Metrics:
        return self._displays[0].registered

    @registered.setter
    def registered(self, metrics: Metrics) -> None:
        for display in self._displays:
            display.registered = metrics

    phase, episode, restore = _told("phase"), _told("episode"), _told("restore")
    step, evaluated, message = _told("step"), _told("evaluated"), _told("message")
    finished, close = _told("finished"), _told("close")


def make_display(
    kind: str, *, page: bool, steps: int, title: str, first_step: int, clock: Clock
) -> tuple[Progress, LivePage | None]:
    """(what a run tells how it goes, the page in it where one is wanted); the terminal is told where the page is."""
    terminal = make_progress(kind, steps=steps, title=title, first_step=first_step, clock=clock)
    if not page:
        return terminal, None
    live = LivePage(Pace(steps, first_step, clock), title)
    if live.url:
        terminal.message(f"page: {live.url}")
    return SeveralDisplays([terminal, live]), live
