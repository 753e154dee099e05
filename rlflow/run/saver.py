"""When a run's checkpoints are written: at once, or behind the run's back."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rlflow.errors import DirectoryLostError, StorageError
from rlflow.run.checkpoints import STATE, TENSORS, TRAINER, Checkpoints
from rlflow.storage.files import plain, replacing
from rlflow.storage.integrity import as_entry, fingerprint, write_sealed
from rlflow.storage.states import take_out
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
        self.committed = -1  # step of the last checkpoint that was completed
        self._pending: tuple[int, RunState] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begins the checkpoint of a step, after the one under way; ends it, unless asynchronous. Raises StorageError."""
        self.finish()
        with self._explained(step):
            path = self.checkpoints.begin(step)
            self._pending = step, RunState(state)
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
            self._pending = step, RunState(state)
            return
        with self._explained(step):
            self.checkpoints.confirm()
            RunState(state).write(self.checkpoints.path(step))

    def _commit(self) -> None:
        assert self._pending is not None
        step, state = self._pending
        state.write(self.checkpoints.partial)
        self.checkpoints.commit(step, self.keep)
        self._pending = None
        self.committed = step

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Gives up the checkpoint and the space that it took where writing fails, and says which one is left."""
        try:
            yield
        except DirectoryLostError:  # what lies there is another process's
            self._pending = None
            raise
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


class RunState:
    """A copy of the run's part of a checkpoint, to be written later."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._document = plain(take_out(state, self._tensors))

    def write(self, checkpoint: Path) -> None:
        """Writes it, sealed. Tensors go to a file of their own that is called after its content: a kill while the state of a
        finished checkpoint is exchanged leaves the old state with the old file."""
        document, file = self._document, None
        if self._tensors:
            from safetensors.torch import save_file

            with replacing(checkpoint / TENSORS.format("new")) as aside:
                save_file(self._tensors, aside)
            made = fingerprint(checkpoint / TENSORS.format("new"))
            file = checkpoint / TENSORS.format(made.checksums["xxh3"])
            os.replace(checkpoint / TENSORS.format("new"), file)
            document = {**document, "tensors": {"file": file.name, **as_entry(made)}}
        write_sealed(checkpoint / STATE, document, private=True)
        for old in checkpoint.glob(TENSORS.format("*")):
            if old != file:
                old.unlink()
