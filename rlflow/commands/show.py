"""`rlflow show`: a run's summary and its episodes, for reading."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlflow.commands.arguments import Commands, add_command
from rlflow.errors import ConfigError
from rlflow.report.charts import printable, run_seconds
from rlflow.report.lines import clock, evaluation_line, numbers, sparkline
from rlflow.report.metrics import Metrics, label, leading_score, scores
from rlflow.report.recorded import RunFiles, grouped
from rlflow.report.records import answers_of, question_of, read_trajectories, solved, text_of
from rlflow.report.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import read_json

_CODES = {
    "bold": "1",
    "dim": "2",
    "policy": "36",
    "good": "32",
    "bad": "31",
    "warn": "33",
    "marked": "30;43",
}


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "show",
        run,
        "show a run: summary and trajectories",
        "Prints a run's summary and sampled episodes: what the policy wrote, what the environment answered (dim),\n"
        "the reward, the advantage; the question and its answer are marked. RUN is a run directory, the folder of an\n"
        "evaluation, or a .jsonl of trajectories.",
        "examples:\n  rlflow show runs/my-run\n  rlflow show runs/my-run --step 20 --trajectories 5 --failed\n"
        "  rlflow show runs/my-run --eval --solved | less -R\n  rlflow show runs/my-run --changed\n",
    )
    parser.add_argument("path", metavar="RUN")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="episodes of this step (default: the last that was written)",
    )
    parser.add_argument(
        "--eval", action="store_true", help="episodes of the evaluation instead of training"
    )
    parser.add_argument(
        "--changed",
        action="store_true",
        help="questions that the last evaluation solves and the first did not, or the reverse",
    )
    parser.add_argument(
        "--trajectories", type=int, default=3, metavar="K", help="how many (default 3)"
    )
    kind = parser.add_mutually_exclusive_group()
    solved = "first score is 1, or without a score the reward positive"
    kind.add_argument(
        "--failed", action="store_true", help="only episodes that did not solve their task"
    )
    kind.add_argument("--solved", action="store_true", help=f"only episodes that did: the {solved}")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def run(args: argparse.Namespace) -> int:
    """Prints the run."""
    chosen = "failed" if args.failed else "solved" if args.solved else "all"
    if args.changed:
        return show_changed(args.path, count=args.trajectories, chosen=chosen, color=args.color)
    return show(
        args.path,
        step=args.step,
        evaluation=args.eval,
        count=args.trajectories,
        chosen=chosen,
        color=args.color,
    )


class Paint:
    """Text in colour where colour is wanted: `auto` is on a terminal, unless NO_COLOR is set."""

    def __init__(self, color: str = "auto", stream: TextIO | None = None) -> None:
        terminal = (stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR")
        self.on = color == "always" or (color == "auto" and terminal)

    def __call__(self, text: str, *styles: str) -> str:
        """The text with the styles around each of its lines, so that pagers keep them."""
        if not self.on or not text:
            return text
        start = f"\033[{';'.join(_CODES[style] for style in styles)}m"
        return "\n".join(f"{start}{line}\033[0m" if line else line for line in text.split("\n"))


def show(
    path: str | Path,
    *,
    step: int | None = None,
    evaluation: bool = False,
    count: int = 3,
    chosen: str = "all",
    color: str = "auto",
) -> int:
    """Prints a run, an evaluation or a file of episodes; returns the exit code. chosen: all, failed
    or solved.

    Raises:
        ConfigError: nothing of the kind there, or no episodes of that step.
    """
    paint, recorded = Paint(color), RunFiles.open(path)
    registered = recorded.registered
    if recorded.path.is_file():
        found: Path | None = recorded.path
    elif 0 in recorded.evaluations and recorded.evaluations[0].parent == recorded.path:
        # Of `rlflow eval`
        print(
            paint(str(recorded.path), "bold") + f"\n{evaluation_line(recorded.summary, registered)}"
        )
        found = recorded.evaluations[0]
    else:
        run = RunDirectory(recorded.path)
        print(summary_text(run, registered, paint))
        found = _episodes_file(run, step, evaluation) if count > 0 else None
        if found is None and count > 0:
            print(paint("\nno episodes were written", "dim"))
    if found is None or count <= 0:
        return 0
    records = read_trajectories(found)
    picked = [
        record
        for record in records
        if chosen == "all" or solved(record, registered) == (chosen == "solved")
    ]
    what = "episodes" if chosen == "all" else f"{chosen} episodes"
    print(
        paint(
            f"\n{found}: {min(count, len(picked))} of {len(picked)} {what}, {len(records)} in all",
            "dim",
        )
    )
    for record in picked[:count]:
        print("\n" + episode_text(record, registered, paint))
    return 0


def show_changed(path: str | Path, *, count: int, chosen: str, color: str) -> int:
    """Prints questions that the first and the last evaluation end differently, before and after.
    chosen: solved or failed afterwards, or all.

    Raises ConfigError where the run has no two evaluations."""
    paint, recorded = Paint(color), RunFiles.open(path)
    steps = sorted(recorded.evaluations)
    if len(steps) < 2:
        raise ConfigError(
            f"{path}: --changed: expected two evaluations, found {len(steps)}; set evaluation.at_start=true and let the run end."
        )
    registered, first, last = recorded.registered, steps[0], steps[-1]
    before, after = (
        {group[0]["task_id"]: group[0] for group in grouped(recorded.records("eval", step))}
        for step in (first, last)
    )
    shared = [task for task in after if task in before]
    changed = [
        task
        for task in shared
        if solved(before[task], registered) != solved(after[task], registered)
    ]
    won = sum(solved(after[task], registered) for task in changed)
    print(
        f"{len(changed)} of {len(shared)} questions changed, step {first} to step {last}: {won} won, {len(changed) - won} lost"
    )
    picked = [
        task
        for task in changed
        if chosen == "all" or solved(after[task], registered) == (chosen == "solved")
    ]
    for task in picked[:count]:
        for step, record in ((first, before[task]), (last, after[task])):
            print(
                "\n"
                + paint(f"step {step}", "bold")
                + "\n"
                + episode_text(record, registered, paint, prompt=step == first)
            )
    return 0


def _episodes_file(run: RunDirectory, step: int | None, evaluation: bool) -> Path | None:
    """The file of that step, or the newest one; None where the run wrote none."""
    folder = run.path / ("evaluations" if evaluation else "trajectories")
    if step is not None:
        asked = run.evaluations(step) if evaluation else run.trajectories(step)
        if not asked.is_file():
            steps = [
                int(file.stem.removeprefix("step_")) for file in sorted(folder.glob("step_*.jsonl"))
            ]
            there = f"there are {_shorten(steps)}" if steps else "there are none"
            raise ConfigError(f"{asked}: no episodes of step {step}; {there}.")
        return asked
    files = sorted(folder.glob("step_*.jsonl"))
    return files[-1] if files else None


def _shorten(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-3:]]))


def summary_text(run: RunDirectory, registered: Metrics, paint: Paint) -> str:
    """What the run is, how far it came and what is in its directory."""
    lines = [paint(str(run.path), "bold")]
    records = read_metrics(run.metrics) if run.metrics.is_file() else []
    trained = [record for record in records if "train/reward" in record]
    evaluated = [
        record
        for record in records
        if f"eval/{leading_score(registered, record, 'eval')}" in record
    ]
    if trained:
        lines.append(
            f"step {int(trained[-1]['step'])} after {clock(run_seconds(trained))} from the start, evaluations included"
        )
        lines.append("  ".join(numbers(trained[-1], registered)))
        for name in ("reward", *scores(registered)[:1]):
            values = [record[f"train/{name}"] for record in trained if f"train/{name}" in record]
            if values and (spark := sparkline(values)):
                lines.append(
                    f"{label(name):<12} {values[0]:.3f} {paint(spark, 'policy')} {values[-1]:.3f}"
                )
    for record in evaluated if len(evaluated) <= 3 else [evaluated[0], *evaluated[-2:]]:
        lines.append(f"eval at {int(record['step']):<5}{evaluation_line(record, registered)}")
    if not records:
        lines.append(paint("no step has been finished yet", "dim"))
    summary = read_json(run.summary) if run.summary.is_file() else {}
    if "seconds" in summary:
        lines.append(f"{'time':<27} {times_text(records, summary)}")
    if summary:
        scalars = {
            key: value
            for key, value in summary.items()
            if not isinstance(value, (bool, dict, list)) and key != "seconds"
        }
        lines += [
            f"{key.replace('_', ' '):<27} {_value(value)}"
            for key, value in scalars.items()
            if value is not None
        ]
    steps = run.saved_steps()
    held = [("checkpoints", _shorten(steps) if steps else ""), ("export", _if_there(run.export)),
            ("adapter", _if_there(run.adapter)), ("picture", _if_there(run.picture)), ("log", _if_there(run.log))]  # fmt: skip
    lines += [paint(f"{name:<12} {text}", "dim") for name, text in held if text]
    return "\n".join(lines)


def times_text(records: Sequence[Mapping[str, float]], summary: Mapping[str, Any]) -> str:
    """How long a run took by its own clock, earlier parts of a resumed run included, and what of
    that were evaluations."""
    evaluations = sum(record.get("time/evaluate_s", 0.0) for record in records)
    return (
        f"{clock(summary['seconds'])} from start to end, {clock(evaluations)} of it in evaluations"
    )


def _if_there(path: Path) -> str:
    return str(path) if path.exists() else ""


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def episode_text(
    record: Mapping[str, Any], registered: Metrics, paint: Paint, prompt: bool = True
) -> str:
    """One episode: prompt and observations dim, the question in them bold, responses in colour,
    answers marked; then reward, advantage, end and token counts. prompt: False leaves it out."""
    title = f"{record['task_id']} · attempt {record['attempt'] + 1}"
    if record.get("group_mean") is not None:
        title += f" · group {record['group_mean']:.2f} ± {record['group_std']:.2f}"
    answers, question = answers_of(record), question_of(record)
    lines = [paint(f"── {title} {'─' * max(4, 74 - len(title))}", "bold")]
    if prompt:
        asked = printable(text_of(record["prompt"], roles=True)).rstrip("\n")
        lines.append(marked(asked, [question], paint, ("dim",), ("bold",)))
    for turn in record["turns"]:
        response = printable(turn["response"]).strip("\n")
        lines.append(marked(response, answers, paint, ("policy", "bold"), ("marked",)))
        if turn["observation"]:
            shown = printable(text_of(turn["observation"], roles=True)).strip("\n")
            lines.append(marked(shown, answers, paint, ("dim",), ("marked",)))
    reward = record["reward"] if record["reward"] is not None else float("nan")
    outcome = paint(f"reward {reward:g}", "good" if solved(record, registered) else "bad", "bold")
    if record.get("advantage") is not None:
        outcome += f"  advantage {record['advantage']:+.2f}"
    ended = (
        "terminated"
        if record["stop"] == "terminated"
        else paint(f"{record['stop'].upper()}", "warn")
    )
    expected = (
        f"  expected {paint(printable(_answer(record['answer'])), 'marked')}"
        if record.get("answer") not in (None, "")
        else ""
    )
    numbers = {
        name: value
        for name, value in record["metrics"].items()
        if value is not None and not name.endswith("_tokens")
    }
    metrics = "  ".join(f"{name} {value:g}" for name, value in numbers.items())
    tokens = (f"tokens: {record['prompt_tokens']} prompt, {record['response_tokens']} sampled, "
              f"{record['observation_tokens']} observed")  # fmt: skip
    lines.append(f"{outcome}  {ended}{expected}")
    lines.append(paint(f"{metrics}  ·  {tokens}" if metrics else tokens, "dim"))
    if record.get("error"):
        lines.append(paint(f"error: {record['error']}", "bad"))
    return "\n".join(lines)


def marked(
    text: str, wanted: Sequence[str], paint: Paint, plain: Sequence[str], found: Sequence[str]
) -> str:
    """The text in the styles `plain`, with what of it is wanted, as whole words, in the styles
    `found`."""
    words = [
        r"\s+".join(map(re.escape, printable(one).split()))
        for one in wanted
        if len(one.strip()) > 1
    ]
    if not words:
        return paint(text, *plain)
    parts = re.split(rf"(?<!\w)({'|'.join(words)})(?!\w)", text, flags=re.IGNORECASE)
    return "".join(
        paint(part, *(found if place % 2 else plain)) for place, part in enumerate(parts)
    )


def _answer(answer: Any) -> str:
    return " | ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
