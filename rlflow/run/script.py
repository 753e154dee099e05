"""The run directory of a training loop of one's own: metrics, episodes, checkpoints, export."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlflow.config.loading import save_config
from rlflow.config.yaml_text import read_yaml
from rlflow.errors import CheckpointError, ConfigError
from rlflow.report.lines import evaluation_line, numbers
from rlflow.report.metrics import save_registered
from rlflow.report.records import write_trajectories
from rlflow.report.reductions import rollout_metrics, update_metrics
from rlflow.report.sinks import PICTURE, MetricsLog, Sink, make_display
from rlflow.report.timer import Clock
from rlflow.rollout.rollout import Rollout
from rlflow.run.checkpoints import TRAINER, Checkpoints, Saver
from rlflow.run.directory import RunDirectory
from rlflow.run.evaluate import evaluate
from rlflow.run.export import export_policy
from rlflow.trainer.base import Trainer
from rlflow.types import Group, Task

SCRIPT = "script"
"""In a saved state what the script gave to `save`; in config.yaml the script's path, which no other
run has."""
SAY = functools.partial(print, flush=True)
KEPT_CHECKPOINTS = 2
KEPT_GROUPS = 2


class RunFolder(AbstractContextManager["RunFolder"]):
    """The folder in which a training loop of your own keeps its run; `rlflow view`, `show` and
    `compare` read it as any other.

    Opened again, it takes trainer and rollout to its newest checkpoint, and what was recorded after
    that one is dropped. With `deterministic=True` in the rollout, the run then goes on bit for bit
    as if it had never stopped. Without a checkpoint it begins anew.

    step: how many steps are done. state: what was given to the last `save`, {} before."""

    def __init__(
        self,
        path: str | Path,
        trainer: Trainer,
        rollout: Rollout,
        *,
        say: Callable[[str], object] = SAY,
    ) -> None:
        """say: given a line for each step and evaluation.

        Raises ConfigError where the folder is in use, or holds something else;
        DamagedCheckpointError."""
        self.trainer = trainer
        self.rollout = rollout
        self.step = 0
        self.state: dict[str, Any] = {}
        self._say = say
        self._clock = Clock()
        path = Path(path)
        _refuse_others(RunDirectory(path))
        resumes = Checkpoints(RunDirectory(path).checkpoints).latest() is not None
        self.directory = RunDirectory.create(path, resume=resumes, overwrite=not resumes)
        try:
            if resumes:
                self._resume()
            self._note_start()
            resumed_step = self.step if resumes else None
            self._metrics = MetricsLog(path, self._displays(), resumed_step)
        except BaseException:
            self.directory.close()
            raise
        self._saver = Saver(trainer, self.directory.saved, KEPT_CHECKPOINTS)

    def record(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """Counts a step: writes the metrics of its episodes and of its update, which it returns,
        and some of the episodes. metrics: what `Trainer.update` returned."""
        self.step += 1
        registered = self.rollout.environment.metrics
        trajectories = [one for group in groups for one in group.trajectories]
        values = {
            **rollout_metrics(trajectories, registered),
            **update_metrics([metrics], {}),
            "time/run_s": self._clock.seconds,
        }
        self._metrics.log(self.step, values)
        episodes = self.directory.trajectories(self.step)
        write_trajectories(episodes, groups[:KEPT_GROUPS])
        self._tell(f"step {self.step}", *numbers(values, registered))
        return values

    def evaluate(
        self, tasks: Sequence[Task], samples_per_prompt: int = 1, temperature: float = 0.0
    ) -> dict[str, float]:
        """Attempts every task, writes the metrics and all episodes; returns the metrics as
        `eval/<name>`, with 95% intervals. Raises RolloutError where no attempt was usable."""
        made = evaluate(
            self.rollout,
            tasks,
            step=self.step,
            samples_per_prompt=samples_per_prompt,
            temperature=temperature,
        )
        values = {**made.metrics, "time/run_s": self._clock.seconds}
        self._metrics.log(self.step, values)
        write_trajectories(self.directory.evaluations(self.step), made.groups)
        line = evaluation_line(values, self.rollout.environment.metrics)
        self._tell(f"evaluation after step {self.step}", line)
        return made.metrics

    def save(self, state: Mapping[str, Any] | None = None) -> Path:
        """Writes a checkpoint, to go on from; returns its directory. A kill meanwhile leaves the
        one before; the newest two are kept. state: what the script itself must know, of what JSON
        can say, tensors and bytes. Raises StorageError."""
        self.state = dict(state or {})
        self._metrics.sync()
        held = {
            "step": self.step,
            "seconds": self._clock.seconds,
            "rollout": self.rollout.state_dict(),
            SCRIPT: self.state,
        }
        self._saver.save(self.step, held)
        return self.directory.saved.path(self.step)

    def export(self, reference: str | Path, dtype: str = "float32") -> Path:
        """Writes the policy as a HuggingFace directory, and holds it against transformers; returns
        its path. reference: the directory with configuration and tokenizer. dtype: the trainer's.
        Raises StorageError, ModelError."""
        export_policy(self.trainer, self.directory.export, reference, dtype)
        self._tell(f"exported to {self.directory.export}")
        return self.directory.export

    def close(self) -> None:
        """Draws the picture, and lets others write here again."""
        try:
            if picture := self._metrics.report_files().get(PICTURE):
                self._tell(f"curve: {picture}")
            self._metrics.close()
        finally:
            self.directory.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resume(self) -> None:
        saved = self.directory.saved
        latest = saved.latest()
        assert latest is not None
        step, path = latest
        state = saved.read_state(step)
        if not {"rollout", SCRIPT} <= state.keys():
            raise CheckpointError(f"{path}: another version of rlflow wrote it; begin anew.")
        self.trainer.load(path / TRAINER)
        self.rollout.load_state_dict(state["rollout"])
        self.rollout.load_weights(self.trainer.weights(), version=self.rollout.version)
        self.step = step
        self.state = dict(state[SCRIPT])
        self._clock.before_s = float(state["seconds"])
        self.directory.drop_after(step)
        self._tell(f"going on after step {step} from {path}")

    def _note_start(self) -> None:
        self.directory.summary.unlink(missing_ok=True)
        name = self.directory.path.resolve().name
        save_config({"run": {"name": name}, SCRIPT: sys.argv[0]}, self.directory.config)
        save_registered(self.directory.environment_metrics, self.rollout.environment.metrics)

    def _displays(self) -> list[Sink]:
        """The picture, where an installed package draws one."""
        path = self.directory.path
        offered = {"directory": path, "run_name": path.resolve().name}
        picture = make_display(PICTURE, PICTURE, **offered)
        return [] if picture is None else [picture]

    def _tell(self, *parts: str) -> None:
        self._say("  ".join(parts))


def _refuse_others(directory: RunDirectory) -> None:
    """Raises ConfigError where the run in a directory is not that of a script."""
    if directory.config.is_file() and SCRIPT not in read_yaml(directory.config, aliases=False):
        raise ConfigError(
            f"{directory.path}: expected the run of a script, found one of `rlflow train`; choose "
            "another folder."
        )
