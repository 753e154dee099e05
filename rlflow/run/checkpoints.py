"""The checkpoints of one run: written aside, brought to disk, renamed.

step_000050/            state.json (the run's part, sealed), state-XXH3.safetensors (its tensors,
                        where it has some) and trainer/ (what the trainer saved)
step_000050.<process>.<number>.partial/
                        being written, replaced or removed (rlflow/storage/files.py)
step_000050.aside/      newer than the checkpoint that the run was resumed from by
                        `run.resume_step`; the next one is step_000050.2.aside; read by nobody"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import (
    ConfigError,
    DamagedCheckpointError,
    DirectoryLostError,
    StorageError,
)
from rlflow.storage.files import (
    aside_path,
    clear_partials,
    is_held,
    plain,
    remove_directory,
    replace_directory,
    replacing,
    sync_tree,
)
from rlflow.storage.integrity import (
    EXPORT_MANIFEST,
    TRAINER_MANIFEST,
    as_entry,
    find_damage,
    fingerprint,
    of_entry,
    read_fingerprints,
    read_sealed,
    write_sealed,
)
from rlflow.storage.states import put_back, take_out

STATE = "state.json"
TENSORS = "state-{}.safetensors"
TRAINER = "trainer"
CONFIG = "config"
"""Part of a saved state: the redacted configuration, to compare a resumed run with."""
_STEP = re.compile(r"step_(\d{6,})$")


class Checkpoints:
    """A folder of checkpoints, which are complete under their final names.

    confirm: called before any change; raises where this process may make none."""

    def __init__(self, folder: Path, confirm: Callable[[], object] = lambda: None) -> None:
        self.folder = folder
        self.confirm = confirm
        self.partial = folder  # where the checkpoint begun last is until it is complete

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending; not of what is partial or set aside."""
        if not self.folder.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> tuple[int, Path] | None:
        """(step, directory) of the newest checkpoint, or None."""
        steps = self.steps()
        return (steps[-1], self.path(steps[-1])) if steps else None

    def choose(self, step: int | None) -> tuple[int, Path] | None:
        """(step, directory) to resume from: the newest, or `step`. Raises ConfigError for none."""
        if step is None:
            return self.latest()
        steps = self.steps()
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            told = f"{self.folder} has no checkpoint of step {step}; there are: {known}"
            raise ConfigError(f"run.resume_step: {told}.")
        return step, self.path(step)

    def newest_text(self) -> str:
        """The newest checkpoint in words."""
        latest = self.latest()
        if latest is None:
            return "there is no checkpoint yet"
        return f"the newest checkpoint is that of step {latest[0]}"

    def begin(self, step: int) -> Path:
        """An empty directory, of this process alone, for a checkpoint that `commit` will name."""
        self.clean()
        self.partial = aside_path(self.path(step))
        self.partial.mkdir(parents=True)
        return self.partial

    def commit(self, step: int, keep: int | None = None) -> None:
        """Brings the begun checkpoint to disk and names it; then removes all but `keep`."""
        # Takes long, so the right to name it is asked for afterwards
        sync_tree(self.partial)
        self.confirm()
        replace_directory(self.partial, self.path(step))
        older = [other for other in self.steps() if other < step]
        for old in older[: max(0, len(older) + 1 - keep)] if keep else []:
            converted = Path(f"{self.path(old)}.hf")  # what `rlflow eval` made of it
            # An evaluation reads it: the next commit removes it
            if is_held(self.path(old)) or is_held(converted):
                continue
            remove_directory(self.path(old))
            if (converted / EXPORT_MANIFEST).is_file():
                remove_directory(converted)

    def clean(self) -> None:
        """Clears what a kill left half written or removed; puts back what was being replaced."""
        self.confirm()
        clear_partials(self.folder)

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames the checkpoints after `step`; returns their new names."""
        renamed = []
        for newer in (other for other in self.steps() if other > step):
            aside = Path(f"{self.path(newer)}.aside")
            for number in itertools.count(2):
                if not aside.exists():
                    break
                aside = Path(f"{self.path(newer)}.{number}.aside")
            os.replace(self.path(newer), aside)
            renamed.append(aside)
        return renamed

    def advice(self, damaged: int) -> str:
        """The newest whole checkpoint before a damaged one, as advice. Reads all files it tries."""
        for step in reversed([other for other in self.steps() if other < damaged]):
            if self.find_damage(step) is None:
                advice = f"continue with --resume run.resume_step={step}"
                return f"The newest whole checkpoint is that of step {step}: {advice}"
        advice = "begin anew with --overwrite, or under another run.name"
        return f"No earlier checkpoint is whole: {advice}."

    def find_damage(self, step: int) -> str | None:
        """One line about the checkpoint's damage; None where all its files are as written."""
        trainer = self.path(step) / TRAINER
        try:
            self.read_state(step)
            # The trainer's own, and those of further models below it
            for manifest in (
                trainer / TRAINER_MANIFEST,
                *trainer.glob(f"*/{TRAINER_MANIFEST}"),
            ):
                held = read_fingerprints(read_sealed(manifest), manifest)
                if damage := find_damage(manifest.parent, held):
                    return damage
        except DamagedCheckpointError as error:
            return str(error)
        return None

    def read_state(self, step: int) -> dict[str, Any]:
        """The run's part of the checkpoint of a step.

        Raises DamagedCheckpointError where it, or the trainer's part, is of another step than the
        directory's name says, as after a copy by hand."""
        path = self.path(step)
        state, manifest = read_state(path), path / TRAINER / TRAINER_MANIFEST
        for file, held in ((path / STATE, state), (manifest, read_sealed(manifest))):
            if held.get("step", step) != step:
                raise DamagedCheckpointError(
                    f"{file}: expected the checkpoint of step {step}, as the directory is called, "
                    f"found that of step {held['step']}: directories or files were exchanged."
                )
        return state


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The run's part of a checkpoint, tensors in their places. Raises DamagedCheckpointError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state = read_sealed(checkpoint / STATE)
    entry = state.pop("tensors", None)
    if entry is None:
        return state
    try:
        file, written = str(entry["file"]), of_entry(entry)
        if Path(file).name != file:
            raise ValueError(f"a file elsewhere, {file}")
        damage = find_damage(checkpoint, {file: written})
        if damage is None:
            return put_back(state, load_file(checkpoint / file))
    except (LookupError, TypeError, ValueError, AttributeError, SafetensorError) as problem:
        damage = f"{checkpoint / STATE}: tensors: not as they are written ({problem})"
    raise DamagedCheckpointError(f"{damage}.")


if TYPE_CHECKING:  # every command reads run directories, few need tensors
    from torch import Tensor

    from rlflow.trainer.base import Trainer

logger = logging.getLogger(__name__)


class Saver:
    """Saves trainer and run, one checkpoint at a time.

    asynchronous: `save` returns when the state is copied; `poll` between steps completes the
    checkpoint once everything is written. A kill before that leaves the one before."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        keep: int,
        asynchronous: bool = False,
    ) -> None:
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.keep = keep
        self.asynchronous = asynchronous
        self._pending: tuple[int, RunState] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begins the checkpoint of a step, after the one under way; ends it, unless asynchronous.
        Raises StorageError."""
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

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Gives up a checkpoint that cannot be written, and its space; says which one is left."""
        try:
            yield
        except DirectoryLostError:  # what lies there is another process's
            self._pending = None
            raise
        except (OSError, StorageError) as error:
            self._pending = None
            self.checkpoints.clean()
            reason, left = str(error).removesuffix("."), self.checkpoints.newest_text()
            advice = "Free some space, or fix what is named, and continue with --resume"
            raise StorageError(f"saving step {step}: {reason}; {left}. {advice}") from error


class RunState:
    """A copy of the run's part of a checkpoint, to be written later."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._document = plain(take_out(state, self._tensors))

    def write(self, checkpoint: Path) -> None:
        """Writes it, sealed. Tensors go to a file called after its content: a kill while a state is
        exchanged leaves the old state with the old file."""
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
