"""When a run's checkpoints are written: at once, or behind the run's back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflow.errors import StorageError
from rlflow.run.checkpoints import STATE, TRAINER, Checkpoints
from rlflow.storage.files import plain
from rlflow.storage.integrity import write_sealed
from rlflow.trainer.base import Trainer

logger = logging.getLogger(__name__)


class Saver:
    """Saves trainer and run, one checkpoint at a time. `asynchronous`: `save` returns when the state is copied; `poll`
    between steps makes a checkpoint of it once everything is written. A kill before that leaves the one before."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, *, keep: int, asynchronous: bool = False) -> None:
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.keep = keep
        self.asynchronous = asynchronous
        self._pending: tuple[int, dict[str, Any]] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begins the checkpoint of a step, after the one under way; ends it, unless asynchronous. Raises StorageError."""
        self.finish()
        with self._explained(step):
            path = self.checkpoints.begin(step)
            self._pending = step, plain(state)
            if self.asynchronous:
                self.trainer.begin_save(path / TRAINER, step)
            else:
                self.trainer.save(path / TRAINER, step)
                self._commit()

    def poll(self) -> None:
        """Ends the save under way if everything is written. Raises StorageError where it failed."""
        if self._pending is not None:
            with self._explained(self._pending[0]):
                if self.trainer.finish_save(wait=False):
                    self._commit()

    def finish(self) -> None:
        """Waits for the save under way, if there is one. Raises StorageError where it failed."""
        if self._pending is not None:
            with self._explained(self._pending[0]):
                self.trainer.finish_save()
                self._commit()

    def update_state(self, step: int, state: dict[str, Any]) -> None:
        """Exchanges the run's part of a checkpoint, finished or under way. Raises StorageError."""
        if self._pending is not None and self._pending[0] == step:
            self._pending = step, plain(state)
            return
        with self._explained(step):
            write_state(self.checkpoints.path(step), state)

    def _commit(self) -> None:
        step, state = self._pending or (0, {})
        write_state(self.checkpoints.partial_path(step), state)
        self.checkpoints.commit(step, self.keep)
        self._pending = None

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Gives up the checkpoint and the space that it took where writing fails, and says which one is left."""
        try:
            yield
        except (OSError, StorageError) as error:
            self._pending = None
            self.checkpoints.clean()
            latest = self.checkpoints.latest()
            left = (
                "There is no checkpoint yet" if latest is None else f"The newest checkpoint is that of step {latest[0]}"
            )
            reason = str(error).removesuffix(".")
            raise StorageError(
                f"saving step {step}: {reason}. {left}; free some space, or fix what is named, and continue with --resume"
            ) from error


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Writes the run's part of a checkpoint, sealed."""
    write_sealed(checkpoint / STATE, state)
