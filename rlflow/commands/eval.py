"""`rlflow eval`: scores of a model directory, a run or a checkpoint."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.config.checks import check_config
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.metrics.reductions import mean
from rlflow.run.assemble import fitting_tasks, make_rollout
from rlflow.run.evaluate import evaluate, evaluation_metrics
from rlflow.run.model_directory import ModelDirectory, model_directory
from rlflow.run.progress import evaluation_line
from rlflow.run.trajectories import write_trajectories
from rlflow.storage.files import write_json
from rlflow.types import Group, Trajectory


def metrics_by_set(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """{set: evaluation_metrics} of the evaluation sets that the tasks name (`metadata["set"]`); empty for a single set."""
    by_set: dict[str, list[Trajectory]] = {}
    for group in groups:
        by_set.setdefault(str(group.task.metadata.get("set", "")), []).extend(group.trajectories)
    return {name: evaluation_metrics(one) for name, one in by_set.items()} if len(by_set) > 1 else {}


def mean_over_sets(by_set: Mapping[str, Mapping[str, float]], name: str) -> float | None:
    """The unweighted mean over sets that the field reports; None where no set has the metric."""
    values = [metrics[f"eval/{name}"] for metrics in by_set.values() if f"eval/{name}" in metrics]
    return mean(values) if values else None


def main(args: Namespace) -> int:
    """`rlflow eval`: prints the scores of a model directory and writes summary.json and trajectories.jsonl."""
    for option, value in (("--questions", args.questions), ("--samples", args.samples)):
        if value is not None and value < 1:
            raise ConfigError(f"{option}: expected at least 1, found {value}.")
    if not args.temperature >= 0:
        raise ConfigError(f"--temperature: expected 0 (greedy) or more, found {args.temperature}.")
    with model_directory(args.model, args.hf, lambda text: print(text, file=sys.stderr)) as model:
        config = _evaluation_config(args, model)
        check_config(config)
        out = Path(args.out or Path("runs") / f"eval-{model.name}")
        with make_rollout(config) as rollout:
            tasks, dropped = fitting_tasks(rollout, config.data.val_split, config)
            tasks = tasks[: args.questions]
            print(
                f"{len(tasks)} questions, {args.samples} attempt(s) each, temperature {args.temperature:g}",
                file=sys.stderr,
            )
            result = evaluate(rollout, tasks, samples_per_prompt=args.samples, temperature=args.temperature)
    write_trajectories(out / "trajectories.jsonl", result.groups)
    by_set = metrics_by_set(result.groups)
    summary = {"model": str(args.model), "temperature": args.temperature, "prompts_dropped": dropped, **result.metrics}
    if by_set:
        summary["sets"] = by_set
        summary["exact_match_mean_over_sets"] = mean_over_sets(by_set, "exact_match")
    write_json(out / "summary.json", summary)
    for name, metrics in by_set.items():
        print(f"{name + ':':17}{evaluation_line(metrics)}")
    if by_set and summary["exact_match_mean_over_sets"] is not None:
        print(f"{'mean over sets:':17}EM {summary['exact_match_mean_over_sets']:.3f}")
    print(f"{'all questions:':17}{evaluation_line(result.metrics)}" if by_set else evaluation_line(result.metrics))
    for name in ("searches", "turns", "response_tokens"):
        if f"eval/{name}" in result.metrics:
            print(f"{name.replace('_', ' ')} per question: {result.metrics[f'eval/{name}']:.2f}")
    print(f"wrote {out / 'summary.json'} and {out / 'trajectories.jsonl'}")
    return 0


def _evaluation_config(args: Namespace, model: ModelDirectory) -> RunConfig:
    """The configuration of the evaluation: --config, else that of the run that the model comes from, else the defaults."""
    overrides = list(args.overrides)
    if args.data:
        overrides += [f"environment.val={json.dumps(args.data)}", "environment.train=null"]
    if args.corpus:
        overrides.append(f"environment.corpus={json.dumps(args.corpus)}")  # as YAML text, whatever the name looks like
    config = load_config(args.config or model.config, overrides)
    config.model.path = str(model.path)
    return config
