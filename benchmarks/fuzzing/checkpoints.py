"""Damaged checkpoints: converted or resumed exactly, or refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import yaml
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fuzzing import nonsense
from fuzzing.cases import Wrong, command, forked
from fuzzing.task import settings, write_model
from tests.unit.tools.legacy_files import write_checkpoint

DEADLINE_S = 60.0
CODES = (0, *range(2, 12))
FORMATS = ("torch_dist", "torch", "safetensors", "run")


class Checkpoints:
    """What `rlflow convert` and `rlflow train --resume` read."""

    def prepare(self, folder: Path) -> None:
        self._folder = folder
        self._model = write_model(folder / "model")
        self._whole = _tensors(self._model)
        for kind in FORMATS[:2]:
            write_checkpoint(self._model, folder / kind, kind, CheckpointLayout(2, 2))
        self._train(folder, 2)
        self._run = (folder / "fuzz").rename(folder / "run")
        self._resumed = self._resume(folder / "resumed")
        if self._resumed is None:
            raise SystemExit("a whole run is not resumed")

    def case(self, draw: random.Random, folder: Path) -> bool:
        kind = draw.choice(FORMATS)
        if kind == "run":
            return self._run_case(draw, folder)
        if kind == "safetensors":
            return self._model_case(draw, folder)
        checkpoint, reference = folder / kind, folder / "model"
        shutil.copytree(self._folder / kind, checkpoint)
        shutil.copytree(self._model, reference)
        damaged = checkpoint if draw.random() < 0.9 else reference
        what = [nonsense.damage_folder(damaged, draw) for _ in range(draw.choice([1, 1, 2]))]
        out = folder / "out"
        arguments = [
            "convert",
            "to-hf",
            str(checkpoint),
            str(out),
            "--hf",
            str(reference),
            "--workers",
            "1",
            "--verify",
            "full",
        ]
        try:
            accepted = forked(command(arguments), folder, DEADLINE_S).check(CODES)
            if accepted:
                _compare(_tensors(out), self._whole)
            elif out.exists():
                raise Wrong("it was refused, and an output is there")
        except Wrong as found:
            raise Wrong(f"{kind}, {what}: {found}") from None
        return accepted

    def close(self) -> dict[str, float]:
        return {}

    def _model_case(self, draw: random.Random, folder: Path) -> bool:
        """A model directory to Megatron's format and back: nobody knows what its bytes were, so they must come back as they
        are."""
        model, there, back = folder / "model", folder / "there", folder / "back"
        shutil.copytree(self._model, model)
        what = nonsense.damage_folder(model, draw)
        try:
            arguments = [
                "convert",
                "to-megatron",
                str(model),
                str(there),
                "--workers",
                "1",
                "--verify",
                "full",
            ]
            if not forked(command(arguments), folder, DEADLINE_S).check(CODES):
                return False
            try:
                expected = _tensors(model)
            except (SafetensorError, OSError, ValueError) as problem:
                raise Wrong(f"converted, but not read by safetensors: {problem}") from None
            arguments = [
                "convert",
                "to-hf",
                str(there),
                str(back),
                "--hf",
                str(model),
                "--workers",
                "1",
                "--verify",
                "full",
            ]
            if forked(command(arguments), folder, DEADLINE_S).check(CODES):
                _compare(_tensors(back), expected)
        except Wrong as found:
            raise Wrong(f"safetensors, {what}: {found}") from None
        return True

    def _run_case(self, draw: random.Random, folder: Path) -> bool:
        run = folder / "fuzz"
        shutil.copytree(self._run, run, symlinks=True)
        what = nonsense.damage_folder(run if draw.random() < 0.3 else run / "checkpoints", draw)
        try:
            found = self._continue(folder)
            if found is not None:
                _compare(found, self._resumed or {})
        except Wrong as problem:
            raise Wrong(f"run, {what}: {problem}") from None
        return found is not None

    def _resume(self, folder: Path) -> dict[str, np.ndarray] | None:
        folder.mkdir()
        shutil.copytree(self._run, folder / "fuzz", symlinks=True)
        return self._continue(folder)

    def _continue(self, folder: Path) -> dict[str, np.ndarray] | None:
        """The exported tensors of a copy of the run that is continued by a step; None where it is refused."""
        return _tensors(folder / "fuzz" / "export") if self._train(folder, 3, "--resume") else None

    def _train(self, folder: Path, steps: int, *flags: str) -> bool:
        values = settings(self._model, folder)
        values["run"] |= {"steps": steps, "deterministic": True}
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        return forked(
            command(["train", "--config", str(config), *flags]), folder, DEADLINE_S
        ).check()


def _tensors(model: Path) -> dict[str, np.ndarray]:
    """All tensors of a HuggingFace directory, as the reference reader of safetensors has them."""
    return {
        name: array
        for path in sorted(model.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def _compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    if found.keys() != expected.keys():
        raise Wrong(f"other tensors: {sorted(found.keys() ^ expected.keys())[:5]}")
    for name, array in expected.items():
        ours = found[name]
        if (
            ours.dtype != array.dtype
            or ours.shape != array.shape
            or ours.tobytes() != array.tobytes()
        ):
            raise Wrong(
                f"{name} is another: {ours.dtype} {ours.shape}, expected {array.dtype} {array.shape}"
            )
