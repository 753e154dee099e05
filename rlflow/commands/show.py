"""`rlflow show`: a run's summary and its episodes, for reading."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rlflow.commands.options import Commands, add_command
from rlflow.errors import ConfigError
from rlflow.metrics.names import Metrics, label, leading_score, load_registered, scores
from rlflow.metrics.sinks import read_metrics
from rlflow.run.directory import RunDirectory
from rlflow.run.journal import AttemptJournal
from rlflow.run.progress import clock, evaluation_line, headline, sparkline
from rlflow.run.trace import write_trace
from rlflow.run.trajectories import read_trajectories
from rlflow.storage.files import read_json

_CODES = {"bold": "1", "dim": "2", "policy": "36", "good": "32", "bad": "31", "warn": "33"}


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "show",
        run,
        "show a run: summary and trajectories",
        "Prints a run's summary and sampled episodes: what the policy wrote, what the environment answered (dim),\n"
        "the reward. RUN is a run directory or a .jsonl of trajectories.",
        "examples:\n  rlflow show runs/my-run\n  rlflow show runs/my-run --step 20 --trajectories 5 --failed\n"
        "  rlflow show runs/my-run --eval --solved | less -R\n",
    )
    parser.add_argument("path", metavar="RUN")
    parser.add_argument(
        "--step", type=int, metavar="N", help="episodes of this step (default: the last that was written)"
    )
    parser.add_argument("--eval", action="store_true", help="episodes of the evaluation instead of training")
    parser.add_argument("--trajectories", type=int, default=3, metavar="K", help="how many (default 3)")
    kind = parser.add_mutually_exclusive_group()
    solved = "first score is 1, or without a score the reward positive"
    kind.add_argument("--failed", action="store_true", help="only episodes that did not solve their task")
    kind.add_argument("--solved", action="store_true", help=f"only episodes that did: the {solved}")
    parser.add_argument("--journal", action="store_true", help="attempts of an asynchronous run: states, staleness, steps")
    parser.add_argument("--trace", metavar="FILE", help="write its timeline for ui.perfetto.dev: trainer and every episode")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def run(args: argparse.Namespace) -> int:
    """Prints the run."""
    if args.journal or args.trace:
        with _journal_of(RunDirectory.open(args.path)) as journal:
            if args.journal:
                print(journal_text(journal, Paint(args.color)))
            if args.trace:
                print(f"{args.trace}: {write_trace(journal, args.trace)} spans")
        return 0
    chosen = "failed" if args.failed else "solved" if args.solved else "all"
    return show(
        args.path, step=args.step, evaluation=args.eval, count=args.trajectories, chosen=chosen, color=args.color
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
    """Prints a run (or a .jsonl of episodes); returns the exit code. chosen: all, failed or solved.

    Raises:
        ConfigError: no run there, or no episodes of that step.
    """
    paint, path = Paint(color), Path(path)
    if path.is_file():
        episodes_file = path
        registered = _registered_beside(path)
    else:
        run = RunDirectory.open(path)
        registered = load_registered(run.environment_metrics)
        print(summary_text(run, registered, paint))
        if count <= 0:
            return 0
        found = _episodes_file(run, step, evaluation)
        if found is None:
            print(paint("\nno episodes were written", "dim"))
            return 0
        episodes_file = found
    records = read_trajectories(episodes_file)
    picked = [record for record in records if chosen == "all" or solved(record, registered) == (chosen == "solved")]
    what = "episodes" if chosen == "all" else f"{chosen} episodes"
    print(paint(f"\n{episodes_file}: {min(count, len(picked))} of {len(picked)} {what}, {len(records)} in all", "dim"))
    for record in picked[:count]:
        print("\n" + episode_text(record, registered, paint))
    return 0


def _registered_beside(episodes_file: Path) -> Metrics:
    """What the environment of a file of episodes registered; the file lies in the run directory or one folder below."""
    here, above = (RunDirectory(folder).environment_metrics for folder in episodes_file.absolute().parents[:2])
    return load_registered(here) or load_registered(above)


def solved(record: Mapping[str, Any], registered: Metrics) -> bool:
    """Whether the first score of an episode is 1, or, where it has none, its reward positive."""
    values = [record["metrics"][name] for name in scores(registered) if name in record["metrics"]]
    return bool(values[0] == 1 if values else (record["reward"] or 0) > 0)


def _episodes_file(run: RunDirectory, step: int | None, evaluation: bool) -> Path | None:
    """The file of that step, or the newest one; None where the run wrote none."""
    folder = run.path / ("evaluations" if evaluation else "trajectories")
    if step is not None:
        asked = run.evaluations(step) if evaluation else run.trajectories(step)
        if not asked.is_file():
            steps = [int(file.stem.removeprefix("step_")) for file in sorted(folder.glob("step_*.jsonl"))]
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
    evaluated = [record for record in records if f"eval/{leading_score(registered, record, 'eval')}" in record]
    if trained:
        seconds = sum(record.get("time/step_s", 0.0) for record in trained)
        lines.append(f"step {int(trained[-1]['step'])} after {clock(seconds)}   " + "  ".join(headline(trained[-1], registered)))
        for name in ("reward", *scores(registered)[:1]):
            values = [record[f"train/{name}"] for record in trained if f"train/{name}" in record]
            if values and (spark := sparkline(values)):
                lines.append(f"{label(name):<12} {values[0]:.3f} {paint(spark, 'policy')} {values[-1]:.3f}")
    for record in evaluated if len(evaluated) <= 3 else [evaluated[0], *evaluated[-2:]]:
        lines.append(f"eval at {int(record['step']):<5}{evaluation_line(record, registered)}")
    if not records:
        lines.append(paint("no step has been finished yet", "dim"))
    if run.summary.is_file():
        scalars = {key: value for key, value in read_json(run.summary).items() if not isinstance(value, (dict, list))}
        lines += [f"{key.replace('_', ' '):<27} {_value(value)}" for key, value in scalars.items() if value is not None]
    steps = run.saved_steps()
    held = [("checkpoints", _shorten(steps) if steps else ""), ("export", _if_there(run.export)),
            ("picture", _if_there(run.picture)), ("log", _if_there(run.log))]  # fmt: skip
    lines += [paint(f"{name:<12} {text}", "dim") for name, text in held if text]
    return "\n".join(lines)


@contextmanager
def _journal_of(run: RunDirectory) -> Iterator[AttemptJournal]:
    """The journal of a run, for reading. Raises ConfigError where it has none."""
    if not run.journal.is_file():
        raise ConfigError(
            f"{run.journal}: no such file; runs with rollout.asynchronous.max_staleness above 0 have one."
        )
    journal = AttemptJournal(run.journal, read_only=True)
    try:
        yield journal
    finally:
        journal.close()


def journal_text(journal: AttemptJournal, paint: Paint) -> str:
    """Where the attempts of an asynchronous run are, how old the tokens were that it trained on, and its last steps."""
    counts, lags, steps = journal.counts(), journal.staleness(), journal.last_steps(8)
    again = counts.pop("again")
    lines = [paint(f"{journal.path}: {sum(counts.values())} attempts", "bold")]
    lines += [f"{state:<24} {count:>8}" for state, count in sorted(counts.items())]
    lines.append(f"{'groups issued again':<24} {again:>8}   too old for every step")
    total = sum(lags.values())
    if total:
        lines.append(paint("\nversions that the oldest token of a trained attempt lagged behind", "bold"))
        shares = {lag: count / total for lag, count in lags.items()}
        lines += [f"{lag:>4} {paint('█' * round(40 * share), 'policy')} {share:.1%}" for lag, share in shares.items()]
    if steps:
        lines.append(paint("\nstep   attempts   oldest version   newest version   state", "bold"))
        lines += [f"{step:>4} {count:>10} {oldest:>16} {newest:>16}   {state}" for step, count, oldest, newest, state in steps]
    return "\n".join(lines)


def _if_there(path: Path) -> str:
    return str(path) if path.exists() else ""


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def episode_text(record: Mapping[str, Any], registered: Metrics, paint: Paint) -> str:
    """One episode: prompt and observations dim, responses in colour, then reward, end and token counts."""
    title = f"{record['task_id']} · attempt {record['attempt'] + 1}"
    rule = "─" * max(4, 78 - len(title))
    lines = [paint(f"── {title} {rule}", "bold"), paint(_prompt(record["prompt"]).rstrip("\n"), "dim")]
    for turn in record["turns"]:
        lines.append(paint(printable(turn["response"]).strip("\n"), "policy", "bold"))
        if turn["observation"]:
            lines.append(paint(_prompt(turn["observation"]).strip("\n"), "dim"))
    reward = record["reward"] if record["reward"] is not None else float("nan")
    outcome = paint(f"reward {reward:g}", "good" if solved(record, registered) else "bad", "bold")
    ended = "terminated" if record["stop"] == "terminated" else paint(f"{record['stop'].upper()}", "warn")
    expected = f"  expected {_answer(record['answer'])}" if record.get("answer") not in (None, "") else ""
    numbers = {
        name: value for name, value in record["metrics"].items() if value is not None and not name.endswith("_tokens")
    }
    metrics = "  ".join(f"{name} {value:g}" for name, value in numbers.items())
    tokens = (f"tokens: {record['prompt_tokens']} prompt, {record['response_tokens']} sampled, "
              f"{record['observation_tokens']} observed")  # fmt: skip
    lines.append(f"{outcome}  {ended}{expected}")
    lines.append(paint(f"{metrics}  ·  {tokens}" if metrics else tokens, "dim"))
    if record.get("error"):
        lines.append(paint(f"error: {record['error']}", "bad"))
    return "\n".join(lines)


def _answer(answer: Any) -> str:
    return " | ".join(map(str, answer)) if isinstance(answer, list) else str(answer)


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return printable(prompt)
    return printable("\n".join(f"[{message.get('role', '?')}] {message.get('content', '')}" for message in prompt))


def printable(text: str) -> str:
    """The text with control characters replaced: neither a policy nor a web page may steer the reader's terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
