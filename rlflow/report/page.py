"""The page of a run as HTML: its charts, and its episodes token by token.

The page is a shell, an index of all groups, and chunks. A chunk is zlib-compressed JSON in base64,
unpacked by the browser when one of its groups is looked at: in a file (`rlflow view`) it stands at
the end, of a run that goes on it is fetched. What comes from outside is escaped where Python writes
it, and a text node where the script does."""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow.report.charts import NARROW, Records, has_curves, printable, run_seconds, run_svg
from rlflow.report.findings import Fault, findings
from rlflow.report.lines import (
    clock,
    ending,
    evaluation_line,
    headline,
    next_commands,
    numbers,
    phase_seconds,
)
from rlflow.report.metrics import Metrics, label, scores
from rlflow.report.recorded import Record, RunFiles, grouped
from rlflow.report.records import answers_of, question_of, solved
from rlflow.report.tokens import EpisodeTokens
from rlflow.storage.files import plain, replacing

CHUNK_EPISODES = 96
MOST_VALUES = 12
"""Different values of a task's attribute up to which it is a filter."""
LONGEST_VALUE = 40
QUESTION_CHARACTERS = 240
MOST_EVALUATIONS = 8
SCALES = {"logprobs": 1e4, "gap": 1e6, "entropy": 1e4, "advantages": 1e4}
"""What a number is multiplied by to stand as an integer in a chunk."""
RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
Entry = dict[str, Any]
"""What the index says of a group."""
_PLACE = re.compile(r"@@([A-Z]+)@@")


@dataclass
class Content:
    """What stands on the page before a chunk is unpacked. opens: train, or run for its charts."""

    title: str
    opens: str
    status: str = ""
    holds: str = ""
    findings: str = ""
    overview: str = ""
    score: str = "reward"
    groups: list[Entry] = field(default_factory=list)

    @property
    def index(self) -> dict[str, Any]:
        """What the script knows."""
        told = {"groups": self.groups, "score": self.score, "opens": self.opens}
        return {**told, "attributes": _attributes(self.groups)}


def write_page(run: RunFiles, out: str | Path, opens: str = "train") -> tuple[Content, list[Fault]]:
    """Writes the page as a file; returns what is on it and what was found wrong with the run.

    Raises ConfigError for a run without episodes, unless it opens with the charts; CheckpointError
    for damaged files."""
    if opens == "train" and not steps_of(run):
        raise ConfigError(nothing_stored(run))
    groups: list[Entry] = []
    chunks = []
    for kind, step in steps_of(run):
        for part, chunk in enumerate(parts(run, kind, step)):
            groups += entries(run, chunk, kind, step, part)
            chunks.append(element(groups[-1]["chunk"], chunk_of(run, chunk, kind, step)))
    content, found = content_of(run, groups, opens)
    with replacing(out, durable=False) as aside, aside.open("w", encoding="utf-8") as page:
        page.write(shell(content, RULES))
        page.writelines(chunks)
        page.write("</body>\n</html>\n")
    return content, found


def content_of(run: RunFiles, groups: list[Entry], opens: str) -> tuple[Content, list[Fault]]:
    """Everything but the chunks, and what is wrong with the run."""
    found = findings(run)
    rows = [f"<li><b>{markup(one.title)}</b> {markup(one.text)}</li>" for one in found]
    known = scores(run.registered)
    content = Content(
        title=run.name,
        opens=opens,
        status=ending(run.summary) if "seconds" in run.summary else "",
        findings="".join(rows),
        overview=overview(run.metrics, run.registered, run.summary),
        score=known[0] if known else "reward",
        groups=groups,
    )
    content.holds = holds(run, content)
    return content, found


def shell(content: Content, rules: str, nonce: str = "", more_script: str = "") -> str:
    """The document up to its chunks."""
    values = {
        "RULES": rules,
        "OPENS": content.opens,
        "TITLE": markup(content.title),
        "STATUS": markup(content.status),
        "HOLDS": markup(content.holds),
        "FINDINGS": content.findings,
        "OVERVIEW": content.overview,
        "STYLE": template("view.css"),
        "INDEX": element("index", content.index),
        "NONCE": f' nonce="{markup(nonce)}"' if nonce else "",
        "SCRIPT": template("view.js") + more_script,
    }
    return filled(template("view.html"), values)


def nothing_stored(run: RunFiles) -> str:
    """Why there is nothing to view, and what would store it."""
    there = sorted(entry.name for entry in run.path.iterdir()) if run.path.is_dir() else []
    kept = (run.config.get("metrics") or {}).get("trajectories_per_step")
    held = f"found {', '.join(there[:8])}" if there else "found nothing"
    setting = f" (it is {kept} there)" if kept is not None else ""
    return (
        f"{run.path}: no episodes are stored; expected trajectories/, tokens/ or evaluations/, "
        f"{held}. metrics.trajectories_per_step=4 stores whole groups of every step{setting}, an "
        "evaluation stores its episodes."
    )


def holds(run: RunFiles, content: Content) -> str:
    """What is on the page, in a line."""
    episodes = sum(len(group["outcomes"]) for group in content.groups)
    parts = [f"{episodes:,} episodes in {len(content.groups):,} groups"]
    if run.training:
        parts.append(f"training steps {min(run.training)} to {max(run.training)}")
    if run.evaluations:
        count = len(run.evaluations)
        parts.append(f"{count} evaluation{'s' if count > 1 else ''}")
    name = f"eval/{content.score}"
    values = [record[name] for record in run.metrics if name in record]
    if len(values) > 1:
        parts.append(f"{label(content.score)} {values[0]:.3f} → {values[-1]:.3f}")
    if run.training and not run.tokens:
        parts.append("without tokens: the run stored none")
    return " · ".join(parts)


# ---------------------------------------------------------------- charts and numbers


def overview(records: Records, registered: Metrics, summary: Mapping[str, Any]) -> str:
    """HTML of what a run achieved: headline, charts, last numbers, evaluations, what to do next."""
    if not records:
        return ""
    parts = [f'<p class="headline">{markup(headline(records, registered))}</p>']
    if has_curves(records, registered):
        wide, narrow = (run_svg(records, registered, *width) for width in ((), (NARROW,)))
        parts.append(picture(wide, narrow, "what the policy learned, and seconds per step"))
    trained = [record for record in records if "train/reward" in record]
    if trained:
        shown = [*numbers(trained[-1], registered), phase_seconds(trained[-1])]
        cells = "".join(f"<li>{markup(part)}</li>" for part in shown if part)
        step, seconds = int(trained[-1]["step"]), run_seconds(records)
        parts.append(f"<h2>Step {step}, after {clock(seconds)}</h2>")
        parts.append(f'<ul class="numbers">{cells}</ul>')
    found = [one for one in records if any(name.startswith("eval/") for name in one)]
    if found:
        kept = found[:1] + found[1:][1 - MOST_EVALUATIONS :]
        rows = [[str(int(one["step"])), evaluation_line(one, registered)] for one in kept]
        parts.append("<h2>Evaluations</h2>" + table(["step", ""], rows))
    commands = [[command, what] for command, what in next_commands(summary)] if summary else []
    if commands:
        parts.append("<h2>Next</h2>" + table([], commands))
    return "\n".join(parts)


def picture(wide: str, narrow: str, what: str) -> str:
    """HTML of an SVG, and of the one that a phone gets. what: for those who do not see it."""
    sources = []
    for svg in (wide, narrow):
        packed = base64.b64encode(svg.encode("utf-8", "replace")).decode()
        sources.append(f"data:image/svg+xml;base64,{packed}")
    phone = f'<source media="(max-width: 600px)" srcset="{sources[1]}">'
    return f'<picture>{phone}<img alt="{markup(what)}" src="{sources[0]}"></picture>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table."""
    lines = [[f"<th>{markup(cell)}</th>" for cell in heads]] if heads else []
    lines += [[f"<td>{markup(cell)}</td>" for cell in row] for row in rows]
    return f"<table>{''.join('<tr>' + ''.join(line) + '</tr>' for line in lines)}</table>"


def markup(text: str) -> str:
    """The text escaped for HTML; what no document may hold becomes a replacement character."""
    return html.escape(printable(text))


def template(name: str) -> str:
    """The text of a file that ships beside this one."""
    path = resources.files("rlflow.report") / "templates" / name
    return path.read_text(encoding="utf-8")


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with each @@NAME@@ replaced; what is put in is not read again."""
    return _PLACE.sub(lambda place: values[place[1]], text)


# ---------------------------------------------------------------- groups and chunks


def steps_of(run: RunFiles) -> list[tuple[str, int]]:
    """(train or eval, step) of all that has episodes."""
    train = [("train", step) for step in sorted(run.training)]
    return train + [("eval", step) for step in sorted(run.evaluations)]


def parts(run: RunFiles, kind: str, step: int) -> Iterator[list[list[Record]]]:
    """The groups of a step, some at a time: a chunk is made of each part."""
    part: list[list[Record]] = []
    for group in grouped(run.records(kind, step)):
        part.append(group)
        if sum(map(len, part)) >= CHUNK_EPISODES:
            yield part
            part = []
    if part:
        yield part


def entries(
    run: RunFiles, groups: Sequence[list[Record]], kind: str, step: int, part: int
) -> list[Entry]:
    """What the index says of the groups of a part.

    outcomes: a letter per attempt: s(olved), f(ailed), c(ut), a(borted)."""
    found = []
    for place, group in enumerate(groups):
        record = group[0]
        rewards = [one["reward"] for one in group]
        entry = {
            "kind": kind,
            "step": step,
            "task": str(record["task_id"]),
            "question": question_of(record)[:QUESTION_CHARACTERS],
            "outcomes": "".join(_outcome(run, one) for one in group),
            "rewards": [None if one is None else round(float(one), 4) for one in rewards],
            "attributes": dict(_short_facts(record)),
            "chunk": f"chunk-{kind}-{step}-{part}",
            "place": place,
        }
        found.append(plain(entry))
    return found


def _short_facts(record: Record) -> Iterator[tuple[str, Any]]:
    for key, value in (record.get("metadata") or {}).items():
        short = isinstance(value, (str, int, bool)) and len(str(value)) <= LONGEST_VALUE
        if short and key != "question":
            yield key, value


def _outcome(run: RunFiles, record: Record) -> str:
    if record.get("stop") == "aborted":
        return "a"
    if solved(record, run.registered):
        return "s"
    return "c" if record.get("stop") in ("max_tokens", "max_turns") else "f"


def _attributes(groups: Sequence[Entry]) -> dict[str, list[Any]]:
    """{attribute of tasks: its values} of those that tell tasks apart and have few values."""
    values: dict[str, dict[str, Any]] = {}
    for group in groups:
        for key, value in group["attributes"].items():
            seen = values.setdefault(key, {})
            if len(seen) <= MOST_VALUES:
                seen[str(value)] = value
    few = {key: seen.values() for key, seen in values.items() if 1 < len(seen) <= MOST_VALUES}
    return {key: sorted(found, key=lambda one: (str(type(one)), one)) for key, found in few.items()}


def chunk_of(
    run: RunFiles, groups: Sequence[list[Record]], kind: str, step: int
) -> list[dict[str, Any]]:
    """The groups of a part in full, with the tokens of training steps."""
    tokens = run.tokens_of(step) if kind == "train" else {}
    return [
        {
            "question": question_of(group[0]),
            "answers": answers_of(group[0]),
            "attempts": [_attempt(one, tokens.get(str(one.get("id")))) for one in group],
        }
        for group in groups
    ]


def _attempt(record: Record, tokens: EpisodeTokens | None) -> dict[str, Any]:
    left_out = ("task_id", "answer", "metadata", "group_id")
    shown = {key: value for key, value in record.items() if key not in left_out}
    return shown if tokens is None else {**shown, "tokens": columns(tokens)}


def columns(episode: EpisodeTokens) -> dict[str, Any]:
    """An episode's tokens as the script reads them.

    Per segment ids, texts, run lengths of the mask (not sampled first), and the numbers of the
    sampled tokens as scaled integers, null where not known."""
    segments = []
    for segment, texts in zip(episode.segments, episode.texts, strict=True):
        columns = {
            "logprobs": segment.logprobs,
            "gap": segment.logprobs.astype(float) - segment.trainer_logprobs,
            "entropy": segment.entropy,
            "advantages": segment.advantages,
        }
        scaled = {name: _integers(column, SCALES[name]) for name, column in columns.items()}
        told = {"ids": segment.tokens.tolist(), "texts": texts}
        told["runs"] = _runs(segment.sampled.tolist())
        segments.append({**told, "versions": segment.versions.tolist(), **scaled})
    return {"segments": segments, "turns": [list(turn) for turn in episode.turns]}


def _runs(mask: Sequence[bool]) -> list[int]:
    lengths, value = [0], False
    for sampled in mask:
        if sampled != value:
            lengths.append(0)
            value = sampled
        lengths[-1] += 1
    return lengths


def _integers(column: Any, scale: float) -> list[int | None]:
    values = column.tolist()
    return [round(value * scale) if abs(value) < 1e12 else None for value in values]  # NaN: None


def element(name: str, value: Any) -> str:
    """An element that the browser keeps as text."""
    return f'<script type="text/plain" id="{name}">{packed(value)}</script>\n'


def packed(value: Any) -> str:
    """Compressed JSON in base64, which holds no HTML."""
    compact: dict[str, Any] = {"ensure_ascii": True, "separators": (",", ":")}
    try:
        text = json.dumps(value, allow_nan=False, **compact)
    except ValueError:  # a file from elsewhere may hold NaN, which JSON does not know
        text = json.dumps(plain(value), **compact)
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()
