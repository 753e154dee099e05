"""The HuggingFace directory of a model that was named as such, as a run, or as a Megatron checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlflow.config.schema import load_config
from rlflow.errors import ConfigError
from rlflow.run.directory import RunDirectory

from .export_model import Options, current_export, open_source, to_huggingface


@dataclass(frozen=True)
class ModelDirectory:
    """path: the HuggingFace directory. name: what results are filed under. config: of the run that it comes from."""

    path: Path
    name: str
    config: Path | None


@contextmanager
def model_directory(
    given: str | Path, reference: str | Path | None, say: Callable[[str], None]
) -> Iterator[ModelDirectory]:
    """A HuggingFace directory as it is; a Megatron checkpoint, or the newest one of a run, converted.

    The converted one stays beside the checkpoint as `<name>.hf` and serves again while the checkpoint and the reference
    are what they were; where that place cannot be written, it is temporary and gone afterwards. reference: the
    directory with config and tokenizer; None: the model that the run started from.

    Raises ConfigError where there is no model or reference, ConversionError for a checkpoint that cannot be converted."""
    path = Path(given)
    if not path.is_dir():
        raise ConfigError(f"--model {path}: no such directory; expected a model directory, a run or a checkpoint.")
    beside = path.resolve().parent / "config.yaml"
    if (path / "config.json").is_file():
        whole = path.resolve()
        name = whole.parent.name if whole.name == "export" else whole.name
        yield ModelDirectory(path, name, beside if beside.is_file() else None)
        return
    checkpoint, run = _checkpoint(path)
    if checkpoint is None:  # a run that was only exported
        yield ModelDirectory(path / "export", path.resolve().name, path / "config.yaml")
        return
    model = _reference(checkpoint, run, reference)
    name = checkpoint.name if run is None else f"{run.resolve().name}-{checkpoint.name}"
    config = run / "config.yaml" if run else None
    out = checkpoint.with_name(checkpoint.name + ".hf")
    if os.access(out.parent, os.W_OK):
        _convert(checkpoint, out, model, say)
        yield ModelDirectory(out, name, config)
        return
    with tempfile.TemporaryDirectory(prefix="rlflow-") as place:
        _convert(checkpoint, Path(place) / out.name, model, say)
        yield ModelDirectory(Path(place) / out.name, name, config)


def _checkpoint(path: Path) -> tuple[Path | None, Path | None]:
    """(checkpoint, run directory) of a run, a step of a run, or a checkpoint of another program."""
    if (path / "config.yaml").is_file():
        newest = RunDirectory.open(path).latest_checkpoint()
        if newest is None and not (path / "export" / "config.json").is_file():
            raise ConfigError(f"--model {path}: this run has neither a checkpoint nor an export yet.")
        return (newest[1] if newest else None), path
    step = path.resolve()
    step = step.parent if step.name == "trainer" else step
    run = step.parent.parent
    return step, run if step.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None


def _reference(checkpoint: Path, run: Path | None, given: str | Path | None) -> Path:
    """The directory with config and tokenizer for a checkpoint."""
    open_source(checkpoint)  # first: for a directory that is no checkpoint a reference would not help
    if given is None and run is None:
        raise ConfigError(
            f"--model {checkpoint}: a Megatron checkpoint has no config.json and no tokenizer; pass --hf with the model "
            "directory that the training started from."
        )
    found = Path(given) if given is not None else Path(load_config(run / "config.yaml", []).model.path if run else "")
    if not (found / "config.json").is_file():
        where = "--hf" if given is not None else f"model.path of {run}/config.yaml"
        raise ConfigError(f"{where}: {found} is no model directory (no config.json); pass --hf with one.")
    return found


def _convert(checkpoint: Path, out: Path, reference: Path, say: Callable[[str], None]) -> None:
    if current_export(checkpoint, out, reference):
        say(f"{checkpoint}: already converted, using {out}")
        return
    say(f"{checkpoint}: converting to {out}")
    to_huggingface(checkpoint, out, reference, Options(overwrite=True))
