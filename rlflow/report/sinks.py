"""Where a run's metrics go: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from rlflow.components import SINK
from rlflow.errors import CheckpointError, install_command, needing
from rlflow.storage.files import write_json_lines


class Sink(Protocol):
    """Somewhere to write metrics to."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Writes each step's metrics to `<directory>/metrics.jsonl` and to further sinks.

    A line of the file is a JSON object: step, time (Unix seconds), metrics; null for what is not
    finite. On resume, records after `resumed_step` are dropped first, so that the file reads as if
    the run had never stopped; `evaluations` of that step are kept (None: all). `confirm` is called
    before each record."""

    def __init__(
        self,
        directory: str | Path,
        sinks: Sequence[Sink] = (),
        resumed_step: int | None = None,
        evaluations: int | None = None,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        self.sinks, self._confirm = list(sinks), confirm
        path = Path(directory) / "metrics.jsonl"
        if path.exists():
            _drop_records_after(path, resumed_step, evaluations)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one record; its line is flushed whole."""
        plain = {name: float(value) for name, value in values.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in plain.items()}
        self._confirm()
        record = {"step": step, "time": round(time.time(), 3), **finite}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for sink in self.sinks:
            sink.write(step, plain)

    def sync(self) -> None:
        """Brings the file to disk: it must survive a power cut if a checkpoint does."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with closing(self._file):
            for sink in self.sinks:
                sink.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoardSink:
    """Writes scalars to `<directory>/tensorboard`; what came after `resumed_step` is hidden."""

    def __init__(self, directory: str | Path, resumed_step: int | None = None) -> None:
        with needing("metrics.sinks", install_command("tensorboard")):
            from torch.utils.tensorboard import SummaryWriter
        purge_step = None if resumed_step is None else resumed_step + 1
        self.writer = SummaryWriter(str(Path(directory) / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """Writes to a Weights & Biases run. `config` is uploaded: hand over the redacted one.

    The run's id is kept in `<directory>/wandb/run_id.txt`; with `resumed_step` its curves go on.
    Weights & Biases never takes a step back, so steps are a metric of their own: those made again
    after a resume are shown again, none is dropped."""

    def __init__(
        self,
        directory: str | Path,
        *,
        project: str = "rlflow",
        run_name: str = "run",
        config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
    ) -> None:
        with needing("metrics.sinks", install_command("wandb")):
            import wandb
        kept = Path(directory) / "wandb" / "run_id.txt"
        goes_on = resumed_step is not None and kept.is_file()
        known = kept.read_text(encoding="utf-8").strip() if goes_on else ""
        run_id = known or uuid.uuid4().hex
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(run_id + "\n", encoding="utf-8")
        self.run = wandb.init(
            id=run_id,
            resume="allow",
            project=project,
            name=run_name,
            dir=str(directory),
            config=dict(config or {}),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self) -> None:
        self.run.finish()


def make_sinks(
    directory: str | Path,
    components: Sequence[str | Mapping[str, Any]],
    *,
    run_name: str = "run",
    config: Mapping[str, Any] | None = None,
    resumed_step: int | None = None,
) -> list[Sink]:
    """The named sinks of a run: [tensorboard, {name: wandb, project: x}].

    Raises:
        ConfigError: an unknown name or keyword.
        MissingPackageError: a sink's package is not installed.
    """
    offered = {
        "directory": directory,
        "run_name": run_name,
        "config": config,
        "resumed_step": resumed_step,
    }
    return [
        SINK.build(component, f"metrics.sinks[{place}]", **offered)
        for place, component in enumerate(components)
    ]


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The records of a metrics.jsonl by ascending step, records of one step merged.

    Nulls are left out; so is a last line that a kill cut short.

    Raises:
        CheckpointError: the file is missing, or a line other than the last is not JSON.
    """
    path = Path(path)
    if not path.exists():
        expected = "expected the metrics.jsonl of a run directory"
        raise CheckpointError(f"{path}: no such file; {expected}.")
    merged: dict[int, dict[str, float]] = {}
    for record in _records(path):
        values = {name: value for name, value in record.items() if value is not None}
        merged.setdefault(int(record["step"]), {}).update(values)
    return [merged[step] for step in sorted(merged)]


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise CheckpointError(f"{path}:{number}: {error}; remove this line.") from None
    return records


def _record(line: bytes) -> dict[str, Any]:
    """Raises ValueError, which says what is wrong with the line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("not a record of metrics, but nested without end") from None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, (int, float)) or isinstance(step, bool) or not math.isfinite(step):
        raise ValueError("expected an object with the number of its step, found another value")
    return record


def _drop_records_after(path: Path, step: int | None, evaluations: int | None) -> None:
    """Rewrites the file without records after `step` and a half-written last line.

    Of the evaluations at `step` the first so many stay; None keeps all."""
    kept = [record for record in _records(path) if step is None or record["step"] <= step]
    if evaluations is not None:
        evaluated = [one for one in kept if any(name.startswith("eval/") for name in one)]
        unknown = [one for one in evaluated if one["step"] == step][evaluations:]
        kept = [one for one in kept if not any(one is other for other in unknown)]
    write_json_lines(path, kept)
