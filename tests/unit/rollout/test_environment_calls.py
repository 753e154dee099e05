"""Calls of an environment outside episodes end in time, and say meanwhile what is waited for."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator

import pytest

from rlflow.errors import EnvironmentContractError, RolloutError
from rlflow.rollout import environment_calls
from rlflow.rollout.environment_calls import reported, shut_down, tasks_of
from rlflow.types import Task
from tests.unit.rollout.asking import Asking


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def told(environment: Asking, method: str) -> object:
    return tasks_of(environment, "train", 0.3) if method == "tasks" else reported(environment, 0.3)


@pytest.mark.parametrize("method", ["tasks", "report"])
def test_a_call_that_hangs_is_told_of_and_ends(
    method: str,
    over: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(environment_calls, "FIRST_WORD_S", 0.1)
    environment = Asking()
    setattr(environment, method, lambda *_: over.wait(30))
    with pytest.raises(
        RolloutError,
        match=rf"^Asking\.{method}.* did not end within 0\.3 s \(rollout\.faults\.call_s",
    ):
        told(environment, method)
    assert f"waiting for Asking.{method}" in caplog.text


def test_a_shutdown_that_hangs_ends_with_a_warning(
    over: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    environment = Asking()
    environment.shutdown = lambda: over.wait(30)  # type: ignore[method-assign, assignment, return-value]
    with caplog.at_level(logging.WARNING):
        shut_down(environment, 0.1)
    assert "Asking.shutdown failed, what it started may still be running" in caplog.text


def test_tasks_without_an_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_calls, "MOST_TASKS", 1000)
    environment = Asking()
    environment.tasks = lambda split: (Task(str(n), "?") for n in itertools.count())  # type: ignore
    with pytest.raises(EnvironmentContractError, match="a generator with no end after 1,000 tasks"):
        tasks_of(environment, "train")


def test_two_tasks_of_one_id_are_refused_with_both_places() -> None:
    environment = Asking()
    environment.tasks = lambda split: [Task("a", "?"), Task("b", "?"), Task("a", "!")]  # type: ignore[method-assign]
    with pytest.raises(EnvironmentContractError, match=r"tasks 0 and 2 have the same id 'a'"):
        tasks_of(environment, "val")
