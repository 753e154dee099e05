"""What the runs of these tests begin with, and a run that several files hold others against."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.loop import train
from rlflow.run.directory import RunDirectory
from tests.flow.letters import DETERMINISTIC, SAVED_OFTEN, letters_config, write_letters_model

MakeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> MakeOnce:
    """Makes a folder by its name: the first process of a parallel test run that asks does so, the
    others wait for it and share it."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def make(name: str, write: Callable[[Path], object]) -> Path:
        folder, made = common / name, common / f"{name}.made"
        with (common / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                write(folder)
                made.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def model(make_once: MakeOnce) -> Path:
    """The letters task's model, which no test changes."""
    return make_once("model", write_letters_model)


@pytest.fixture(scope="session")
def whole(model: Path, make_once: MakeOnce) -> RunDirectory:
    """A deterministic run that nobody disturbed, saved in the background after every step. No test
    changes it."""
    options = (*DETERMINISTIC, *SAVED_OFTEN, "checkpoint.asynchronous=true")
    runs = make_once("whole", lambda runs: train(letters_config(model, runs, *options)))
    return RunDirectory.open(runs / "letters")
