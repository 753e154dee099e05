"""The display of a run as a page that it serves, and that becomes its report."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import StorageError
from rlflow.report.metrics import Metrics
from rlflow.report.pace import Pace
from rlflow.report.page_server import PageServer
from rlflow.report.progress import Progress
from rlflow.report.run_page import PageState, render_content, render_page
from rlflow.storage.files import write_text

if TYPE_CHECKING:  # rlflow.types brings torch
    from rlflow.types import Trajectory

logger = logging.getLogger(__name__)

EPISODES = 4  # of different tasks, that the page shows


class LivePage(Progress):
    """A page that shows how the run goes, at `url` while it goes on, and in the file `report` after each evaluation and at the
    end. Where it cannot be served or written, one line in the log says so, and the run goes on."""

    def __init__(self, pace: Pace, title: str) -> None:
        self.report: Path | None = None  # once the run has a directory
        self._pace = pace
        self._state = PageState(title, pace.steps)
        self._episodes: dict[str, Trajectory] = {}  # of each task the last one
        self._lock = threading.Lock()
        self._server: PageServer | None = None
        try:
            self._server = PageServer(
                lambda nonce: render_page(self._now(), nonce), lambda: render_content(self._now())
            )
        except OSError as error:
            logger.warning(
                "metrics.page: the page cannot be served (%s); the run goes on without it", error.strerror or error
            )

    @property
    def url(self) -> str:
        """Where the page is; empty where it is not served."""
        return self._server.url if self._server is not None else ""

    @property
    def registered(self) -> Metrics:
        return self._state.registered

    @registered.setter
    def registered(self, metrics: Metrics) -> None:
        self._state.registered = metrics

    def phase(self, name: str, detail: str = "") -> None:
        self._state.doing = f"{name} {detail}".strip()

    def episode(self, ended: int, total: int, trajectory: Trajectory) -> None:
        with self._lock:
            self._episodes.pop(trajectory.task_id, None)
            self._episodes[trajectory.task_id] = trajectory
            while len(self._episodes) > EPISODES:
                del self._episodes[next(iter(self._episodes))]
            self._state.doing = f"{self._state.doing.split(' (')[0]} ({ended} of {total} episodes)"

    def restore(self, records: Sequence[Mapping[str, float]]) -> None:
        with self._lock:
            self._state.records = [dict(record) for record in records]

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.step(step, metrics)
        self._add(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)
        self._write()

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._state.summary = summary
        self._write()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            records = self._state.records
            if records and records[-1]["step"] == step:
                records[-1] = {**records[-1], **metrics}
            else:
                records.append({"step": step, **metrics})

    def _now(self) -> PageState:
        with self._lock:
            episodes: list[Mapping[str, Any]] = [
                episode_record(trajectory) for trajectory in reversed(self._episodes.values())
            ]
            return dataclasses.replace(
                self._state,
                records=list(self._state.records),
                episodes=episodes,
                seconds=self._pace.elapsed_s,
                remaining_s=self._pace.remaining_s,
            )

    def _write(self) -> None:
        if self.report is None:
            return
        try:
            write_text(self.report, render_page(self._now()), durable=False)
        except (OSError, StorageError) as error:
            logger.warning("metrics.page: %s cannot be written (%s); the run goes on without it", self.report, error)
            self.report = None


def episode_record(trajectory: Trajectory) -> dict[str, Any]:
    """An episode as the page shows it."""
    turns = [{"response": turn.response, "observation": turn.observation} for turn in trajectory.turns]
    return {
        "prompt": trajectory.prompt,
        "turns": turns,
        "reward": trajectory.reward,
        "stop": trajectory.stop.value,
        "error": trajectory.error,
    }
