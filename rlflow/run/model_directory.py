"""The HuggingFace directory of a model that was named as such, as a run, or as a checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError, ConversionError
from rlflow.models.hub import is_hub_name, local_model
from rlflow.models.huggingface import refuse_adapter
from rlflow.run.directory import RunDirectory
from rlflow.run.origin import starting_model

CONVERTERS = "rlflow.converters"


class Converter(Protocol):
    """What an entry point of the group `rlflow.converters` names: an object, or a module, with these functions."""

    def check(self, checkpoint: Path) -> None:
        """Returns for a checkpoint of a format that it reads. Raises ConversionError."""

    def convert(self, checkpoint: Path, out: Path, reference: Path, say: Callable[[str], None]) -> None:
        """Makes the HuggingFace directory `out` with config and tokenizer of `reference`, in place of one that is there;
        leaves it where it is already what would be made. Raises ConversionError."""


@dataclass(frozen=True)
class ModelDirectory:
    """path: the HuggingFace directory. name: what results are filed under. config: of the run that it comes from."""

    path: Path
    name: str
    config: Path | None


def fetch_models(config: RunConfig, weights: bool = True) -> list[str]:
    """Puts directories in place of names on the hub: of the policy, and of a teacher that is a model. What is not in the cache is
    fetched, without `weights` the small files alone; then what is still missing is told, a line each. Raises ModelError."""
    policy = local_model(config.model.path, weights, code=config.model.trust_remote_code)
    config.model.path, notes = policy.path, policy.notes
    teacher = config.algorithm.teacher
    if teacher.get("name") == "model" and isinstance(teacher.get("path"), str):
        found = local_model(teacher["path"], weights, key="algorithm.teacher.path")
        config.algorithm.teacher = {**teacher, "path": found.path}
        notes = [*notes, *found.notes]
    return notes


@contextmanager
def model_directory(
    given: str | Path, reference: str | Path | None, say: Callable[[str], None]
) -> Iterator[ModelDirectory]:
    """A HuggingFace directory as it is; a checkpoint, or the newest one of a run, converted by an installed converter.

    The converted one stays beside the checkpoint as `<name>.hf` and serves again while the checkpoint and the reference
    are what they were; where that place cannot be written, it is temporary and gone afterwards. reference: the
    directory with config and tokenizer; None: the model that the run started from.

    Raises ConfigError where there is no model, reference or converter, ModelError for a LoRA adapter, ConversionError for a
    checkpoint that cannot be converted."""
    path = Path(local_model(str(given), key="--model").path)
    if not path.is_dir():
        expected = "a model directory, a run, a checkpoint, or a name on the hub"
        raise ConfigError(f"--model {path}: no such directory; expected {expected}.")
    refuse_adapter(path)
    beside = path.resolve().parent / "config.yaml"
    if (path / "config.json").is_file():
        whole = path.resolve()
        name = whole.parent.name if whole.name == "export" else whole.name
        if is_hub_name(str(given)):  # the directory is called after the commit
            name = str(given).partition("@")[0].rpartition("/")[2]
        yield ModelDirectory(path, name, beside if beside.is_file() else None)
        return
    checkpoint, run = _checkpoint(path)
    if checkpoint is None:  # a run that was only exported
        yield ModelDirectory(path / "export", path.resolve().name, path / "config.yaml")
        return
    converter = _converter(checkpoint)  # first: for a directory that is no checkpoint a reference would not help
    model = _reference(checkpoint, run, reference)
    name = checkpoint.name if run is None else f"{run.resolve().name}-{checkpoint.name}"
    config = run / "config.yaml" if run else None
    out = checkpoint.with_name(checkpoint.name + ".hf")
    if os.access(out.parent, os.W_OK):
        converter.convert(checkpoint, out, model, say)
        yield ModelDirectory(out, name, config)
        return
    with tempfile.TemporaryDirectory(prefix="rlflow-") as place:
        converter.convert(checkpoint, Path(place) / out.name, model, say)
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


def _converter(checkpoint: Path) -> Converter:
    """The first installed converter that reads the checkpoint. Raises what the first one has against it where none does."""
    refusals: list[ConversionError] = []
    for entry in metadata.entry_points(group=CONVERTERS):
        converter: Converter = entry.load()
        try:
            converter.check(checkpoint)
        except ConversionError as error:
            refusals.append(error)
        else:
            return converter
    if refusals:
        raise refusals[0]
    raise ConfigError(
        f"--model {checkpoint}: no config.json, and no installed package converts checkpoints (entry points of the group "
        f"'{CONVERTERS}'); install one, or name a HuggingFace model directory."
    )


def _reference(checkpoint: Path, run: Path | None, given: str | Path | None) -> Path:
    """The directory with config and tokenizer for a checkpoint."""
    if given is None and run is None:
        raise ConfigError(
            f"--model {checkpoint}: a Megatron checkpoint has no config.json and no tokenizer; pass --hf with the model "
            "directory that the training started from."
        )
    named = str(given) if given is not None else starting_model(run / "config.yaml", "--hf") if run else ""
    found = Path(local_model(named, weights=False, key="--hf" if given is not None else "model.path").path)
    if not (found / "config.json").is_file():
        where = "--hf" if given is not None else f"model.path of {run}/config.yaml"
        raise ConfigError(f"{where}: {found} is no model directory (no config.json); pass --hf with one.")
    return found
