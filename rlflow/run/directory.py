"""The layout of a run directory, in which every file is written aside and then renamed.

config.yaml                      the resolved configuration, secrets redacted
config.origin                    see `rlflow.run.origin`
metrics.jsonl                    one object per step
environment_metrics.json         the environment's metrics
checkpoints/step_000050/         see `rlflow.run.checkpoints`
export/                          the policy as a HuggingFace directory
adapter/                         with trainer.lora: the adapters as the package peft reads them
trajectories/step_000010.jsonl   sampled training episodes, in whole groups
tokens/step_000010.npz           the same ones, token by token: see `rlflow.report.tokens`
evaluations/step_000010.jsonl    every evaluated episode
progress.png  report.html  summary.json  log.txt"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import ConfigError, StorageError, did_you_mean
from rlflow.run.checkpoints import Checkpoints
from rlflow.storage.files import PARTIAL, clear_partials, remove_directory, why_unwritable
from rlflow.storage.lock import DirectoryLock

if TYPE_CHECKING:
    from rlflow.config.schema import RunSection

logger = logging.getLogger(__name__)

STARTED = {
    "config.yaml",
    "config.origin",
    "log.txt",
    "metrics.jsonl",
    "environment_metrics.json",
    "tensorboard",
    "wandb",
}
"""Files that a run may have written before its first metrics."""
EPISODES = ("trajectories", "tokens", "evaluations")
"""Folders of a file per step."""
LAYOUT = (
    *("summary.json", "checkpoints", "export", "adapter", *EPISODES),
    *("progress.png", "report.html", "view.html"),
    *(*sorted(STARTED - {"config.yaml"}), "config.yaml"),
)
"""In the order of removal: what is left by a kill is a run, and none that finished."""


def run_path(section: RunSection) -> Path:
    """The run's directory. Raises ConfigError for a placeholder other than {name}."""
    try:
        return Path(section.directory.format(name=section.name))
    except (LookupError, ValueError, AttributeError, TypeError):
        found = section.directory
        told = f"expected a path with no placeholder but {{name}}, found '{found}'"
        raise ConfigError(f"run.directory: {told}.") from None


class RunDirectory:
    """One run's files; open for writing it is locked (`rlflow.storage.lock`)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.log = self.path / "log.txt"
        self.environment_metrics = self.path / "environment_metrics.json"
        self.summary = self.path / "summary.json"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.adapter = self.path / "adapter"
        self.picture = self.path / "progress.png"
        self.report = self.path / "report.html"
        self.saved = Checkpoints(self.checkpoints, self.confirm)
        self._lock: DirectoryLock | None = None

    @classmethod
    def create(
        cls, directory: str | Path, *, resume: bool = False, overwrite: bool = False
    ) -> RunDirectory:
        """Opens a directory for writing, made where missing; `overwrite` removes a run's files.

        Raises ConfigError where a run that is not to be resumed, foreign files or another process
        are in the way."""
        run = cls(directory)
        begun = run._refuse_if_taken(resume, overwrite)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._lock = DirectoryLock(run.path)
        except OSError as error:
            told = f"{run.path} cannot be written ({error.strerror}); choose another one"
            raise ConfigError(f"run.directory: {told}.") from None
        if overwrite or not begun:
            run._remove_run()
        run.saved.clean()
        for folder in ("", *EPISODES):
            clear_partials(run.path / folder)
        if resume and run.saved.latest() is None:
            logger.warning("resume: no checkpoint in %s, the run starts at step 0", run.path)
        return run

    @classmethod
    def check(cls, directory: str | Path, *, resume: bool = False, overwrite: bool = False) -> None:
        """Raises ConfigError as `create` would; makes nothing."""
        run = cls(directory)
        run._refuse_if_taken(resume, overwrite)
        if (reason := why_unwritable(run.path)) is not None:
            raise ConfigError(f"run.directory: {reason}; choose another one.")
        if (run.path / "run.lock").is_file():
            DirectoryLock(run.path).close()

    @classmethod
    def open(cls, directory: str | Path) -> RunDirectory:
        """An existing run, for reading.

        Raises:
            ConfigError: there is no run.
        """
        run = cls(directory)
        if not run.config.is_file() and not run.metrics.is_file():
            near = _runs_in(run.path)
            hint = f" Runs in it: {', '.join(near[:8])}." if near else ""
            expected = "expected a directory with config.yaml and metrics.jsonl"
            raise ConfigError(f"{run.path}: no run here; {expected}.{hint}")
        return run

    def trajectories(self, step: int) -> Path:
        return self.path / "trajectories" / f"step_{step:06d}.jsonl"

    def tokens(self, step: int) -> Path:
        return self.path / "tokens" / f"step_{step:06d}.npz"

    def evaluations(self, step: int) -> Path:
        return self.path / "evaluations" / f"step_{step:06d}.jsonl"

    def confirm(self) -> None:
        """Raises DirectoryLostError where this run may not write here any more."""
        if self._lock is not None:
            self._lock.confirm()

    def drop_after(self, step: int) -> None:
        """Removes the episodes of later steps, which are those of another continuation."""
        self.confirm()
        for file in (file for kind in EPISODES for file in (self.path / kind).glob("step_*.*")):
            number = file.name.removeprefix("step_").partition(".")[0]
            if number.isdecimal() and int(number) > step:
                file.unlink()

    def close(self) -> None:
        """Lets other processes write here again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def discard_unless_begun(self) -> None:
        """Removes the directory of a failed start, unless it is another process's by now."""
        if self._lock is not None and not self._lock.held():
            return
        present = self._present()
        if present and not self._begun(present):
            self._remove_run()
        if not self._present():
            (self.path / "run.lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def _present(self) -> list[str]:
        names = sorted(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []
        return [name for name in names if name != "run.lock" and not name.endswith(PARTIAL)]

    def _begun(self, present: Sequence[str]) -> bool:
        """Whether there is more than what a start writes before its first metrics."""
        if "log.txt" not in present or not set(present) <= STARTED:
            return True
        return self.metrics.is_file() and self.metrics.stat().st_size > 0

    def _refuse_if_taken(self, resume: bool, overwrite: bool) -> bool:
        """Whether a run has begun here. Raises ConfigError where it may not be written."""
        place = f"run.directory: {self.path}"
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{place} is a file; expected a directory, or a name that is free.")
        if resume and overwrite:
            raise ConfigError(
                "run.resume and run.overwrite are both on; resume continues a run, overwrite "
                "throws it away."
            )
        if resume and not self.path.exists():
            self._refuse_nothing_to_resume()
        present = self._present()
        if not present or not self._begun(present):
            return False
        if not resume and not overwrite:
            raise ConfigError(
                f"{place} already holds {_what(present)}: continue it with --resume, throw it away "
                "with --overwrite, or choose another run.name."
            )
        written = {"run.lock", "config.origin", "metrics.jsonl", "log.txt"}
        if "config.yaml" not in present or not written & set(os.listdir(self.path)):
            raise ConfigError(
                f"{place} holds files that are not of a run ({', '.join(present[:3])}); choose "
                "another run.directory or run.name."
            )
        return True

    def _refuse_nothing_to_resume(self) -> None:
        near = _runs_in(self.path.parent)
        more = ", ..." if len(near) > 8 else ""
        shown = f" (beside it: {', '.join(near[:8])}{more})" if near else ""
        raise ConfigError(
            f"run.resume: no run in {self.path}{shown}.{did_you_mean(self.path.name, near)} To "
            "begin it leave --resume out; a job that is always started with --resume begins where "
            f"the directory is there: mkdir -p {self.path}."
        )

    def _remove_run(self) -> None:
        for name in LAYOUT:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                remove_directory(entry)
            else:
                entry.unlink(missing_ok=True)


def _runs_in(folder: Path) -> list[str]:
    return sorted(entry.parent.name for entry in folder.glob("*/config.yaml"))


def _what(present: list[str]) -> str:
    if "config.yaml" in present:
        return "a run"
    return f"files ({', '.join(present[:3])}{', ...' if len(present) > 3 else ''})"


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_FAILED = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
IN_THE_RUN = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
"""About the disk only where the file is the run's."""


def explain_unwritable(error: BaseException | None, directory: RunDirectory) -> None:
    """Raises StorageError, from `error`, where it says that nothing more can be written."""
    if not isinstance(error, OSError):
        return
    ours = error.errno in IN_THE_RUN and _inside(error.filename, directory.path)
    if error.errno in DISK_FULL:
        remedy = "Free some space"
    elif error.errno in DISK_FAILED or ours:
        remedy = "Make it writable again"
    else:
        return
    where, left = error.filename or directory.path, directory.saved.newest_text()
    told = f"{where}: {error.strerror}; {left}. {remedy} and continue with --resume"
    raise StorageError(told) from error


def _inside(file: object, directory: Path) -> bool:
    if not isinstance(file, (str, os.PathLike)):
        return False
    return Path(file).absolute().is_relative_to(directory.absolute())
