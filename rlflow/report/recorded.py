"""What a run or an evaluation left on disk, for reading: episodes, tokens, metrics,
configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow.report.metrics import Metrics, load_registered
from rlflow.report.records import read_trajectories, solved
from rlflow.report.sinks import read_metrics
from rlflow.report.tokens import EpisodeTokens, read_tokens
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import read_json

Record = dict[str, Any]
EVALUATED = "trajectories.jsonl"
"""Where `rlflow eval --out` writes its episodes."""


@dataclass
class RunFiles:
    """A run, an evaluation's folder (one evaluation, at step 0) or a file of episodes. training,
    evaluations: {step: file}."""

    path: Path
    name: str
    registered: Metrics
    training: dict[int, Path]
    evaluations: dict[int, Path]
    tokens: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> RunFiles:
        """What is there. Raises ConfigError where it is neither a run, nor an evaluation, nor a
        file of episodes."""
        path = Path(path)
        if path.is_file():
            return cls(path, path.stem, registered_beside(path), {}, {0: path})
        if (path / EVALUATED).is_file():
            return cls(
                path,
                path.resolve().name,
                registered_beside(path / EVALUATED),
                {},
                {0: path / EVALUATED},
            )
        run = RunDirectory.open(path)
        last = _last_step(run)
        folders = {
            name: _by_step(path / name, last) for name in ("trajectories", "evaluations", "tokens")
        }
        registered = load_registered(run.environment_metrics)
        return cls(
            path,
            path.resolve().name,
            registered,
            folders["trajectories"],
            folders["evaluations"],
            folders["tokens"],
        )

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """The records of metrics.jsonl by step; none without the file."""
        file = RunDirectory(self.path).metrics
        return read_metrics(file) if file.is_file() else []

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as it stands in config.yaml; empty without one. Raises
        ConfigError for a damaged file."""
        import yaml

        file = RunDirectory(self.path).config
        if not file.is_file():
            return {}
        try:
            read = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{file}: expected YAML, found {str(error).splitlines()[0]}."
            ) from None
        return read if isinstance(read, dict) else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What summary.json says; empty before the end."""
        file = self.path / "summary.json"
        read = read_json(file) if file.is_file() else {}
        return read if isinstance(read, dict) else {}

    def records(self, kind: str, step: int) -> list[Record]:
        """The episodes of a step, whose files are there. kind: train or eval."""
        return read_trajectories((self.training if kind == "train" else self.evaluations)[step])

    def tokens_of(self, step: int) -> dict[str, EpisodeTokens]:
        """{id of the episode: its tokens} of a training step; empty where none were stored."""
        return read_tokens(self.tokens[step]) if step in self.tokens else {}

    def solved_share(self, group: Sequence[Record]) -> float | None:
        """The share of the group's usable attempts that solved their task; None where none is
        usable."""
        usable = [record for record in group if record.get("stop") != "aborted"]
        return (
            sum(solved(record, self.registered) for record in usable) / len(usable)
            if usable
            else None
        )


def registered_beside(episodes: Path) -> Metrics:
    """What the environment of a file of episodes registered; the file lies in the run directory or
    one folder below."""
    here, above = (
        RunDirectory(folder).environment_metrics for folder in episodes.absolute().parents[:2]
    )
    return load_registered(here) or load_registered(above)


def grouped(records: list[Record]) -> list[list[Record]]:
    """The episodes by group, in the order of the file."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.get("group_id", record["task_id"])), []).append(record)
    return list(groups.values())


def _last_step(run: RunDirectory) -> int | None:
    """The last step that metrics.jsonl knows: what a resumed run left of later ones is about to be
    replaced."""
    records = read_metrics(run.metrics) if run.metrics.is_file() else []
    return int(records[-1]["step"]) if records else None


def _by_step(folder: Path, last: int | None) -> dict[int, Path]:
    found = {}
    for file in sorted(folder.glob("step_*.*")):
        number = file.stem.removeprefix("step_")
        if (
            file.suffix in (".jsonl", ".npz")
            and number.isdigit()
            and (last is None or int(number) <= last)
        ):
            found[int(number)] = file
    return found
