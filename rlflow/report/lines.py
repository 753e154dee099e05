"""A run's metrics as text, for terminal, log, page and `rlflow show`."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TextIO

from rlflow.errors import command
from rlflow.report.metrics import METRICS, PHASES, Metric, Metrics, leading_score, scores, shown

Records = Sequence[Mapping[str, float]]
FIRST = (
    "train/entropy",
    "rollout/truncated_max_tokens",
    "rollout/truncated_max_turns",
    "train/logprob_gap",
    "speed/tokens_per_s",
    "train/gradient_norm",
)
"""The core's metrics with `shown`, the most telling first; others follow."""
ENGINE_MEMORY = "engine -{memory/engine_freed_gib:.2f} +{memory/engine_taken_gib:.2f} GiB"
LOST = ("ABORTED {rollout/aborted:.0%}", "UNSCORABLE {rollout/unscorable:.0%}")
SHOWN_ABOVE_ZERO = (
    "rollout/aborted",
    "rollout/unscorable",
    "rollout/truncated_max_tokens",
    "rollout/truncated_max_turns",
)
EXPLAINED = {
    "reward": "mean of the episodes' rewards",
    "entropy": "nats per token; falls as the policy grows certain",
    "gap": "nats between engine and trainer on a token; should stay near 0",
    "grad": "length of the gradient",
    "cut at tokens": "episodes that a limit of tokens ended",
    "cut at turns": "episodes that the limit of turns ended",
    "ABORTED": "episodes lost to infrastructure",
    "UNSCORABLE": "episodes that the policy left without a score: counted as wrong",
    "turns": "responses per episode",
    "ETA": "time to the end, evaluations included",
}
WIDTH = 80  # columns of what is no terminal


def values_of(records: Records, name: str) -> list[float]:
    """The metric where it was measured."""
    return [record[name] for record in records if name in record]


def is_step(record: Mapping[str, float]) -> bool:
    """Whether the record is of a training step."""
    return any(name.startswith("train/") for name in record)


def numbers(metrics: Mapping[str, float], registered: Metrics) -> list[str]:
    """The leading metrics that are there, the most telling first; the reward only where it is
    another number than the score."""
    there = {
        name: value for name, value in metrics.items() if value > 0 or name not in SHOWN_ABOVE_ZERO
    }
    return [
        *_leading(metrics, registered, "train"),
        *_filled(there, *LOST),
        *_registered(metrics, registered, shown_names(registered), "rollout"),
        *_registered(there, METRICS, _core_names(), "train"),
        *_filled(there, ENGINE_MEMORY),
    ]


def _leading(metrics: Mapping[str, float], registered: Metrics, section: str) -> list[str]:
    """The reward and the first score, or one of them where both are the same number."""
    score = _registered(metrics, registered, scores(registered)[:1], section)
    reward = metrics.get(f"{section}/reward")
    if reward is None:
        return score
    values = [metrics.get(f"{section}/{name}", math.nan) for name in scores(registered)[:1]]
    told = [] if any(abs(value - reward) < 5e-4 for value in values) else [f"reward {reward:.3f}"]
    return told + score


def fitted(parts: Sequence[str], width: int) -> str:
    """The parts in one line of at most `width` characters; the last ones go where it is full."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        if line and len(longer) > width:
            break
        line = longer
    return line


def columns(stream: TextIO) -> int:
    """The width of a terminal; 80 of anything else, but for the variable COLUMNS."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError, AttributeError):
        return WIDTH


def explanations(parts: Sequence[str], registered: Metrics) -> dict[str, str]:
    """{word: what it means} of the words in parts of a line that do not say it themselves."""
    words = dict(EXPLAINED)
    for name in shown_names(METRICS):
        word = _word(shown(name, METRICS[name], 0.0))
        words.setdefault(word, _meaning(METRICS[name], word))
    for name in (*scores(registered), *shown_names(registered)):
        word = _word(shown(name, registered[name], 0.0))
        words[word] = _meaning(registered[name], word)
    found = {}
    for part in parts:
        if (word := _word(part)) in words:
            found[word] = words[word]
        if "[" in part:
            found["[low, high]"] = "its 95% interval"
    return found


def _meaning(metric: Metric, word: str) -> str:
    """With the unit: `share of questions answered`, `calls of tools per episode`."""
    if metric.meaning == word:
        return metric.unit
    if metric.unit.startswith("per "):
        return f"{metric.meaning} {metric.unit}"
    return f"share {metric.meaning}" if metric.meaning.startswith("of ") else metric.meaning


def _word(part: str) -> str:
    """What stands before the number."""
    return re.split(r" [-+(]?[\d.n]", f"{part} ", maxsplit=1)[0].strip()


def _filled(metrics: Mapping[str, float], *texts: str) -> list[str]:
    """The texts whose metrics are there, with their values."""
    found = []
    for text in texts:
        with suppress(KeyError):
            found.append(text.format_map(metrics))
    return found


def shown_names(registered: Metrics) -> list[str]:
    """The registered metrics that are no scores and stand in the progress line."""
    return [name for name, metric in registered.items() if metric.shown and not metric.score]


def _core_names() -> list[str]:
    """The core's metrics of the progress line, in its order."""
    names = shown_names(METRICS)
    return [*FIRST, *(name for name in names if name not in FIRST)]


def _registered(
    metrics: Mapping[str, float],
    registered: Metrics,
    names: Sequence[str],
    section: str,
) -> list[str]:
    """The metrics of these names; one without a section is looked up in `section`."""
    keys = {name: name if "/" in name else f"{section}/{name}" for name in names}
    there = {name: metrics[key] for name, key in keys.items() if key in metrics}
    return [shown(name, registered[name], value) for name, value in there.items()]


def phase_times(metrics: Mapping[str, float]) -> str:
    """`rollout 1.2 + update 0.8 = 2.1 s`; an evaluation comes after the step and is not in it."""
    spent = {name: metrics.get(f"time/{name}_s", 0) for name in PHASES if name != "evaluate"}
    parts = " + ".join(f"{name} {value:.1f}" for name, value in spent.items() if value >= 0.05)
    total = metrics.get("time/step_s")
    return parts + (f" = {total:.1f} s" if parts and total is not None else "")


def evaluation_line(metrics: Mapping[str, float], registered: Metrics) -> str:
    """`evaluation_parts` in one line, whatever its length."""
    return "  ".join(evaluation_parts(metrics, registered))


def evaluation_parts(metrics: Mapping[str, float], registered: Metrics) -> list[str]:
    """The first score (else the reward) with its 95% interval, failed tasks, other scores."""
    first = leading_score(registered, metrics, "eval")
    ends = metrics.get(f"eval/{first}_low"), metrics.get(f"eval/{first}_high")
    if first in registered:
        parts = [shown(first, registered[first], metrics[f"eval/{first}"])]
    else:
        parts = _filled(metrics, "reward {eval/reward:.3f}")
    parts = [part + interval_text(*ends) for part in parts]
    others = [name for name in scores(registered) if name != first]
    parts += _registered(metrics, registered, others, "eval")
    if metrics.get("eval/unscorable", 0) > 0:
        parts += _filled(metrics, "{eval/unscorable:.0f} UNSCORABLE")
    if metrics.get("eval/failed", 0) > 0:
        asked = " of {eval/asked:.0f}" if "eval/asked" in metrics else ""
        parts += _filled(metrics, f"{{eval/failed:.0f}}{asked} FAILED")
    parts += _filled(metrics, "{eval/questions:.0f} tasks")
    parts += _registered(metrics, registered, shown_names(registered), "eval")
    return parts + _filled(metrics, "turns {eval/turns:.2f}")


def interval_text(low: float | None, high: float | None) -> str:
    """` [0.300, 0.500]`; nothing where no interval was measured, or it has no ends."""
    known = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    return f" [{low:.3f}, {high:.3f}]" if known else ""


def summary_text(summary: Mapping[str, Any], registered: Metrics, width: int | None = None) -> str:
    """The end of a run: its outcome, evaluations, files, and the next commands. width: of the
    lines about evaluations; paths and commands stay whole."""
    rows = evaluations_of(summary, registered, width) | summary.get("written", {})
    gap = summary.get("export_logprob_difference")
    if "export" in rows and gap is not None:
        rows["export"] += f"  (log-probs differ by up to {gap:.1e})"
    wide = max(map(len, rows), default=0)
    lines = [f"  {name:<{wide}}  {text}" for name, text in rows.items() if text]
    following = []
    for following_command, what in next_commands(summary):
        line = f"  {following_command}  # {what}"
        fits = width is None or len(line) <= width
        following += [line] if fits else [f"  # {what}", f"  {following_command}"]
    return "\n".join([ending(summary), *lines, *(["next"] if following else []), *following])


def ending(summary: Mapping[str, Any]) -> str:
    """`finished after 20 steps and 2:05`."""
    steps = summary["steps"]
    took = f"{steps:,} step{'' if steps == 1 else 's'} and {clock(summary['seconds'])}"
    return f"{summary['status']} after {took}"


def other_tasks(first: Mapping[str, float], last: Mapping[str, float]) -> bool:
    """Whether two evaluations were over other tasks, by their number, failed attempts included."""
    made = [one.get("eval/attempts", 0) + one.get("eval/failed", 0) for one in (first, last)]
    return made[0] != made[1]


def evaluations_of(
    summary: Mapping[str, Any], registered: Metrics, width: int | None = None
) -> dict[str, str]:
    """{`before`, `after` or `at step N`: line} of the first and the last evaluation; a run that was
    interrupted has no `after`."""
    room = sys.maxsize if width is None else width - len("  checkpoint  ")
    found = {}
    names = {summary["steps"]: "after", 0: "before"}
    first, last = (summary.get(f"{which}_evaluation") or {} for which in ("first", "last"))
    others = "  (other tasks than the first evaluation's)" if other_tasks(first, last) else ""
    for which, metrics, note in (("first", first, ""), ("last", last, others)):
        step = summary.get(f"{which}_evaluation_step", -1)
        line = fitted(evaluation_parts(metrics, registered), room)
        if step >= 0 and line:
            found[names.get(step, f"at step {step}")] = line + note
    return found


def next_commands(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(command, what it does) that a person may want after a run that wrote something."""
    written = summary.get("written", {})
    if "run" not in written:
        return []
    run, rlflow = shlex.quote(written["run"]), command()
    found = []
    if summary["status"] != "finished":
        found.append((f"{rlflow} train --config {run}/config.yaml --resume", "goes on"))
    if "export" in written and summary.get("takes_questions"):
        # One that the policy has the words for
        question = summary.get("example_question")
        asked = f" {shlex.quote(question)}" if question else ""
        found.append((f"{rlflow} ask {run}{asked}", "talk to the policy"))
    found.append((f"{rlflow} view {run} --open", "its episodes, token by token"))
    found.append((f"{rlflow} show {run}", "in the terminal"))
    if "export" in written and summary.get("recorded"):
        export = shlex.quote(written["export"])
        command_line = f"{rlflow} train --model {export} --config CONFIG.yaml"
        found.append((command_line, "reinforcement learning from here"))
    elif "export" in written:
        export = shlex.quote(written["export"])
        found.append((f"{rlflow} eval --model {export}", "its scores"))
    return found


def clock(seconds: float) -> str:
    """`4 s`, `3:05` (minutes:seconds), `2:03:05` or `1 day, 2:03:05`."""
    whole = round(max(seconds, 0))
    return f"{whole} s" if whole < 60 else str(timedelta(seconds=whole)).lstrip("0:")


def span(seconds: float) -> str:
    """How long something takes, in its two largest units: `45 s`, `3 min 20 s`, `2 h 05 min`,
    `10 d 17 h`."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(whole / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(whole / 3600)
    return f"{hours // 24:,} d {hours % 24} h"
