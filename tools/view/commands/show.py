"""`rlflow show`: a run's summary and its episodes, for reading."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.commands.arguments import Commands, add_color, add_command, flag, option
from rlflow.commands.paint import Paint
from rlflow.errors import ConfigError
from rlflow.report.lines import (
    clock,
    columns,
    ending,
    evaluation_line,
    evaluation_parts,
    is_step,
    numbers,
    values_of,
)
from rlflow.report.metrics import Metrics, label, leading_score, scores
from rlflow.report.records import read_trajectories, text_of
from rlflow.run.directory import RunDirectory
from rlflow.texts import one_line, printable, printable_styled

from ..comparison import sign_test
from ..curves import run_seconds, sparkline
from ..episodes import answers_of, question_of, solved
from ..recorded import RunFiles, grouped


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "show",
        run,
        "show a run: summary and trajectories",
        """
        Prints a run's summary and sampled episodes: what the policy wrote, what the environment
        answered (dim), the reward, the advantage; the question and its answer are marked. RUN is a
        run directory, the folder of an evaluation, or a .jsonl of trajectories.
        """,
        """
        rlflow show runs/my-run
        rlflow show runs/my-run --step 20 --trajectories 5 --failed
        rlflow show runs/my-run --eval --solved | less -R
        rlflow show runs/my-run --changed
        """,
    )
    parser.add_argument("path", metavar="RUN")
    step = "episodes of this step (default: the last that was written)"
    option(parser, "--step", "N", step, type=int)
    flag(parser, "--eval", "episodes of the evaluation instead of training")
    changed = "questions that the last evaluation solves and the first did not, or the reverse"
    flag(parser, "--changed", changed)
    option(parser, "--trajectories", "K", "how many", default=3)
    kind = parser.add_mutually_exclusive_group()
    flag(kind, "--failed", "only episodes that did not solve their task")
    solved = "first score is 1, or without a score the reward positive"
    flag(kind, "--solved", f"only episodes that did: the {solved}")
    add_color(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the run. Raises ConfigError where there is none, or nothing of what is asked for."""
    args.chosen = "failed" if args.failed else "solved" if args.solved else "all"
    print_them = show_changed if args.changed else show
    print_them(RunFiles.open(args.path), Paint(args.color), args)
    return 0


def show(recorded: RunFiles, paint: Paint, args: argparse.Namespace) -> None:
    """Prints a run, an evaluation or a file of episodes."""
    registered = recorded.registered
    if recorded.is_run:
        print(printable_styled(summary_text(recorded, paint)))
    elif recorded.path.is_dir():  # of `rlflow eval`
        scored = evaluation_line(recorded.summary, registered)
        print(printable_styled(f"{paint(str(recorded.path), 'bold')}\n{scored}"))
    if args.trajectories <= 0:
        return
    training = recorded.is_run and not args.eval
    files = recorded.training if training else recorded.evaluations
    if not files and args.step is None:
        print(paint("\nno episodes were written", "dim"))
        return
    asked = args.step if recorded.is_run and args.step is not None else max(files)
    if asked not in files:
        there = f"there are {_shorten(list(files))}" if files else "there are none"
        raise ConfigError(f"{recorded.path}: no episodes of step {asked}; {there}.")
    records = read_trajectories(files[asked])
    wanted = [one for one in records if _wanted(one, registered, args.chosen)]
    picked = folded(wanted)[: args.trajectories]
    what = "episodes" if args.chosen == "all" else f"{args.chosen} episodes"
    told = f"{sum(map(len, picked))} of {len(wanted)} {what}, {len(records)} in all"
    print(paint(f"\n{files[asked]}: {told}", "dim"))
    for alike in picked:
        attempts = [record["attempt"] + 1 for record in alike]
        text = episode_text(alike[0], registered, paint, attempts=attempts)
        print(printable_styled("\n" + text))


def folded(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The episodes in their order, those together that are the same attempt at the same task."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        said = [(turn["response"], turn["observation"]) for turn in record["turns"]]
        ends = [record.get(key) for key in ("reward", "stop", "error")]
        key = json.dumps([record["task_id"], text_of(record["prompt"]), said, ends], default=str)
        alike.setdefault(key, []).append(record)
    return list(alike.values())


def show_changed(recorded: RunFiles, paint: Paint, args: argparse.Namespace) -> None:
    """Prints questions that the first and the last evaluation end differently, before and after;
    those that are solved or failed afterwards where it is asked for."""
    steps = sorted(recorded.evaluations)
    if len(steps) < 2:
        raise ConfigError(
            f"{recorded.path}: --changed: expected two evaluations, found {len(steps)}; set "
            "evaluation.at_start=true and let the run end."
        )
    registered, first, last = recorded.registered, steps[0], steps[-1]
    before, after = (
        {group[0]["task_id"]: group[0] for group in grouped(recorded.records("eval", step))}
        for step in (first, last)
    )
    pairs = [(before[task], record) for task, record in after.items() if task in before]
    changed = [pair for pair in pairs if len({solved(one, registered) for one in pair}) == 2]
    won = sum(solved(now, registered) for _, now in changed)
    told = f"{len(changed)} of {len(pairs)} questions changed, step {first} to step {last}"
    lost = len(changed) - won
    print(f"{told}: {won} won, {lost} lost (p = {sign_test(won, lost):.2g}, exact sign test)")
    wanted = [pair for pair in changed if _wanted(pair[1], registered, args.chosen)]
    for pair in wanted[: args.trajectories]:
        for step, record in zip((first, last), pair, strict=True):
            print("\n" + paint(f"step {step}", "bold"))
            text = episode_text(record, registered, paint, prompt=step == first)
            print(printable_styled(text))


def _wanted(record: Mapping[str, Any], registered: Metrics, chosen: str) -> bool:
    return chosen == "all" or solved(record, registered) == (chosen == "solved")


def _shorten(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-3:]]))


def summary_text(recorded: RunFiles, paint: Paint) -> str:
    """The run's name, how far it came and what is in its directory."""
    run = RunDirectory(recorded.path)
    records = recorded.metrics
    registered = recorded.registered
    lines = [paint(str(run.path), "bold")]
    trained = [one for one in records if is_step(one)]
    evaluated = [one for one in records if f"eval/{leading_score(registered, one, 'eval')}" in one]
    if trained:
        took = f"{clock(run_seconds(trained))} from the start, evaluations included"
        lines.append(f"step {int(trained[-1]['step'])} after {took}")
        lines.append(wrapped(numbers(trained[-1], registered), columns(sys.stdout)))
        for name in ("reward", *scores(registered)[:1]):
            values = values_of(trained, f"train/{name}")
            if values and (spark := sparkline(values)):
                curve = f"{values[0]:.3f} {paint(spark, 'policy')} {values[-1]:.3f}"
                lines.append(f"{label(name):<12} {curve}")
    for record in evaluated if len(evaluated) <= 3 else [evaluated[0], *evaluated[-2:]]:
        start = f"eval at {int(record['step']):<5}"
        parts = evaluation_parts(record, registered)
        lines.append(start + wrapped(parts, columns(sys.stdout), " " * len(start)))
    if not records:
        lines.append(paint("no step has been finished yet", "dim"))
    if "seconds" in recorded.summary:
        lines.append(ending(recorded.summary))
    if steps := run.saved.steps():
        lines.append(paint(f"checkpoints  {_shorten(steps)}", "dim"))
    files = (run.export, run.adapter, run.picture, run.log)
    lines += [paint(str(path), "dim") for path in files if path.exists()]
    return "\n".join(lines)


def episode_text(
    record: Mapping[str, Any],
    registered: Metrics,
    paint: Paint,
    prompt: bool = True,
    attempts: Sequence[int] = (),
) -> str:
    """One episode: prompt (unless left out), turns with answers marked, outcome, token counts.
    attempts: the numbers of all that were the same, from 1."""
    title = f"{one_line(str(record['task_id']), 200)} · "
    if len(attempts) > 1:
        title += f"attempts {_shorten(attempts)}, alike (x{len(attempts)})"
    else:
        title += f"attempt {record['attempt'] + 1}"
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
    stop = record["stop"]
    outcome += "  " + (stop if stop == "terminated" else paint(stop.upper(), "warn"))
    if record.get("answer") not in (None, ""):
        outcome += f"  expected {paint(printable(_answer(record['answer'])), 'marked')}"
    metrics = "  ".join(
        f"{name} {value:g}"
        for name, value in record["metrics"].items()
        if value is not None and not name.endswith("_tokens")
    )
    tokens = (
        f"tokens: {record['prompt_tokens']} prompt, {record['response_tokens']} sampled, "
        f"{record['observation_tokens']} observed"
    )
    lines += [outcome, paint(f"{metrics}  ·  {tokens}" if metrics else tokens, "dim")]
    if record.get("error"):
        lines.append(paint(f"error: {record['error']}", "bad"))
    return "\n".join(lines)


def marked(
    text: str,
    wanted: Sequence[str],
    paint: Paint,
    plain: Sequence[str],
    found: Sequence[str],
) -> str:
    """The text in the styles `plain`, the wanted whole words of it in the styles `found`."""
    long = [printable(one).split() for one in wanted if len(one.strip()) > 1]
    if not long:
        return paint(text, *plain)
    words = "|".join(r"\s+".join(map(re.escape, one)) for one in long)
    parts = re.split(rf"(?<!\w)({words})(?!\w)", text, flags=re.IGNORECASE)
    styles = (plain, found)
    return "".join(paint(part, *styles[place % 2]) for place, part in enumerate(parts))


def wrapped(parts: Sequence[str], width: int, indent: str = "") -> str:
    """The parts in as many lines as they take; broken between parts alone."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(indent) + len(lines[-1]) + 2 + len(part) > width:
            lines.append("")
        lines[-1] += f"  {part}" if lines[-1] else part
    return f"\n{indent}".join(lines)


def _answer(answer: Any) -> str:
    return " | ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
