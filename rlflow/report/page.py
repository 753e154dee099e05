"""`rlflow view` as a file: one HTML page that holds a run's episodes, compressed, and the script that shows them.

The page is a shell, an index of all episodes, and chunks. A chunk is zlib-compressed JSON in base64, unpacked by the browser when
one of its episodes is looked at, so that the first paint does not wait for what nobody has asked for. Nothing from outside
becomes HTML: the script makes text nodes, and what stands in the shell is escaped.
"""

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
from rlflow.report.findings import findings
from rlflow.report.metrics import label
from rlflow.report.recorded import Record, RunFiles, grouped
from rlflow.report.records import answers_of, question_of, solved
from rlflow.report.tokens import EpisodeTokens
from rlflow.report.warnings import Fault
from rlflow.storage.files import plain, replacing

CHUNK_EPISODES = 96
MOST_VALUES = 12
"""Different values of a task's attribute up to which it is a filter."""
QUESTION_CHARACTERS = 240
SCALES = {"logprobs": 1e4, "gap": 1e6, "entropy": 1e4, "advantages": 1e4}
"""What a number is multiplied by to stand as an integer in a chunk."""
_PLACE = re.compile(r"@@([A-Z]+)@@")


@dataclass
class PageIndex:
    """What the page knows without unpacking a chunk: of each group its source, and of each of its attempts the outcome."""

    title: str
    score: str
    groups: list[dict[str, Any]] = field(default_factory=list)
    chunks: int = 0
    episodes: int = 0
    with_tokens: int = 0


def write_page(run: RunFiles, out: str | Path) -> tuple[PageIndex, list[Fault]]:
    """Writes the page and returns its index and what was found wrong with the run.

    Raises ConfigError for a run without episodes, with what is there and the key that stores them; CheckpointError for damaged
    files."""
    if not run.training and not run.evaluations:
        raise ConfigError(nothing_stored(run))
    found = findings(run)
    scores = [name for name, metric in run.registered.items() if metric.score]
    index = PageIndex(run.name, scores[0] if scores else "reward")
    with replacing(out, durable=False) as aside, aside.open("w", encoding="utf-8", newline="\n") as page:
        chunks = [_element(f"chunk-{number}", chunk) for number, chunk in enumerate(_chunks(run, index))]
        attributes = _attributes(index.groups)
        told = {**vars(index), "attributes": attributes}
        values = {
            "TITLE": html.escape(run.name),
            "HEADLINE": html.escape(headline(run, index)),
            "FINDINGS": "".join(
                f"<li><b>{html.escape(one.title)}</b> {html.escape(one.text)}</li>" for one in found
            ),
            "STYLE": template("view.css"),
            "INDEX": _element("index", told),
            "SCRIPT": template("view.js"),
        }
        page.write(filled(template("view.html"), values))
        page.writelines(chunks)
        page.write("</body>\n</html>\n")
    return index, found


def nothing_stored(run: RunFiles) -> str:
    """Why there is nothing to view, and what would store it."""
    there = sorted(entry.name for entry in run.path.iterdir()) if run.path.is_dir() else []
    kept = (run.config.get("metrics") or {}).get("trajectories_per_step")
    held = f"found {', '.join(there[:8])}" if there else "found nothing"
    setting = f" (it is {kept} there)" if kept is not None else ""
    return (
        f"{run.path}: no episodes are stored; expected trajectories/, tokens/ or evaluations/, {held}. "
        f"metrics.trajectories_per_step=4 stores whole groups of every step{setting}, an evaluation stores its episodes."
    )


def headline(run: RunFiles, index: PageIndex) -> str:
    """What is on the page, in a line."""
    parts = [f"{index.episodes:,} episodes in {len(index.groups):,} groups"]
    if run.training:
        parts.append(f"training steps {min(run.training)} to {max(run.training)}")
    if run.evaluations:
        count = len(run.evaluations)
        parts.append(f"{count} evaluation{'s' if count > 1 else ''}")
    evaluated = [record for record in run.metrics if f"eval/{index.score}" in record]
    if len(evaluated) > 1:
        first, last = (record[f"eval/{index.score}"] for record in (evaluated[0], evaluated[-1]))
        parts.append(f"{label(index.score)} {first:.3f} → {last:.3f}")
    if run.training and not index.with_tokens:
        parts.append("without tokens: the run was made before they were stored, or stored none")
    return " · ".join(parts)


def template(name: str) -> str:
    """The text of a file that ships beside this one."""
    return (resources.files("rlflow.report") / "templates" / name).read_text(encoding="utf-8")


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with each @@NAME@@ replaced; what is put in is not read again."""
    return _PLACE.sub(lambda place: values[place[1]], text)


def _chunks(run: RunFiles, index: PageIndex) -> Iterator[list[dict[str, Any]]]:
    """The groups of all steps, some at a time; the index grows on the way."""
    first = _solved_shares(run)
    for kind, steps in (("train", run.training), ("eval", run.evaluations)):
        for step in sorted(steps):
            tokens = run.tokens_of(step) if kind == "train" else {}
            chunk: list[dict[str, Any]] = []
            waiting = 0
            for group in grouped(run.records(kind, step)):
                entry = _entry(run, group, kind, step)
                before = (
                    first.get(str(group[0]["task_id"])) if kind == "eval" and step != min(run.evaluations) else None
                )
                now = run.solved_share(group)
                if before is not None and now is not None and now != before:
                    entry["changed"] = 1 if now > before else -1
                index.groups.append({**entry, "chunk": index.chunks, "place": len(chunk)})
                chunk.append(_group(group, tokens))
                waiting += len(group)
                index.episodes += len(group)
                index.with_tokens += sum(str(record.get("id")) in tokens for record in group)
                if waiting >= CHUNK_EPISODES:
                    yield chunk
                    chunk, waiting, index.chunks = [], 0, index.chunks + 1
            if chunk:
                yield chunk
                index.chunks += 1


def _entry(run: RunFiles, group: Sequence[Record], kind: str, step: int) -> dict[str, Any]:
    """What the index says of a group. outcomes: a letter per attempt: s(olved), f(ailed), c(ut), a(borted)."""
    record = group[0]
    metadata = record.get("metadata") or {}
    scalars = {
        key: value for key, value in metadata.items() if isinstance(value, (str, int, bool)) and key != "question"
    }
    return plain(
        {
            "kind": kind,
            "step": step,
            "task": str(record["task_id"]),
            "question": question_of(record)[:QUESTION_CHARACTERS],
            "outcomes": "".join(_outcome(run, one) for one in group),
            "rewards": [None if one["reward"] is None else round(float(one["reward"]), 4) for one in group],
            "attributes": {key: value for key, value in scalars.items() if len(str(value)) <= 40},
        }
    )


def _outcome(run: RunFiles, record: Record) -> str:
    if record.get("stop") == "aborted":
        return "a"
    if solved(record, run.registered):
        return "s"
    return "c" if record.get("stop") in ("max_tokens", "max_turns") else "f"


def _solved_shares(run: RunFiles) -> dict[str, float | None]:
    """{task: share of its attempts that solved it} of the first evaluation, where there are several."""
    if len(run.evaluations) < 2:
        return {}
    return {
        str(group[0]["task_id"]): run.solved_share(group) for group in grouped(run.records("eval", min(run.evaluations)))
    }


def _attributes(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{attribute of tasks: its values} of those that tell tasks apart and have few values."""
    values: dict[str, dict[str, Any]] = {}
    for group in groups:
        for key, value in group["attributes"].items():
            seen = values.setdefault(key, {})
            if len(seen) <= MOST_VALUES:
                seen[str(value)] = value
    few = {key: list(seen.values()) for key, seen in values.items() if 1 < len(seen) <= MOST_VALUES}
    return {key: sorted(found, key=lambda value: (str(type(value)), value)) for key, found in few.items()}


def _group(group: Sequence[Record], tokens: Mapping[str, EpisodeTokens]) -> dict[str, Any]:
    record = group[0]
    return {
        "question": question_of(record),
        "answers": answers_of(record),
        "metadata": record.get("metadata") or {},
        "attempts": [_attempt(one, tokens.get(str(one.get("id")))) for one in group],
    }


def _attempt(record: Record, tokens: EpisodeTokens | None) -> dict[str, Any]:
    left_out = ("task_id", "answer", "metadata", "group_id")
    shown = {key: value for key, value in record.items() if key not in left_out}
    return shown if tokens is None else {**shown, "tokens": columns(tokens)}


def columns(episode: EpisodeTokens) -> dict[str, Any]:
    """An episode's tokens as the script reads them: per segment ids, texts, run lengths of the mask (not sampled first), and the
    numbers of the sampled tokens as scaled integers, null where not known."""
    segments = []
    for segment, texts in zip(episode.segments, episode.texts, strict=True):
        numbers = {
            "logprobs": segment.logprobs,
            "gap": segment.logprobs.astype(float) - segment.trainer_logprobs,
            "entropy": segment.entropy,
            "advantages": segment.advantages,
        }
        segments.append(
            {
                "ids": segment.tokens.tolist(),
                "texts": texts,
                "runs": _runs(segment.sampled.tolist()),
                "versions": segment.versions.tolist(),
                **{name: _integers(values.tolist(), SCALES[name]) for name, values in numbers.items()},
            }
        )
    return {"segments": segments, "turns": [list(turn) for turn in episode.turns]}


def _runs(mask: Sequence[bool]) -> list[int]:
    lengths, value = [0], False
    for sampled in mask:
        if sampled != value:
            lengths.append(0)
            value = sampled
        lengths[-1] += 1
    return lengths


def _integers(values: Sequence[float], scale: float) -> list[int | None]:
    return [round(value * scale) if abs(value) < 1e12 else None for value in values]  # NaN compares as False


def _element(name: str, value: Any) -> str:
    """An element that the browser keeps as text: compressed JSON in base64, which holds no HTML."""
    try:
        text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a file from elsewhere may hold NaN, which JSON does not know
        text = json.dumps(plain(value), ensure_ascii=True, separators=(",", ":"))
    packed = zlib.compress(text.encode(), 6)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>\n'
