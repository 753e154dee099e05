"""The converter that rlflow finds by the entry-point group `rlflow.converters`: see
`rlflow.run.origin.Converter`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .export_model import Options, current_export, to_huggingface
from .readers.formats import open_source


def check(checkpoint: Path) -> None:
    """Returns for a Megatron checkpoint of a format that is read. Raises ConversionError."""
    open_source(checkpoint)


def convert(checkpoint: Path, out: Path, reference: Path, say: Callable[[str], None]) -> None:
    """Exports the checkpoint as `out`, unless that is what stands there and its files are whole.
    Raises ConversionError."""
    if current_export(checkpoint, out, reference):
        say(f"{checkpoint}: already converted, using {out}")
        return
    say(f"{checkpoint}: converting to {out}")
    to_huggingface(checkpoint, out, reference, Options(overwrite=True))
