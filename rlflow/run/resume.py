"""Resumes a run from a checkpoint, after comparing its configuration."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.config.loading import to_dict
from rlflow.config.schema import RunConfig, RunSection
from rlflow.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rlflow.run.checkpoints import CONFIG, STATE, TRAINER, Checkpoints
from rlflow.run.directory import RunDirectory, run_path
from rlflow.storage.files import leaves, plain, read_json
from rlflow.storage.redaction import redact
from rlflow.values import show

if TYPE_CHECKING:
    from rlflow.run.run import Run

logger = logging.getLogger(__name__)

KEPT = ("run.seed", "environment.name", "data.curator.name")
"""Keys that a resumed run keeps: its position means nothing among other tasks, or in another
order."""
COMPARED = (
    "run.seed",
    "model",
    "data",
    "environment",
    "rollout",
    "algorithm",
    "trainer",
)
"""Keys that results depend on; the others say how long a run lasts, what it reports and where."""


def finished_summary(section: RunSection) -> dict[str, Any] | None:
    """The summary of the run to be resumed where nothing of it is left to do; else None."""
    directory = RunDirectory(run_path(section))
    latest = directory.saved.latest()
    if latest is None or not directory.summary.is_file():
        return None
    summary, (step, _) = read_json(directory.summary), latest
    done = (
        isinstance(summary, dict)
        and summary.get("status") == "finished"
        and summary.get("steps") == step >= section.steps
    )
    # How many steps its epochs are is not known before the tasks are
    done = done and section.epochs is None
    return summary if done and section.resume_step in (None, step) else None


def chosen_checkpoint(section: RunSection) -> tuple[int, Path] | None:
    """(step, directory) to resume from; None for a new run. Raises ConfigError without any."""
    if not section.resume:
        return None
    return RunDirectory(run_path(section)).saved.choose(section.resume_step)


def check_continuation(config: RunConfig) -> None:
    """Warns of keys with other values than at the checkpoint that the configuration resumes from.

    Raises ConfigError for a key that a resumed run keeps, DamagedCheckpointError as `resume`."""
    chosen = chosen_checkpoint(config.run)
    if chosen is None:
        return
    saved = RunDirectory(run_path(config.run)).saved
    with _advised(saved, chosen[0]):
        before = saved.read_state(chosen[0]).get(CONFIG)
    if before is None:  # of another version: `resume` refuses it
        return
    if not isinstance(before, Mapping):
        file = saved.path(chosen[0]) / STATE
        raise CheckpointError(
            f"{file}: {CONFIG}: expected a mapping with keys, found {show(before)}."
        )
    old, new = dict(_compared(before)), dict(_compared(plain(redact(to_dict(config)))))
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    for key in KEPT:
        if key in changed:
            raise ConfigError(
                f"{key}: expected {_short(old, key)}, that of the checkpoint of step {chosen[0]}, "
                f"found {_short(new, key)}: a resumed run keeps it. Set it back, or begin another "
                "run with --overwrite or run.name."
            )
    if changed:
        told = ", ".join(f"{key} {_short(old, key)} -> {_short(new, key)}" for key in changed)
        logger.warning("resume: other values than at step %d: %s", chosen[0], told)


def resume(run: Run) -> None:
    """Takes a new run, its engine included, to the checkpoint of its configuration, if any.

    Raises DamagedCheckpointError, which names the newest whole checkpoint, and CheckpointError for
    another format."""
    chosen = chosen_checkpoint(run.config.run)
    if chosen is None:
        return
    saved, (step, path) = run.directory.saved, chosen
    with _advised(saved, step):
        state = saved.read_state(step)
    missing = [name for name in run.state_dict() if name not in state and name != CONFIG]
    if missing:
        raise CheckpointError(
            f"{path / STATE}: expected {', '.join(run.state_dict())}, found no "
            f"{', '.join(missing)}: another version of rlflow wrote it. Continue with that "
            "version, or begin anew with --overwrite or another run.name."
        )
    with _advised(saved, step):
        run.trainer.load(path / TRAINER)
    run.load_state_dict(state, path / STATE)
    run.sync_weights(version=step)
    run.directory.drop_after(step)
    for aside in saved.set_aside_after(step):
        logger.warning("resume: the newer checkpoint is set aside as %s; remove it at will", aside)
    logger.info("resumed after step %d from %s", step, path)


@contextmanager
def _advised(saved: Checkpoints, step: int) -> Iterator[None]:
    """Adds to the damage of a step's checkpoint which one is whole."""
    try:
        yield
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error} {saved.advice(step)}") from error


def _compared(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) to compare; objects without their addresses in memory."""
    for key, value in leaves(config):
        if value in ([], {}) or not f"{key}.".startswith(tuple(f"{one}." for one in COMPARED)):
            continue
        if isinstance(value, str):
            value = re.sub(r" at 0x[0-9a-f]+", "", value)
            # The same file elsewhere is the same environment
            if key == "environment.name":
                value = value.rpartition("/")[2]
        yield key, value


def _short(values: Mapping[str, Any], key: str) -> str:
    text = str(values[key]) if key in values else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
