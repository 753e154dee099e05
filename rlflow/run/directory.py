"""The one layout of a run directory, and how everything in it is written: aside first, then
renamed.

config.yaml                      the resolved configuration, secrets redacted; config.origin: see
`rlflow.run.origin` metrics.jsonl                    one object per step environment_metrics.json
what the metrics of the environment are checkpoints/step_000050/         see
`rlflow.run.checkpoints` export/                          the policy as a HuggingFace directory
adapter/                         with trainer.lora: the adapters as the package peft reads them
trajectories/step_000010.jsonl   sampled training episodes, in whole groups tokens/step_000010.npz
the same ones, token by token: see `rlflow.report.tokens` evaluations/step_000010.jsonl    every
evaluated episode progress.png  report.html  summary.json  log.txt"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import ConfigError, StorageError, did_you_mean
from rlflow.run.checkpoints import Checkpoints
from rlflow.storage.files import PARTIAL, clear_partials
from rlflow.storage.lock import DirectoryLock

if TYPE_CHECKING:
    from rlflow.config.schema import RunConfig

logger = logging.getLogger(__name__)

LAYOUT = ("config.yaml", "config.origin", "metrics.jsonl", "environment_metrics.json", "checkpoints", "export", "adapter",
          "trajectories", "tokens", "evaluations", "progress.png", "report.html", "summary.json", "log.txt",
          "tensorboard", "wandb")  # fmt: skip
STARTED = {
    "config.yaml",
    "config.origin",
    "log.txt",
    "metrics.jsonl",
    "environment_metrics.json",
    "tensorboard",
    "wandb",
}
"""What a run may have written before its first metrics."""


def run_path(config: RunConfig) -> Path:
    """Where the run writes. Raises ConfigError where `run.directory` holds another placeholder than
    {name}."""
    try:
        return Path(config.run.directory.format(name=config.run.name))
    except (KeyError, IndexError, ValueError):
        raise ConfigError(
            "run.directory: expected a path in which only {name} stands for something else, "
            f"found '{config.run.directory}'."
        ) from None


class RunDirectory:
    """One run's files. While it is open for writing, nobody else can open it
    (`rlflow.storage.lock`)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config, self.metrics, self.log = (
            self.path / "config.yaml",
            self.path / "metrics.jsonl",
            self.path / "log.txt",
        )
        self.environment_metrics, self.summary = (
            self.path / "environment_metrics.json",
            self.path / "summary.json",
        )
        self.checkpoints, self.export, self.adapter = (
            self.path / "checkpoints",
            self.path / "export",
            self.path / "adapter",
        )
        self.picture, self.report = self.path / "progress.png", self.path / "report.html"
        self.saved = Checkpoints(self.checkpoints, self.confirm)
        self._lock: DirectoryLock | None = None

    @classmethod
    def create(
        cls, directory: str | Path, *, resume: bool = False, overwrite: bool = False
    ) -> RunDirectory:
        """Opens a directory for writing, made where missing. With `resume`, what is there stays;
        with `overwrite`, an earlier run's files (and only those) are removed.

        Raises:
            ConfigError: an earlier run or foreign files are in the way, or another process is writing there.
        """
        run = cls(directory)
        begun = run._refuse_if_taken(resume, overwrite)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._lock = DirectoryLock(run.path)
        except OSError as error:
            raise ConfigError(
                f"run.directory: {run.path} cannot be written ({error.strerror}); choose another one."
            ) from None
        if overwrite or not begun:
            run._remove_run()
        run.saved.clean()
        for folder in (
            run.path,
            run.path / "trajectories",
            run.path / "tokens",
            run.path / "evaluations",
        ):
            clear_partials(folder)
        if resume and run.latest_checkpoint() is None:
            logger.warning("resume: no checkpoint in %s, the run starts at step 0", run.path)
        return run

    @classmethod
    def check(cls, directory: str | Path, *, resume: bool = False, overwrite: bool = False) -> None:
        """Returns where `create` would find no obstacle; makes nothing. Raises ConfigError as
        `create` does."""
        run = cls(directory)
        run._refuse_if_taken(resume, overwrite)
        ground = next(path for path in (run.path, *run.path.absolute().parents) if path.exists())
        if not ground.is_dir() or not os.access(ground, os.W_OK | os.X_OK):
            raise ConfigError(
                f"run.directory: {run.path} cannot be written, as {ground} does not allow it; choose another one."
            )
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
            near = (
                [entry.name for entry in sorted(run.path.glob("*/"))] if run.path.is_dir() else []
            )
            near = [name for name in near if (run.path / name / "config.yaml").is_file()]
            hint = f" Runs in it: {', '.join(near[:8])}." if near else ""
            raise ConfigError(
                f"{run.path}: no run here; expected a directory with config.yaml and metrics.jsonl.{hint}"
            )
        return run

    def trajectories(self, step: int) -> Path:
        return self.path / "trajectories" / f"step_{step:06d}.jsonl"

    def tokens(self, step: int) -> Path:
        return self.path / "tokens" / f"step_{step:06d}.npz"

    def evaluations(self, step: int) -> Path:
        return self.path / "evaluations" / f"step_{step:06d}.jsonl"

    def checkpoint_path(self, step: int) -> Path:
        return self.saved.path(step)

    def saved_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return self.saved.steps()

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """(step, directory) of the newest complete checkpoint, or None."""
        return self.saved.latest()

    def confirm(self) -> None:
        """Returns where this run may still write here; whoever writes asks first. Raises
        DirectoryLostError."""
        if self._lock is not None:
            self._lock.confirm()

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
        """Removes the directory if nothing but the start of a run is in it: a failed start leaves
        no trace. What was moved away, or is another process's by now, is left alone."""
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
        """Whether there is more than what a start writes before its first metrics: such a rest is
        in nobody's way."""
        return not ("log.txt" in present and set(present) <= STARTED) or bool(
            self.metrics.is_file() and self.metrics.stat().st_size
        )

    def _refuse_if_taken(self, resume: bool, overwrite: bool) -> bool:
        """Whether a run has begun here, once nothing speaks against opening the directory for
        writing."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                f"run.directory: {self.path} is a file; expected a directory, or a name that is free."
            )
        if resume and overwrite:
            raise ConfigError(
                "run.resume and run.overwrite are both on; resume continues a run, overwrite throws it away."
            )
        if resume and not self.path.exists():
            self._refuse_nothing_to_resume()
        present = self._present()
        if not present or not self._begun(present):
            return False
        if not resume and not overwrite:
            raise ConfigError(
                f"run.directory: {self.path} already holds {_what(present)}: continue it with --resume, throw it "
                "away with --overwrite, or choose another run.name."
            )
        if "config.yaml" not in present:
            raise ConfigError(
                f"run.directory: {self.path} holds files that are not of a run ({', '.join(present[:3])}); "
                "choose another run.directory or run.name."
            )
        return True

    def _refuse_nothing_to_resume(self) -> None:
        folder = self.path.parent
        near = (
            sorted(entry.parent.name for entry in folder.glob("*/config.yaml"))
            if folder.is_dir()
            else []
        )
        shown = (
            f" (beside it: {', '.join(near[:8])}{', ...' if len(near) > 8 else ''})" if near else ""
        )
        raise ConfigError(
            f"run.resume: no run in {self.path}{shown}.{did_you_mean(self.path.name, near)} To begin it leave --resume out; a "
            f"job that is always started with --resume begins where the directory is there: mkdir -p {self.path}."
        )

    def _remove_run(self) -> None:
        for name in LAYOUT:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


def _what(present: list[str]) -> str:
    return (
        "a run"
        if "config.yaml" in present
        else f"files ({', '.join(present[:3])}{', ...' if len(present) > 3 else ''})"
    )


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_FAILED = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
IN_THE_RUN = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
"""Say something about the disk only of a file of the run."""


def explain_unwritable(error: BaseException | None, directory: RunDirectory) -> None:
    """Raises StorageError, from `error`, where it says that nothing more can be written; returns
    for any other."""
    if not isinstance(error, OSError):
        return
    if error.errno in DISK_FULL:
        remedy = "Free some space"
    elif error.errno in DISK_FAILED or (
        error.errno in IN_THE_RUN and _inside(error.filename, directory.path)
    ):
        remedy = "Make it writable again"
    else:
        return
    latest = directory.latest_checkpoint()
    left = (
        "there is no checkpoint yet"
        if latest is None
        else f"the newest checkpoint is that of step {latest[0]}"
    )
    where = error.filename or directory.path
    raise StorageError(
        f"{where}: {error.strerror}; {left}. {remedy} and continue with --resume"
    ) from error


def _inside(file: object, directory: Path) -> bool:
    return isinstance(file, (str, os.PathLike)) and Path(file).absolute().is_relative_to(
        directory.absolute()
    )
