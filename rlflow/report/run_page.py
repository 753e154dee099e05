"""The page of a run as HTML: one self-contained text, served while the run goes on and written as its report at the end.

Everything that comes from a policy, an environment or a configuration is escaped; the page loads nothing and runs no code of
theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.report.curves import CURVE_COLORS, drawn_score, headline, run_seconds
from rlflow.report.lines import clock, evaluation_line, next_commands, phase_seconds
from rlflow.report.lines import headline as numbers
from rlflow.report.metrics import Metrics
from rlflow.report.records import text_of
from rlflow.report.svg import CHART_STYLE, learning_curves, markup, time_bars
from rlflow.report.warnings import Fault, faults_of

LONGEST_TEXT = 4000  # characters of one prompt, response or observation
MOST_TURNS = 12


@dataclass
class PageState:
    """What the page shows. records: by ascending step. episodes: as `rlflow.report.records.trajectory_record` has them.
    summary: once the run has ended."""

    title: str
    steps: int
    registered: Metrics = field(default_factory=dict)
    records: list[dict[str, float]] = field(default_factory=list)
    doing: str = "starting"
    seconds: float = 0.0
    remaining_s: float | None = None
    episodes: list[Mapping[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] | None = None


def render_page(state: PageState, nonce: str = "") -> str:
    """The whole document. nonce: that of the script which fetches the content anew; without one nothing is fetched: a report."""
    colors = "".join(
        f"polyline.{kind}{{stroke:{color}}}circle.{kind}{{fill:{color}}}"
        for kind, color in CURVE_COLORS.items()
    )
    script = f'<script nonce="{markup(nonce)}">{_REFRESH}</script>' if nonce else ""
    title = markup(state.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>{title}</title><style>{CHART_STYLE}{_STYLE}{colors}</style></head>\n<body><main id="run">{render_content(state)}</main>'
        f'<p id="lost" hidden>The run does not answer any more. If it has ended, its report is report.html in its directory.</p>'
        f"{script}</body></html>\n"
    )


def render_content(state: PageState) -> str:
    """What changes while the run goes on."""
    parts = [
        f"<h1>{markup(state.title)} <small>{markup(_status(state))}</small></h1>",
        f'<p class="headline">{markup(headline(state.records, state.registered))}</p>',
        _warnings(faults_of(state.records, state.registered)),
        learning_curves(state.records, drawn_score(state.records, state.registered)),
        time_bars(state.records),
        _numbers(state),
        _evaluations(state),
        _episodes(state.episodes, "How it ended" if state.summary else "Episodes of now"),
        _following(state.summary),
    ]
    return "\n".join(part for part in parts if part)


def _status(state: PageState) -> str:
    done = int(state.records[-1]["step"]) if state.records else 0
    seconds = run_seconds(state.records) if state.summary is None and not state.seconds else state.seconds
    if state.summary is not None:
        done, seconds = state.summary["steps"], state.summary["seconds"]
        return f"{state.summary['status']} after {done:,} step{'' if done == 1 else 's'} and {clock(seconds)}"
    left = f", about {clock(state.remaining_s)} left" if state.remaining_s is not None else ""
    return f"step {done} of {state.steps}, {clock(seconds)} so far{left}: {state.doing}"


def _warnings(faults: Sequence[Fault]) -> str:
    if not faults:
        return ""
    rows = "".join(f"<li><b>step {one.step}</b> {markup(one.text)}</li>" for one in faults)
    return f'<ul class="warnings">{rows}</ul>'


def _numbers(state: PageState) -> str:
    trained = [record for record in state.records if "train/reward" in record]
    if not trained:
        return ""
    last = trained[-1]
    shown = [*numbers(last, state.registered), phase_seconds(last)]
    cells = "".join(f"<li>{markup(part)}</li>" for part in shown if part)
    return f'<h2>Step {int(last["step"])}</h2><ul class="numbers">{cells}</ul>'


def _evaluations(state: PageState) -> str:
    found = [record for record in state.records if any(name.startswith("eval/") for name in record)]
    if not found:
        return ""
    shown = found if len(found) <= 8 else [found[0], *found[-7:]]
    rows = "".join(
        f"<tr><th>{int(one['step'])}</th><td>{markup(evaluation_line(one, state.registered))}</td></tr>" for one in shown
    )
    return f"<h2>Evaluations</h2><table><tr><th>step</th><th></th></tr>{rows}</table>"


def _episodes(episodes: Sequence[Mapping[str, Any]], title: str) -> str:
    return f"<h2>{title}</h2>" + "".join(map(_episode, episodes)) if episodes else ""


def _episode(record: Mapping[str, Any]) -> str:
    turns = record["turns"]
    left_out = f'<p class="dim">{len(turns) - MOST_TURNS} more turns</p>' if len(turns) > MOST_TURNS else ""
    body = "".join(
        f'<pre class="said">{_cut(turn["response"])}</pre>'
        + (f'<pre class="shown">{_cut(turn["observation"])}</pre>' if turn["observation"] else "")
        for turn in turns[:MOST_TURNS]
    )
    reward = record["reward"]
    good = "good" if reward is not None and reward > 0 else "bad"
    gold = f", expected {_cut(record['answer'])}" if record.get("answer") not in (None, "") else ""
    error = f'<p class="bad">{_cut(record["error"])}</p>' if record.get("error") else ""
    outcome = f'<p><b class="{good}">reward {markup(f"{reward:g}" if reward is not None else "-")}</b>, {markup(record["stop"])}{gold}</p>'
    return (
        f'<article><pre class="shown">{_cut(text_of(record["prompt"], roles=True))}</pre>{body}{left_out}{outcome}{error}</article>'
    )


def _following(summary: Mapping[str, Any] | None) -> str:
    commands = next_commands(summary) if summary else []
    rows = "".join(f"<li><code>{markup(command)}</code> {markup(what)}</li>" for command, what in commands)
    return f"<h2>Next</h2><ul>{rows}</ul>" if rows else ""


def _cut(value: Any) -> str:
    text = str(value)
    return markup(text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters)")


_STYLE = """
:root{color-scheme:light dark;--ink:#1f2933;--dim:#66727f;--line:#7b879433;--paper:#fff;--wash:#7b879414}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7eb;--dim:#9aa5b1;--paper:#15191e}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;margin:1.5rem auto;padding:0 1rem;overflow-wrap:anywhere}
h1{font-size:1.2rem;margin:0}h1 small,.dim{font-weight:normal;color:var(--dim)}h2{font-size:1rem;margin:1.4rem 0 .4rem}
.headline{font-size:2rem;line-height:1.2;margin:.6rem 0 1rem}
.warnings{list-style:none;padding:0}.warnings li{border-left:4px solid #c0392b;background:#c0392b18;padding:.5rem .8rem;margin:.4rem 0}
.numbers{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;font-variant-numeric:tabular-nums}
svg text{fill:var(--dim)}polyline{fill:none;stroke-width:2}polyline.faint{stroke-width:1;opacity:.3}
.interval{stroke:#1f6fb2;stroke-width:3;opacity:.45}
table{border-collapse:collapse}td{white-space:pre-wrap}th{white-space:nowrap;font-weight:normal;color:var(--dim);text-align:right;padding:.1rem .8rem .1rem 0}
article{border:1px solid var(--line);border-radius:.4rem;padding:.6rem .8rem;margin:.5rem 0}
pre{font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;margin:.2rem 0}
pre.shown{color:var(--dim);max-height:14rem;overflow:auto}pre.said{background:var(--wash);padding:.2rem .4rem;border-radius:.3rem}
.good{color:#1e8449}.bad{color:#c0392b}#lost{color:#c0392b}code{background:var(--wash);padding:.1rem .3rem}
"""

_REFRESH = """
const run = document.getElementById("run"), lost = document.getElementById("lost");
async function refresh() {
  try {
    const answer = await fetch("content");
    if (answer.ok && !String(getSelection())) run.innerHTML = await answer.text();  // a selection would be lost
    lost.hidden = answer.ok;
  } catch (problem) { lost.hidden = false; }
  setTimeout(refresh, 3000);
}
setTimeout(refresh, 3000);
"""
