"""Metrics and results of a run as lines for people: in the terminal, in the log, in `rlflow show`."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import command
from rlflow.report.metrics import PHASES, Metrics, leading_score, scores, shown

_SPARKS = "▁▂▃▄▅▆▇█"


def step_line(step: int, steps: int, metrics: Mapping[str, float], registered: Metrics) -> str:
    """One step of `steps`: its number, what a person looks at first, seconds per phase."""
    parts = [f"step {step:>{len(str(steps))}}/{steps}", *headline(metrics, registered), phase_seconds(metrics)]
    return "  ".join(part for part in parts if part)


def evaluated_line(step: int, steps: int, metrics: Mapping[str, float], registered: Metrics) -> str:
    """An evaluation after `step` of `steps`."""
    return f"eval {step:>{len(str(steps))}}/{steps}  {evaluation_line(metrics, registered)}"


def headline(metrics: Mapping[str, float], registered: Metrics, leading: bool = True) -> list[str]:
    """The numbers that a person looks at first, the absent ones left out; with `leading`, reward and first score come first."""
    parts = []
    if leading and "train/reward" in metrics:
        parts.append(f"reward {metrics['train/reward']:.3f}")
    if leading:
        parts += _registered_parts(metrics, registered, scores(registered)[:1], "train/")
    parts += _formatted(metrics, (("{:,.0f} tokens/s", "speed/tokens_per_s"),))
    parts += _registered_parts(metrics, registered, shown_names(registered), "rollout/")
    parts += _formatted(
        metrics,
        (
            ("gap {:.1e}", "train/logprob_gap"),
            ("entropy {:.2f}", "train/entropy"),
            ("grad {:.2f}", "train/gradient_norm"),
        ),
    )
    if (freed := metrics.get("memory/engine_freed_gib")) is not None:
        parts.append(f"engine {-freed:+.2f} {metrics['memory/engine_taken_gib']:+.2f} GiB")
    for name, words in (
        ("rollout/aborted", "ABORTED"),
        ("rollout/truncated_max_tokens", "cut at tokens"),
        ("rollout/truncated_max_turns", "cut at turns"),
    ):
        if metrics.get(name, 0) > 0:
            parts.append(f"{words} {metrics[name]:.0%}")
    return parts


def _formatted(metrics: Mapping[str, float], templates: Sequence[tuple[str, str]]) -> list[str]:
    return [template.format(metrics[name]) for template, name in templates if name in metrics]


def shown_names(registered: Metrics) -> list[str]:
    """The registered metrics that are no scores and stand in the progress line."""
    return [name for name, metric in registered.items() if metric.shown and not metric.score]


def _registered_parts(
    metrics: Mapping[str, float], registered: Metrics, names: Sequence[str], section: str
) -> list[str]:
    """The registered metrics of these names; a name without a section is looked up as `section` + name."""
    keys = {name: name if "/" in name else section + name for name in names}
    return [shown(name, registered[name], metrics[key]) for name, key in keys.items() if key in metrics]


def phase_seconds(metrics: Mapping[str, float]) -> str:
    """`rollout 1.2 + update 0.8 = 2.1 s`: seconds per phase, and of the whole step. An evaluation comes after the step."""
    phases = [phase for phase in PHASES if phase != "evaluate" and metrics.get(f"time/{phase}_s", 0) >= 0.05]
    parts = [f"{phase} {metrics[f'time/{phase}_s']:.1f}" for phase in phases]
    total = metrics.get("time/step_s")
    return " + ".join(parts) + (f" = {total:.1f} s" if total is not None and parts else "")


def evaluation_line(metrics: Mapping[str, float], registered: Metrics) -> str:
    """The first score with its 95% interval (without one the reward), the other scores, what is shown, failed tasks."""
    first = leading_score(registered, metrics, "eval")
    parts = []
    if first in registered:
        low, high = metrics.get(f"eval/{first}_low"), metrics.get(f"eval/{first}_high")
        band = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        parts.append(shown(first, registered[first], metrics[f"eval/{first}"]) + band)
    elif "eval/reward" in metrics:
        parts.append(f"reward {metrics['eval/reward']:.3f}")
    others = [name for name in scores(registered) if name != first]
    parts += _registered_parts(metrics, registered, [*others, *shown_names(registered)], "eval/")
    parts += _formatted(metrics, (("turns {:.2f}", "eval/turns"), ("{:.0f} tasks", "eval/questions")))
    if metrics.get("eval/failed", 0) > 0:
        parts.append(f"{metrics['eval/failed']:.0f} FAILED")
    return "  ".join(parts)


def summary_text(summary: Mapping[str, Any], registered: Metrics) -> str:
    """The short summary at the end of a run: how it ended, its evaluations, what was written where, what to do next."""
    steps, status = summary["steps"], summary["status"]
    lines = [f"{status} after {steps:,} step{'' if steps == 1 else 's'} and {clock(summary['seconds'])}"]
    rows = list(evaluations_of(summary, registered).items())
    gap = summary.get("export_logprob_difference")
    for name, path in summary.get("written", {}).items():
        apart = f"  (log-probs differ by up to {gap:.1e})" if name == "export" and gap is not None else ""
        rows.append((name, path + apart))
    width = max((len(name) for name, _ in rows), default=0)
    lines += [f"  {name:<{width}}  {text}" for name, text in rows if text]
    following = [f"  {command}  # {what}" for command, what in next_commands(summary)]
    return "\n".join([*lines, *(["next"] if following else []), *following])


def evaluations_of(summary: Mapping[str, Any], registered: Metrics) -> dict[str, str]:
    """{`before`, `after` or `at step N`: line} of the first and the last evaluation. One that was made neither before the first
    step nor after the last is called by its step: a run that was interrupted has no `after`."""
    found = {}
    for which in ("first", "last"):
        step, line = (
            summary.get(f"{which}_evaluation_step", -1),
            evaluation_line(summary.get(f"{which}_evaluation") or {}, registered),
        )
        if step >= 0 and line:
            found[step] = line
    names = {summary["steps"]: "after", 0: "before"}
    return {names.get(step, f"at step {step}"): line for step, line in found.items()}


def next_commands(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(command, what it does) that a person may want after a run; nothing for one that wrote nothing."""
    written = summary.get("written", {})
    if "run" not in written:
        return []
    run, rlflow = shlex.quote(written["run"]), command()
    found = [(f"{rlflow} view {run} --open", "its episodes, token by token"), (f"{rlflow} show {run}", "in the terminal")]
    if "export" in written and summary.get("takes_questions"):
        question = summary.get("example_question")  # one that the policy has the words for
        asked = [f"{rlflow} ask {run}", *([shlex.quote(question)] if question else [])]
        found.insert(0, (" ".join(asked), "talk to the policy"))
    if "export" in written:
        found.append((f"{rlflow} eval --model {shlex.quote(written['export'])}", "its scores"))
    if summary["status"] != "finished":
        found.insert(0, (f"{rlflow} train --config {run}/config.yaml --resume", "goes on"))
    return found


def sparkline(values: list[float], width: int = 40) -> str:
    """The values as block characters scaled to their own range, neighbours averaged to at most `width` characters."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    count = min(width, len(finite))
    edges = [round(index * len(finite) / count) for index in range(count + 1)]
    means = [sum(finite[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in means)


def clock(seconds: float) -> str:
    """`4 s`, `3:05` (minutes:seconds) or `2:03:05`."""
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def number(value: float) -> str:
    """Three digits, or a dash for what is no number."""
    return f"{value:.3f}" if math.isfinite(value) else "-"
