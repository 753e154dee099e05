"""Writes the tables of docs/metrics.md from the code: python docs/metrics_table.py"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rlflow.report.metrics import METRICS, Metric, Metrics

PAGE = Path(__file__).parent / "metrics.md"
HEAD = "| metric | unit | meaning |"


def installed_metrics() -> dict[str, Metrics]:
    """Installed environment -> the metrics that its class registers."""
    entries = metadata.entry_points(group="rlflow.environments")
    return {one.name: one.load().metrics for one in sorted(entries, key=lambda one: one.name)}


def metrics_table(plug_ins: Mapping[str, Metrics] | None = None) -> str:
    """The core's metrics in Markdown, then those of each plug-in under its name."""
    text = _table({f"`{name}`": metric for name, metric in METRICS.items()})
    for plug_in, registered in (plug_ins or {}).items():
        named = {_logged(name, metric): metric for name, metric in registered.items()}
        text += f"\n## {plug_in}\n\n" + _table(named)
    return text


def _logged(name: str, metric: Metric) -> str:
    """Every name under which a registered metric stands in metrics.jsonl."""
    if "/" in name:
        return f"`{name}`"
    section, ends = ("train", " (`_low`, `_high`)") if metric.score else ("rollout", "")
    return f"`{section}/{name}`, `eval/{name}`{ends}"


def _table(metrics: Metrics) -> str:
    rows = []
    for name, metric in metrics.items():
        reduction = "" if metric.reduction == "mean" else f" ({metric.reduction})"
        rows.append(f"| {name} | {metric.unit} | {metric.meaning}{reduction} |")
    return "\n".join([HEAD, "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8").split(HEAD)[0]
    PAGE.write_text(before + metrics_table(installed_metrics()), encoding="utf-8")
