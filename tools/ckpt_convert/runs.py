"""The checkpoint and the reference that CKPT means, where it is a run of rlflow or a save directory
of many iterations."""

from __future__ import annotations

from pathlib import Path

from rlflow.errors import described
from rlflow.run.checkpoints import Checkpoints

from .problems import missing
from .readers.folders import STEP_FOLDERS, locate, reference_beside


def chosen_checkpoint(path: Path, iteration: int | None = None) -> Path:
    """That of the iteration, whatever a tracker file names; of a run the newest one; else `path` as
    it is.

    Raises ConversionError (3) for a run without a checkpoint."""
    for pattern in STEP_FOLDERS if iteration is not None else ():
        for folder in (path, path / "checkpoints"):
            if (folder / pattern.format(iteration)).is_dir():
                return folder / pattern.format(iteration)
    if not (path / "config.yaml").is_file():
        return path
    newest = Checkpoints(path / "checkpoints").latest()
    if newest is None:
        raise missing(f"{path}: this run has no checkpoint yet; expected one in checkpoints/.")
    return newest[1]


def reference_of(checkpoint: Path) -> Path:
    """The model directory that the run of a checkpoint began from, or whose configuration lies
    beside the checkpoint. Raises ConversionError (3) where none is known."""
    import yaml

    known = [folder / "config.yaml" for folder in checkpoint.resolve().parents[:3]]
    file = next((file for file in known if file.is_file()), None)
    if file is None:
        beside = reference_beside(locate(checkpoint))  # which says itself where nothing is there
        if beside is not None:
            return beside
        raise missing(
            f"{checkpoint}: is of no run of rlflow, which would say what it began from; pass --hf "
            "with the model directory."
        )
    try:
        reference = Path(yaml.safe_load(file.read_text(encoding="utf-8"))["model"]["path"])
        (reference / "config.json").stat()
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        text = f"model.path is no model directory here ({described(error)}); pass --hf with one"
        raise missing(f"{file}: {text}.") from None
    return reference
