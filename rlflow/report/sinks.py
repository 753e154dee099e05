"""Destinations of a run's metrics: metrics.jsonl, TensorBoard, Weights & Biases, what shows them to
a person."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlflow.components import SINK
from rlflow.errors import CheckpointError, ConfigError, install_command, needing
from rlflow.storage.files import plain, read_json_lines, write_json_lines

logger = logging.getLogger(__name__)

PAGE, PICTURE = "page", "picture"
"""Names of the sinks that show a run to a person; metrics.page and metrics.picture ask for them."""


class Sink(Protocol):
    """Somewhere to write metrics to."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ReportSink(Sink, Protocol):
    """A sink that writes files for a person to look at."""

    def report_files(self) -> Mapping[str, Path]:
        """Brings them up to date; returns {name in the run's summary: file}."""


class PageSink(ReportSink, Protocol):
    """The sink `page`: shows a run from before there is a directory, which it is made without,
    until its engines have ended, after the last metrics."""

    def open(self, directory: Path) -> None:
        """Shows the files of the run in this directory from now on."""

    def stop(self) -> None:
        """Ends the service."""


class MetricsLog(AbstractContextManager["MetricsLog"]):
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
        values = {name: float(value) for name, value in values.items()}
        self._confirm()
        record = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(plain(record)) + "\n")
        self._file.flush()
        for sink in self.sinks:
            sink.write(step, values)

    def report_files(self) -> dict[str, Path]:
        """The files that sinks write for a person, up to date: {name in the summary: file}."""
        reports = [sink.report_files() for sink in self.sinks if isinstance(sink, ReportSink)]
        return {name: path for report in reports for name, path in report.items()}

    def sync(self) -> None:
        """Brings the file to disk: it must survive a power cut if a checkpoint does."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with ExitStack() as stack:  # each in any case, the last one first
            stack.callback(self._file.close)
            for sink in self.sinks:
                stack.callback(sink.close)

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


def make_display(name: str, where: str, **offered: Any) -> Any:
    """The sink PAGE or PICTURE. None, with a warning, where no installed package has it or its
    module cannot be imported: a run need not be looked at to go on."""
    try:
        return SINK.build(name, where, **offered)
    except ConfigError as error:
        logger.warning("%s The run goes on without it.", error)
        return None


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The records of a metrics.jsonl by ascending step, records of one step merged.

    Nulls are left out; so is a last line that a kill cut short.

    Raises:
        CheckpointError: the file is missing, or another line is no record.
    """
    merged: dict[int, dict[str, float]] = {}
    for record in _records(path):
        values = {name: value for name, value in record.items() if value is not None}
        merged.setdefault(record["step"], {}).update(values)
    return [merged[step] for step in sorted(merged)]


def _records(path: str | Path) -> list[dict[str, Any]]:
    records = read_json_lines(path, unfinished=True)
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise CheckpointError(
                f"{path}:{number}: expected an object with the number of its step, found "
                "another value; remove this line."
            )
    return records


def _drop_records_after(path: Path, step: int | None, evaluations: int | None) -> None:
    """Rewrites the file without records after `step` and a half-written last line.

    Of the evaluations at `step` the first so many stay; None keeps all."""
    kept = []
    for record in _records(path):
        if step is not None and record["step"] > step:
            continue
        if record["step"] == step and any(name.startswith("eval/") for name in record):
            if evaluations == 0:
                continue
            evaluations = None if evaluations is None else evaluations - 1
        kept.append(record)
    write_json_lines(path, kept)
