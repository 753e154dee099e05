"""Files of a run or an evaluation, for reading: episodes, tokens, metrics, configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlflow.config.yaml_text import read_yaml
from rlflow.report.metrics import Metrics, load_registered
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.report.tokens import EpisodeTokens, read_tokens
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import leaves, read_json

from .episodes import solved

Record = dict[str, Any]
EVALUATED = "trajectories.jsonl"
"""Where `rlflow eval --out` writes its episodes."""


@dataclass
class RunFiles:
    """A run, an evaluation's folder (one evaluation, at step 0) or a file of episodes.

    training, evaluations, tokens: {step: file}."""

    path: Path
    name: str
    registered: Metrics
    training: dict[int, Path]
    evaluations: dict[int, Path]
    tokens: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> RunFiles:
        """The files there. Raises ConfigError where it is none of the three."""
        path = Path(path)
        if path.is_file() and path.suffix == ".jsonl":
            return cls(path, path.stem, registered_beside(path), {}, {0: path})
        name, episodes = path.resolve().name, path / EVALUATED
        if _is_evaluation(path):
            return cls(path, name, registered_beside(episodes), {}, {0: episodes})
        registered = load_registered(RunDirectory.open(path).environment_metrics)
        run = cls(path, name, registered, {}, {})
        # Files of later steps a resumed run is about to replace
        last = run.metrics[-1]["step"] if run.metrics else math.inf
        run.training, run.evaluations, run.tokens = (
            _by_step(path / kind, last) for kind in ("trajectories", "evaluations", "tokens")
        )
        return run

    @property
    def is_run(self) -> bool:
        """Whether it is a run, neither the folder of an evaluation nor a file."""
        return self.path.is_dir() and not _is_evaluation(self.path)

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The records of metrics.jsonl by step; none without the file."""
        file = RunDirectory(self.path).metrics
        return read_metrics(file) if file.is_file() else []

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config.yaml; empty without one. Raises ConfigError for a damaged file."""
        file = RunDirectory(self.path).config
        return read_yaml(file, aliases=False) if file.is_file() else {}

    @property
    def settings(self) -> dict[str, Any]:
        """{dotted key: value} of the configuration."""
        return dict(leaves(self.config))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; empty before the end."""
        file = self.path / "summary.json"
        read = read_json(file) if file.is_file() else {}
        return read if isinstance(read, dict) else {}

    def records(self, kind: str, step: int) -> list[Record]:
        """The episodes of a step, whose files are there. kind: train or eval."""
        return read_trajectories(self.file(kind, step))

    def file(self, kind: str, step: int) -> Path:
        """Where these episodes are."""
        return (self.training if kind == "train" else self.evaluations)[step]

    def tokens_of(self, step: int) -> dict[str, EpisodeTokens]:
        """{id of the episode: its tokens} of a training step; empty where none were stored."""
        return read_tokens(self.tokens[step]) if step in self.tokens else {}

    def solved_share(self, group: Sequence[Record]) -> float | None:
        """The share of usable attempts that solved their task; None where none is usable."""
        usable = [one for one in group if one.get("stop") != "aborted"]
        won = sum(solved(one, self.registered) for one in usable)
        return won / len(usable) if usable else None


def _is_evaluation(folder: Path) -> bool:
    """Whether a folder holds an evaluation and no run."""
    return (folder / EVALUATED).is_file() and not RunDirectory(folder).metrics.is_file()


def registered_beside(episodes: Path) -> Metrics:
    """The metrics that the environment registered, of episodes in a run directory or below it."""
    folders = map(RunDirectory, episodes.absolute().parents[:2])
    here, above = (load_registered(folder.environment_metrics) for folder in folders)
    return here or above


def grouped(records: list[Record]) -> list[list[Record]]:
    """The episodes by group, in the order of the file."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        name = str(record.get("group_id", record["task_id"]))
        groups.setdefault(name, []).append(record)
    return list(groups.values())


def _by_step(folder: Path, last: float) -> dict[int, Path]:
    found = {}
    for file in sorted(folder.glob("step_*.*")):
        name = re.fullmatch(r"step_(\d+)\.(jsonl|npz)", file.name)
        if name and int(name[1]) <= last:
            found[int(name[1])] = file
    return found
