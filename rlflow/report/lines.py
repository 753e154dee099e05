"""Metrics and results of a run in words: for the terminal, the log, the page and `rlflow show`."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import command
from rlflow.report.charts import Records, drawn_score, series
from rlflow.report.metrics import PHASES, Metrics, label, leading_score, scores, shown

SPARKS = "▁▂▃▄▅▆▇█"
ALWAYS_SHOWN = {
    "train/logprob_gap": "gap {:.1e}",
    "train/entropy": "entropy {:.2f}",
    "train/gradient_norm": "grad {:.2f}",
}
SHOWN_ABOVE_ZERO = {
    "rollout/aborted": "ABORTED {:.0%}",
    "rollout/truncated_max_tokens": "cut at tokens {:.0%}",
    "rollout/truncated_max_turns": "cut at turns {:.0%}",
}


def step_line(step: int, steps: int, metrics: Mapping[str, float], registered: Metrics) -> str:
    """One step of `steps`: its number, what a person looks at first, seconds per phase."""
    place = f"step {step:>{len(str(steps))}}/{steps}"
    parts = [place, *numbers(metrics, registered), phase_seconds(metrics)]
    return "  ".join(part for part in parts if part)


def evaluated_line(step: int, steps: int, metrics: Mapping[str, float], registered: Metrics) -> str:
    """An evaluation after `step` of `steps`."""
    return f"eval {step:>{len(str(steps))}}/{steps}  {evaluation_line(metrics, registered)}"


def numbers(metrics: Mapping[str, float], registered: Metrics, leading: bool = True) -> list[str]:
    """What a person looks at first, absent numbers left out; `leading`: with reward and score."""
    parts = []
    if leading:
        parts += _filled(metrics, {"train/reward": "reward {:.3f}"})
        parts += _registered(metrics, registered, scores(registered)[:1], "train/")
    parts += _filled(metrics, {"speed/tokens_per_s": "{:,.0f} tokens/s"})
    parts += _registered(metrics, registered, shown_names(registered), "rollout/")
    parts += _filled(metrics, ALWAYS_SHOWN)
    if (freed := metrics.get("memory/engine_freed_gib")) is not None:
        parts.append(f"engine {-freed:+.2f} {metrics['memory/engine_taken_gib']:+.2f} GiB")
    above = {name: text for name, text in SHOWN_ABOVE_ZERO.items() if metrics.get(name, 0) > 0}
    return parts + _filled(metrics, above)


def _filled(metrics: Mapping[str, float], texts: Mapping[str, str]) -> list[str]:
    return [text.format(metrics[name]) for name, text in texts.items() if name in metrics]


def shown_names(registered: Metrics) -> list[str]:
    """The registered metrics that are no scores and stand in the progress line."""
    return [name for name, metric in registered.items() if metric.shown and not metric.score]


def _registered(
    metrics: Mapping[str, float], registered: Metrics, names: Sequence[str], section: str
) -> list[str]:
    """The metrics of these names; one without a section is looked up as `section` + name."""
    keys = {name: name if "/" in name else section + name for name in names}
    found = {name: metrics[key] for name, key in keys.items() if key in metrics}
    return [shown(name, registered[name], value) for name, value in found.items()]


def phase_seconds(metrics: Mapping[str, float]) -> str:
    """`rollout 1.2 + update 0.8 = 2.1 s`; an evaluation comes after the step and is not in it."""
    spent = {phase: metrics.get(f"time/{phase}_s", 0) for phase in PHASES if phase != "evaluate"}
    parts = [f"{phase} {seconds:.1f}" for phase, seconds in spent.items() if seconds >= 0.05]
    total = metrics.get("time/step_s")
    return " + ".join(parts) + (f" = {total:.1f} s" if total is not None and parts else "")


def evaluation_line(metrics: Mapping[str, float], registered: Metrics) -> str:
    """The first score with its 95% interval (else the reward), other scores, failed tasks."""
    first = leading_score(registered, metrics, "eval")
    parts = []
    if first in registered:
        ends = metrics.get(f"eval/{first}_low"), metrics.get(f"eval/{first}_high")
        score = shown(first, registered[first], metrics[f"eval/{first}"])
        parts.append(score + interval_text(*ends))
    else:
        parts += _filled(metrics, {"eval/reward": "reward {:.3f}"})
    others = [name for name in scores(registered) if name != first]
    parts += _registered(metrics, registered, [*others, *shown_names(registered)], "eval/")
    parts += _filled(metrics, {"eval/turns": "turns {:.2f}", "eval/questions": "{:.0f} tasks"})
    if metrics.get("eval/failed", 0) > 0:
        parts += _filled(metrics, {"eval/failed": "{:.0f} FAILED"})
    return "  ".join(parts)


def interval_text(low: float | None, high: float | None) -> str:
    """` [0.300, 0.500]`; nothing where no interval was measured."""
    return f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""


def headline(records: Records, registered: Metrics) -> str:
    """What the run achieved: `exact match 89%, was 35%`; of training where none was evaluated."""
    name = drawn_score(records, registered)
    share = name in registered and registered[name].unit == "share"
    for section, where in (("eval", ""), ("train", " in training")):
        _, values = series(records, f"{section}/{name}")
        if values:
            texts = [f"{value:.0%}" if share else f"{value:.2f}" for value in values]
            before = f", was {texts[0]}" if len(values) > 1 else ""
            return f"{label(name)} {texts[-1]}{where}{before}"
    return "nothing measured yet"


def summary_text(summary: Mapping[str, Any], registered: Metrics) -> str:
    """The end of a run: how it ended, its evaluations, what was written, what to do next."""
    rows = list(evaluations_of(summary, registered).items())
    gap = summary.get("export_logprob_difference")
    for name, path in summary.get("written", {}).items():
        told = name == "export" and gap is not None
        rows.append((name, f"{path}  (log-probs differ by up to {gap:.1e})" if told else path))
    width = max((len(name) for name, _ in rows), default=0)
    lines = [ending(summary), *(f"  {name:<{width}}  {text}" for name, text in rows if text)]
    following = [f"  {command}  # {what}" for command, what in next_commands(summary)]
    return "\n".join([*lines, *(["next"] if following else []), *following])


def ending(summary: Mapping[str, Any]) -> str:
    """`finished after 20 steps and 2:05`."""
    steps = summary["steps"]
    took = f"{steps:,} step{'' if steps == 1 else 's'} and {clock(summary['seconds'])}"
    return f"{summary['status']} after {took}"


def evaluations_of(summary: Mapping[str, Any], registered: Metrics) -> dict[str, str]:
    """{`before`, `after` or `at step N`: line} of the first and the last evaluation.

    One that was made neither before the first step nor after the last is called by its step: a run
    that was interrupted has no `after`."""
    found = {}
    for which in ("first", "last"):
        step = summary.get(f"{which}_evaluation_step", -1)
        line = evaluation_line(summary.get(f"{which}_evaluation") or {}, registered)
        if step >= 0 and line:
            found[step] = line
    names = {summary["steps"]: "after", 0: "before"}
    return {names.get(step, f"at step {step}"): line for step, line in found.items()}


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
        question = summary.get("example_question")  # one that the policy has the words for
        asked = f"{rlflow} ask {run}" + (f" {shlex.quote(question)}" if question else "")
        found.append((asked, "talk to the policy"))
    found.append((f"{rlflow} view {run} --open", "its episodes, token by token"))
    found.append((f"{rlflow} show {run}", "in the terminal"))
    if "export" in written:
        found.append((f"{rlflow} eval --model {shlex.quote(written['export'])}", "its scores"))
    return found


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The values as block characters, scaled to their range, averaged to at most `width`."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def clock(seconds: float) -> str:
    """`4 s`, `3:05` (minutes:seconds) or `2:03:05`."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
