"""Metric names with units (one table), reductions, phase timers, and the sinks that a run writes to.

A name is `section/name`. An environment's own metrics appear as `rollout/<name>` and `eval/<name>`.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlflow.errors import CheckpointError, MissingPackageError
from rlflow.metrics.memory import PeakMemory

SCORES = ("exact_match", "f1")  # of an episode, whatever the environment
PHASES = ("rollout", "score", "update", "sync", "evaluate", "checkpoint")


class Metric(NamedTuple):
    unit: str
    meaning: str


_PHASE_MEANING = {
    "rollout": "collecting the step's episodes",
    "score": "forward passes without gradients: reference, recomputed log-probs",
    "update": "forward and backward passes and optimizer steps",
    "sync": "sending the new weights to the engines, verification included",
    "evaluate": "evaluation",
    "checkpoint": "writing checkpoints",
}

METRICS: dict[str, Metric] = {
    "train/loss": Metric("nats", "the minimized loss, mean over the step's minibatches"),
    "train/reward": Metric("reward", "mean return of the usable episodes"),
    "train/exact_match": Metric("share", "of the training episodes, at the sampling temperature"),
    "train/f1": Metric("share", "mean token F1 of the training episodes"),
    "train/gradient_norm": Metric("1", "global L2 norm before clipping, mean over minibatches"),
    "train/lr": Metric("1", "learning rate of the step's last minibatch"),
    "train/clip_fraction": Metric("share", "of trained tokens whose ratio was clipped"),
    "train/ratio": Metric(
        "1", "mean importance ratio, policy / old policy (algorithm.old_logprobs), over trained tokens"
    ),
    "train/old_kl": Metric("nats/token", "KL(old policy || policy), the same two (k3 estimator)"),
    "train/policy_loss": Metric("nats", "the clipped policy-gradient term alone"),
    "train/nll": Metric("nats/token", "negative log-likelihood, with the sft loss"),
    "train/kl": Metric("nats/token", "KL of the policy to the reference (k3 estimator)"),
    "train/entropy": Metric("nats/token", "entropy of the distribution sampled from"),
    "train/logprob_gap": Metric(
        "nats", "mean absolute difference of engine and trainer log-probs of sampled tokens, before the update"
    ),
    "train/advantage_zero": Metric("share", "of episodes in groups whose rewards are all equal: they teach nothing"),
    "train/tokens": Metric("tokens", "trained in the step (loss mask)"),
    "train/fed_tokens": Metric("tokens", "in the training rows, padding excluded"),
    "train/microbatches": Metric("count", "per optimizer step and data-parallel rank"),
    "rollout/episodes": Metric("count", "collected in the step, aborted ones included"),
    "rollout/turns": Metric("per episode", "responses of the policy"),
    "rollout/searches": Metric("per episode", "searches"),
    "rollout/response_tokens": Metric("tokens/episode", "sampled by the policy"),
    "rollout/observation_tokens": Metric("tokens/episode", "fed from the environment"),
    "rollout/observations_cut": Metric("per episode", "observations cut to rollout.max_observation_tokens"),
    "rollout/truncated_max_turns": Metric("share", "of episodes cut by rollout.max_turns"),
    "rollout/truncated_max_tokens": Metric("share", "of episodes cut by a token budget"),
    "rollout/aborted": Metric("share", "of episodes lost to infrastructure; out of loss and baseline"),
    "search/searches": Metric("count", "answered in the step, those of aborted episodes included"),
    "search/hit_rate": Metric("share", "of searches that the client's cache answered; only where there is one"),
    "search/empty_rate": Metric("share", "of searches that found nothing"),
    "search/duplicate_rate": Metric("share", "of searches that their episode had made before"),
    "search/gold_in_top_k": Metric("share", "of searches that found a passage with a gold answer"),
    "data/prompts_dropped": Metric("count", "prompts over data.max_prompt_tokens, of the training split"),
    "data/epoch": Metric("epochs", "passes over the training tasks so far"),
    "speed/tokens_per_s": Metric("tokens/s", "train/fed_tokens by the seconds of the whole step"),
    **{f"time/{phase}_s": Metric("s", _PHASE_MEANING[phase]) for phase in PHASES},
    "time/step_s": Metric("s", "the whole step"),
    "time/search_s": Metric("s", "of the rollout, with at least one search under way"),
    "time/search_wait_s": Metric("s", "per search, until its episode could go on"),
    "time/search_share": Metric("share", "of the whole step, with at least one search under way"),
    **{f"memory/{phase}_gib": Metric("GiB", f"peak, {_PHASE_MEANING[phase]}") for phase in PHASES},
    "eval/exact_match": Metric("share", "of the evaluated questions, failed ones left out"),
    "eval/exact_match_low": Metric("share", "lower end of its 95% interval"),
    "eval/exact_match_high": Metric("share", "upper end of its 95% interval"),
    "eval/f1": Metric("share", "mean token F1"),
    "eval/f1_low": Metric("share", "lower end of its 95% interval"),
    "eval/f1_high": Metric("share", "upper end of its 95% interval"),
    "eval/reward": Metric("reward", "mean return"),
    "eval/reward_low": Metric("reward", "lower end of its 95% interval"),
    "eval/reward_high": Metric("reward", "upper end of its 95% interval"),
    "eval/searches": Metric("per question", "searches"),
    "eval/turns": Metric("per question", "responses of the policy"),
    "eval/response_tokens": Metric("tokens/question", "sampled by the policy"),
    "eval/questions": Metric("count", "questions with an attempt that did not fail"),
    "eval/attempts": Metric("count", "attempts at them (evaluation.samples_per_prompt each), failed ones left out"),
    "eval/failed": Metric("count", "attempts lost to infrastructure: reported apart, never scored 0"),
}


def metrics_table() -> str:
    """The table above in Markdown, for the docs."""
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in METRICS.items()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n"


# ---------------------------------------------------------------- reductions


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def mean_of(records: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Per key the weighted mean over the records that have it, e.g. over the minibatches of a step."""
    weights = weights if weights is not None else [1.0] * len(records)
    reduced = {}
    for key in dict.fromkeys(key for record in records for key in record):
        pairs = [(record[key], weight) for record, weight in zip(records, weights, strict=True) if key in record]
        total = math.fsum(weight for _, weight in pairs)
        reduced[key] = math.fsum(value * weight for value, weight in pairs) / total if total else math.nan
    return reduced


def interval95(values: Sequence[float]) -> tuple[float, float]:
    """(low, high) of a 95% confidence interval of the mean: Wilson's score interval for zeros and ones (E. B. Wilson 1927,
    eq. of Agresti & Coull 1998 sec. 1), else mean +- 1.96 standard errors with Bessel's correction."""
    count, center = len(values), mean(values)
    if count == 0:
        return math.nan, math.nan
    z = 1.959964
    if all(value in (0, 1) for value in values):
        scale = 1 + z * z / count
        middle = (center + z * z / (2 * count)) / scale
        half = z * math.sqrt(center * (1 - center) / count + z * z / (4 * count * count)) / scale
        return max(0.0, middle - half), min(1.0, middle + half)
    if count == 1:
        return -math.inf, math.inf
    deviation = math.sqrt(math.fsum((value - center) ** 2 for value in values) / (count - 1))
    half = z * deviation / math.sqrt(count)
    return center - half, center + half


def episode_records(trajectories: Sequence[Any]) -> list[dict[str, float]]:
    """Per usable trajectory its environment's metrics and `turns`. A score that another episode reports and this one lacks is
    0: leaving it out would average over the episodes that came to an answer only."""
    reported = [name for name in SCORES if any(name in trajectory.metrics for trajectory in trajectories)]
    missing = dict.fromkeys(reported, 0.0)
    return [{"turns": float(len(trajectory.turns)), **missing, **trajectory.metrics} for trajectory in trajectories]


def rollout_metrics(trajectories: Sequence[Any]) -> dict[str, float]:
    """`train/` and `rollout/` metrics of a step's trajectories (`rlflow.types.Trajectory`), aborted ones included in the list.

    Means are over usable trajectories, shares over all. A metric of the environment is `rollout/<name>`, but
    exact_match and f1 are `train/<name>`; one that only some episodes report is averaged over those, except that a score
    which an episode lacks is 0 there: it never came to an answer.
    """
    usable = [trajectory for trajectory in trajectories if trajectory.stop.value != "aborted"]

    def share(reason: str) -> float:
        return mean([float(trajectory.stop.value == reason) for trajectory in trajectories])

    own = mean_of(episode_records(usable))
    return {
        **({"train/reward": mean([trajectory.reward for trajectory in usable])} if usable else {}),
        **{f"{'train' if name in SCORES else 'rollout'}/{name}": value for name, value in own.items()},
        "rollout/episodes": float(len(trajectories)),
        "rollout/truncated_max_turns": share("max_turns"),
        "rollout/truncated_max_tokens": share("max_tokens"),
        "rollout/aborted": share("aborted"),
    }


class PhaseTimer:
    """Seconds and peak memory per phase of a step. Phases may be entered many times; they must not nest. `on_enter` is told
    each phase's name as it begins, for a display."""

    def __init__(self, on_enter: Callable[[str], object] | None = None) -> None:
        self.on_enter = on_enter
        self.seconds: dict[str, float] = {}
        self.memory = PeakMemory()
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to the phase, also when it raises."""
        start = time.perf_counter()
        if self.on_enter is not None:
            self.on_enter(name)
        try:
            with self.memory.measure(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """`time/<phase>_s` and `memory/<phase>_gib` of every phase entered and `time/step_s` since the last call; starts anew."""
        now = time.perf_counter()
        taken = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        taken["time/step_s"] = now - self.started
        taken |= {f"memory/{name}_gib": peak for name, peak in self.memory.take().items()}
        self.seconds, self.started = {}, now
        return taken


# ---------------------------------------------------------------- sinks


class Sink(Protocol):
    """Somewhere to write metrics to."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Writes each step's metrics to `<directory>/metrics.jsonl` and to further sinks.

    On resume, records after `resumed_step` are dropped first, so that the file reads as if the run had never stopped.
    """

    def __init__(self, directory: str | Path, sinks: Sequence[Sink] = (), resumed_step: int | None = None) -> None:
        self.sinks: list[Sink] = [JsonlSink(Path(directory) / "metrics.jsonl", resumed_step), *sinks]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one record. Values become plain floats; what is not finite is null in the file."""
        plain = {name: float(value) for name, value in values.items()}
        for sink in self.sinks:
            sink.write(step, plain)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonlSink:
    """One JSON object per line: step, time (Unix seconds), metrics. Each line is flushed whole."""

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        if path.exists():
            _drop_records_after(path, resumed_step)
        self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoardSink:
    """Writes scalars to `<directory>/tensorboard`. On resume TensorBoard hides what came after `resumed_step`."""

    def __init__(self, directory: str | Path, resumed_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingPackageError(
                "metrics.tensorboard: the package 'tensorboard' is not installed: pip install 'rlflow[tensorboard]'."
            ) from None
        purge_step = None if resumed_step is None else resumed_step + 1
        self.writer = SummaryWriter(str(Path(directory) / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """Writes to a Weights & Biases run. `config` is uploaded: hand over the redacted one.

    The run's id is kept in `<directory>/wandb/run_id.txt`; with `resumed` its curves go on. Weights & Biases never takes a
    step back, so steps are a metric of their own: those made again after a resume are shown again, none is dropped."""

    def __init__(
        self, directory: str | Path, project: str, name: str, config: Mapping[str, Any], resumed: bool = False
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingPackageError(
                "metrics.wandb: the package 'wandb' is not installed: pip install 'rlflow[wandb]'."
            ) from None
        kept = Path(directory) / "wandb" / "run_id.txt"
        known = kept.read_text(encoding="utf-8").strip() if resumed and kept.is_file() else ""
        run_id = known or uuid.uuid4().hex
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(run_id + "\n", encoding="utf-8")
        options = {"project": project, "name": name, "dir": str(directory), "config": dict(config)}
        self.run = wandb.init(id=run_id, resume="allow", **options)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self) -> None:
        self.run.finish()


def make_sinks(
    directory: str | Path,
    *,
    tensorboard: bool = False,
    wandb: bool = False,
    project: str = "rlflow",
    name: str = "run",
    config: Mapping[str, Any] | None = None,
    resumed_step: int | None = None,
) -> list[Sink]:
    """The optional sinks that a configuration asks for.

    Raises:
        MissingPackageError: a sink's package is not installed.
    """
    sinks: list[Sink] = []
    if tensorboard:
        sinks.append(TensorBoardSink(directory, resumed_step))
    if wandb:
        sinks.append(WandbSink(directory, project, name, config or {}, resumed=resumed_step is not None))
    return sinks


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The records of a metrics.jsonl by ascending step, records of one step merged. Nulls are left out; so is a last
    line that a kill cut short.

    Raises:
        CheckpointError: the file is missing, or a line other than the last is not JSON.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; expected the metrics.jsonl of a run directory.")
    merged: dict[int, dict[str, float]] = {}
    for record in _records(path):
        values = {name: value for name, value in record.items() if value is not None}
        merged.setdefault(int(record["step"]), {}).update(values)
    return [merged[step] for step in sorted(merged)]


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise CheckpointError(f"{path}:{number}: not JSON ({error.msg}); remove this line.") from None
    return records


def _drop_records_after(path: Path, step: int | None) -> None:
    """Rewrites the file without records after `step` (None keeps all) and without a half-written last line."""
    kept = [record for record in _records(path) if step is None or record["step"] <= step]
    aside = path.with_name(path.name + ".partial")
    aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(aside, path)
