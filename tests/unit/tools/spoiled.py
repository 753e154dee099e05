"""Checkpoints that somebody has spoiled: by a byte, or to have code run."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.writers import directory

from rlflow.errors import RLFlowError
from rlflow.models.huggingface import digest, iterate_weights


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


def when_finished(monkeypatch: pytest.MonkeyPatch, action: Callable[[Path], None]) -> None:
    """Has `action` called once with a conversion's finished directory, before it gets its name."""

    def look(place: Path, *rest: Any) -> Any:
        monkeypatch.setattr(directory, "_fingerprints", real)
        action(place)
        return real(place, *rest)

    real = directory._fingerprints
    monkeypatch.setattr(directory, "_fingerprints", look)


def convert_with_changed_bytes(
    case: tuple[Path, Path, Path], files: Sequence[Path], count: int, seed: int
) -> None:
    """Changes a byte of one file after another; a conversion is refused, or gives the weights of the reference."""
    checkpoint, reference, out = case
    truth = digest(iterate_weights(reference))
    draw = random.Random(seed)
    for number in range(count):
        file = files[number % len(files)]
        content = file.read_bytes()
        at = draw.randrange(len(content))
        changed = bytes([content[at] ^ draw.randrange(1, 256)])
        file.write_bytes(content[:at] + changed + content[at + 1 :])
        try:
            to_huggingface(checkpoint, out, reference, Options(verify="full"))
        except RLFlowError:
            assert not out.exists()
        else:
            assert digest(iterate_weights(out)) == truth, f"{file.name} byte {at} -> {changed!r}"
            shutil.rmtree(out)
        file.write_bytes(content)
