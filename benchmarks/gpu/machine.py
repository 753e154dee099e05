"""What the cases of the GPU session share: where they write figures, the device, models of
random weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import SHAPES, write_random_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for `tests`
GB = 1e9
MODELS = {**SHAPES, "3B, one layer": dataclasses.replace(SHAPES["3B"], layers=1)}


class Skipped(Exception):
    """A case that cannot run here; the text says why."""


@dataclass(frozen=True)
class Report:
    """A case's device and sizes, and where its figures go: a JSON line each, written at once.

    folder: of the session's output. models: of models that cases share. quick: tiny sizes."""

    case: str
    device: str
    quick: bool
    folder: Path
    models: Path
    lines: Path

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def row(self, what: str, figure: float, unit: str, **more: Any) -> None:
        """Writes a figure."""
        line = {"case": self.case, "what": what, "figure": float(figure), "unit": unit, **more}
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def at_most(self, what: str, figure: float, limit: float, unit: str, **more: Any) -> None:
        """Writes a figure that is wrong above `limit`; NaN is wrong."""
        self.row(what, figure, unit, limit=limit, ok=bool(figure <= limit), **more)

    def holds(self, what: str, claim: bool, **more: Any) -> None:
        """Writes whether something that has to be true is."""
        self.row(what, float(claim), "true", ok=bool(claim), **more)


def specification(report: Report, place: str, options: dict[str, Any]) -> str:
    """What `run.py --case` takes: a case as text. place: `module:function`, called with the
    report and the options."""
    fields = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(report).items()
    }
    return json.dumps({"place": place, "options": options, "report": fields})


def command(text: str) -> list[str]:
    """How a case is run."""
    return [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), "--case", text]


def on_the_cpu(report: Report, place: str, **options: Any) -> None:
    """Runs a case in a process that sees no GPU. Raises Skipped with what it said at last."""
    asked = specification(dataclasses.replace(report, device="cpu"), place, options)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command(asked), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Skipped(f"on the CPU: {last_line(done.stderr)}")


def last_line(text: str) -> str:
    """What a program said at last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def need(*packages: str) -> None:
    """Raises Skipped where a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")


def need_gpu(report: Report) -> None:
    """Raises Skipped on a CPU."""
    if not report.on_gpu:
        raise Skipped("it needs a GPU")


def model_path(
    report: Report, name: str, dtype: str = "bfloat16", norm: float = 1.0, tied: bool = True
) -> Path:
    """A directory with a model of random weights, written once in a session. name: of MODELS, tiny
    where `report.quick`. norm: weight of the last norm, which the logits' size follows. tied: as
    the small Qwen2.5; with random weights each token is then its own likeliest successor."""
    name = "tiny" if report.quick else name
    path = report.models / f"{name}-{dtype}-{norm:g}{'' if tied else '-untied'}"
    if not path.is_dir():
        begun = path.with_suffix(".part")
        config = {"eos_token_id": None, "tie_word_embeddings": tied}
        write_random_model(begun, MODELS[name], dtype, report.device, **config)
        if norm != 1.0:
            _scale_last_norm(begun / "model.safetensors", norm)
        begun.rename(path)
    return path


def _scale_last_norm(file: Path, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["model.norm.weight"] *= factor
    save_file(tensors, file, metadata={"format": "pt"})


def shape_of(report: Report, name: str) -> Any:
    """The shape of what `model_path` writes."""
    return MODELS["tiny" if report.quick else name]


def synchronized(report: Report) -> float:
    """The time, once the device has done what it was given."""
    import torch

    if report.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def weight_bytes(path: Path) -> int:
    """Of a model directory."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def precision(report: Report) -> str:
    """What the device computes in: CPUs compute bfloat16 slowly."""
    return "bfloat16" if report.on_gpu else "float32"
