"""The page of a run as HTML: its charts, and its episodes token by token.

The page is a shell, an index of all groups, and chunks. A chunk is zlib-compressed JSON in base64,
unpacked by the browser when one of its groups is looked at: in a file (`rlflow view`) it stands at
the end, of a run that goes on it is fetched. What comes from outside is escaped where Python writes
it, and a text node where the script does."""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow.report.alarms import Fault
from rlflow.report.lines import (
    Records,
    clock,
    ending,
    evaluation_line,
    is_step,
    next_commands,
    numbers,
    phase_times,
    values_of,
)
from rlflow.report.metrics import Metrics, label, scores
from rlflow.report.tokens import EpisodeTokens
from rlflow.storage.files import plain, write_text
from rlflow.texts import printable

from .charts import has_curves, run_svg
from .curves import headline, run_seconds
from .episodes import answers_of, question_of, solved
from .findings import findings
from .recorded import Record, RunFiles, grouped

CHUNK_EPISODES = 96
MOST_VALUES = 12
"""Different values of a task's attribute up to which it is a filter."""
LONGEST_VALUE = 40
QUESTION_CHARACTERS = 240
MOST_EVALUATIONS = 8
SCALES = {"logprobs": 1e4, "gap": 1e6, "entropy": 1e4, "advantages": 1e4}
"""What a number is multiplied by to stand as an integer in a chunk."""
RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
OF_THE_TASK = ("task_id", "answer", "metadata", "group_id")
"""Of a record: the same in all attempts of a group, and said once."""
END = "</body>\n</html>\n"
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
    groups, chunks = [], []
    for kind, step in steps_of(run):
        for name, part in parts(run, kind, step).items():
            groups += entries(run, part, kind, step, name)
            chunks.append(element(name, chunk_of(run, part, kind, step)))
    content, found = content_of(run, groups, opens)
    text = shell(content, RULES) + "".join(chunks) + END
    write_text(out, text, durable=False)
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
        "STYLE": template("palette.css") + template("view.css"),
        "INDEX": element("index", content.index),
        "NONCE": f' nonce="{markup(nonce)}"' if nonce else "",
        "SCRIPT": template("view.js") + more_script,
    }
    return filled(template("view.html"), values)


def nothing_stored(run: RunFiles) -> str:
    """Why there is nothing to view, and what would store it."""
    there = sorted(entry.name for entry in run.path.glob("*"))
    kept = run.settings.get("metrics.trajectories_per_step")
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
    values = values_of(run.metrics, f"eval/{content.score}")
    if len(values) > 1:
        parts.append(f"{label(content.score)} {values[0]:.3f} → {values[-1]:.3f}")
    if run.training and not run.tokens:
        parts.append("without tokens: the run stored none")
    return " · ".join(parts)


# ---------------------------------------------------------------- charts and numbers


NARROW_PAGE = 700  # pixels


def overview(records: Records, registered: Metrics, summary: Mapping[str, Any]) -> str:
    """HTML of what a run achieved: headline, charts, last numbers, evaluations, what to do next."""
    if not records:
        return ""
    parts = [f'<p class="headline">{markup(headline(records, registered))}</p>']
    if has_curves(records, registered):
        what = "what the policy learned, and seconds per step"
        wide, narrow = (run_svg(records, registered, narrow=narrow) for narrow in (False, True))
        parts.append(picture(wide, narrow, what))
    trained = [record for record in records if is_step(record)]
    if trained:
        shown = [*numbers(trained[-1], registered), phase_times(trained[-1])]
        cells = "".join(f"<li>{markup(part)}</li>" for part in shown if part)
        step, seconds = int(trained[-1]["step"]), run_seconds(records)
        parts.append(f"<h2>Step {step}, after {clock(seconds)}</h2>")
        parts.append(f'<ul class="numbers">{cells}</ul>')
    found = [one for one in records if any(name.startswith("eval/") for name in one)]
    if found:
        kept = found[:1] + found[1:][1 - MOST_EVALUATIONS :]
        rows = [(str(int(one["step"])), evaluation_line(one, registered)) for one in kept]
        parts.append("<h2>Evaluations</h2>" + table(["step", ""], rows))
    if commands := next_commands(summary):
        parts.append("<h2>Next</h2>" + table([], commands))
    return "\n".join(parts)


def picture(wide: str, narrow: str, what: str) -> str:
    """HTML of an image, drawn twice: a narrow screen shows the narrow one whole. what: for those
    who do not see it."""
    wide_url, narrow_url = (
        f"data:image/svg+xml;base64,{base64.b64encode(svg.encode('utf-8', 'replace')).decode()}"
        for svg in (wide, narrow)
    )
    small = f'<source media="(max-width: {NARROW_PAGE}px)" srcset="{narrow_url}">'
    return f'<picture>{small}<img alt="{markup(what)}" src="{wide_url}"></picture>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table."""
    lines = [[f"<th>{markup(cell)}</th>" for cell in heads]] if heads else []
    lines += [[f"<td>{markup(cell)}</td>" for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f"<table>{body}</table>"


def markup(text: str) -> str:
    """The text escaped for HTML; what no document may hold becomes a replacement character."""
    return html.escape(printable(text))


def template(name: str) -> str:
    """The text of a file that ships beside this one."""
    path = resources.files("rlflow_tools.view") / "templates" / name
    return path.read_text(encoding="utf-8")


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with each @@NAME@@ replaced; what is put in is not read again."""
    return _PLACE.sub(lambda place: values[place[1]], text)


# ---------------------------------------------------------------- groups and chunks


def steps_of(run: RunFiles) -> list[tuple[str, int]]:
    """(train or eval, step) of all that has episodes."""
    train = [("train", step) for step in sorted(run.training)]
    return train + [("eval", step) for step in sorted(run.evaluations)]


def parts(run: RunFiles, kind: str, step: int) -> dict[str, list[list[Record]]]:
    """{name of a chunk: the groups in it} of a step."""
    found: list[list[list[Record]]] = []
    for group in grouped(run.records(kind, step)):
        if not found or sum(map(len, found[-1])) >= CHUNK_EPISODES:
            found.append([])
        found[-1].append(group)
    return {f"chunk-{kind}-{step}-{place}": part for place, part in enumerate(found)}


def entries(
    run: RunFiles, groups: Sequence[list[Record]], kind: str, step: int, chunk: str
) -> list[Entry]:
    """What the index says of the groups of a chunk.

    outcomes: a letter per attempt: s(olved), f(ailed), c(ut), a(borted)."""
    found = []
    for place, group in enumerate(groups):
        rewards = [None if one.get("stop") == "aborted" else one["reward"] for one in group]
        entry = {
            "kind": kind,
            "step": step,
            "task": str(group[0]["task_id"]),
            "question": question_of(group[0])[:QUESTION_CHARACTERS],
            "outcomes": "".join(_outcome(run, one) for one in group),
            "rewards": [one if one is None else round(one, 4) for one in rewards],
            "attributes": {
                key: value
                for key, value in (group[0].get("metadata") or {}).items()
                if key != "question"
                and isinstance(value, (str, int))
                and len(str(value)) <= LONGEST_VALUE
            },
            "chunk": chunk,
            "place": place,
        }
        found.append(plain(entry))
    return found


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
    return {
        key: sorted(seen.values(), key=lambda one: (str(type(one)), one))
        for key, seen in values.items()
        if 1 < len(seen) <= MOST_VALUES
    }


def chunk_of(
    run: RunFiles, groups: Sequence[list[Record]], kind: str, step: int
) -> list[dict[str, Any]]:
    """The groups of a chunk in full, with the tokens of training steps."""
    tokens = run.tokens_of(step) if kind == "train" else {}
    found = []
    for group in groups:
        attempts = [
            {key: value for key, value in one.items() if key not in OF_THE_TASK} for one in group
        ]
        for attempt in attempts:
            if str(attempt.get("id")) in tokens:
                attempt["tokens"] = columns(tokens[str(attempt["id"])])
        question, answers = question_of(group[0]), answers_of(group[0])
        found.append({"question": question, "answers": answers, "attempts": attempts})
    return found


def columns(episode: EpisodeTokens) -> dict[str, Any]:
    """An episode's tokens as the script reads them.

    Per segment ids, texts, run lengths of the mask (not sampled first), and the numbers of the
    sampled tokens as scaled integers, null where not known."""
    segments = []
    for segment, texts in zip(episode.segments, episode.texts, strict=True):
        numbers = {
            "logprobs": segment.logprobs,
            "gap": segment.logprobs.astype(float) - segment.trainer_logprobs,
            "entropy": segment.entropy,
            "advantages": segment.advantages,
        }
        told = {
            "ids": segment.tokens.tolist(),
            "texts": texts,
            "runs": _runs(segment.sampled.tolist()),
            "versions": segment.versions.tolist(),
        }
        for name, column in numbers.items():
            scaled = (column.astype(float) * SCALES[name]).round().tolist()
            told[name] = [int(one) if abs(one) < 1e16 else None for one in scaled]  # NaN: None
        segments.append(told)
    return {"segments": segments, "turns": [list(turn) for turn in episode.turns]}


def _runs(mask: Sequence[bool]) -> list[int]:
    """Lengths of runs of equal values, of false ones first."""
    lengths = [len(list(run)) for _, run in itertools.groupby(mask)]
    return [0, *lengths] if mask and mask[0] else lengths


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
