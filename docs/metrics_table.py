"""Writes the tables of docs/metrics.md from the code: python docs/metrics_table.py"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rlflow.report.metrics import METRICS, Metrics

PAGE = Path(__file__).parent / "metrics.md"
HEAD = "| metric | unit | meaning |"


def installed_metrics() -> dict[str, Metrics]:
    """Installed environment -> the metrics that its class registers."""
    entries = metadata.entry_points(group="rlflow.environments")
    return {one.name: one.load().metrics for one in sorted(entries, key=lambda one: one.name)}


def metrics_table(plug_ins: Mapping[str, Metrics] | None = None) -> str:
    """The core's metrics in Markdown, then those of plug-ins, under all that have them."""
    owners: dict[str, list[str]] = {}
    for plug_in, registered in (plug_ins or {}).items():
        for row in _rows(registered):
            owners.setdefault(row, []).append(plug_in)
    text = _table(_rows(METRICS))
    for names in dict.fromkeys(map(", ".join, owners.values())):
        text += f"\n## {names}\n\n" + _table(
            [row for row in owners if ", ".join(owners[row]) == names]
        )
    return text


def _rows(metrics: Metrics) -> list[str]:
    rows = []
    for name, metric in metrics.items():
        notes = "score" * metric.score, metric.reduction.removeprefix("mean")
        told = ", ".join(filter(None, notes))
        rows.append(
            f"| `{name}` | {metric.unit} | {metric.meaning}{f' ({told})' if told else ''} |"
        )
    return rows


def _table(rows: list[str]) -> str:
    return "\n".join([HEAD, "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8").split(HEAD)[0]
    PAGE.write_text(before + metrics_table(installed_metrics()), encoding="utf-8")
