"""Taking a run back to a checkpoint: which one, and what is restored from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rlflow.config.schema import RunConfig
from rlflow.errors import CheckpointError, DamagedCheckpointError
from rlflow.run.checkpoints import STATE, TRAINER, read_state
from rlflow.run.directory import RunDirectory
from rlflow.run.preflight import run_path
from rlflow.run.run import Run

logger = logging.getLogger(__name__)


def chosen_checkpoint(config: RunConfig) -> tuple[int, Path] | None:
    """(step, directory) to resume from; None where a run starts anew. Raises ConfigError where run.resume_step has none."""
    if not config.run.resume:
        return None
    return RunDirectory(run_path(config)).saved.choose(config.run.resume_step)


def resume(run: Run) -> None:
    """Takes a new run to where its configuration says: to a checkpoint, the engine's weights included, or nowhere.

    Raises DamagedCheckpointError with the newest whole checkpoint in its text; CheckpointError for another format."""
    chosen = chosen_checkpoint(run.config)
    if chosen is None:
        return
    saved, (step, path) = run.directory.saved, chosen
    try:
        state = _read_state(path, expected=run.state_dict())
        run.trainer.load(path / TRAINER)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{error} {saved.advice(step)}") from error
    run.load_state_dict(state)
    run.sync_weights(version=step)
    for aside in saved.set_aside_after(step):
        logger.warning("resume: the newer checkpoint is set aside as %s; remove it when it is not needed", aside)
    logger.info("resumed after step %d from %s", step, path)


def _read_state(checkpoint: Path, expected: dict[str, Any]) -> dict[str, Any]:
    state = read_state(checkpoint)
    missing = [name for name in expected if name not in state]
    if missing:
        raise CheckpointError(
            f"{checkpoint / STATE}: expected {', '.join(expected)}, found no {', '.join(missing)}: another version of "
            "rlflow wrote it. Continue with that version, or begin anew with --overwrite or another run.name."
        )
    return state
