"""Says what a data file is: questions or a corpus, how many rows, which are bad, and what the first
one looks like.

With --out it writes the same in one form, JSON Lines: questions as {id, prompt or question,
solutions, ...}, passages as {id, title, contents, url}. Bad rows are an error, and left out only
with --skip-bad-rows.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.types import Task

EXAMPLES = """examples:
  rlflow search data train.jsonl
  rlflow search data data/flashrag                                          # a folder of evaluation sets
  rlflow search data nq_hotpotqa_train/train.parquet --out train.jsonl
  rlflow search data corpus.jsonl --out clean.jsonl --skip-bad-rows
"""
SHOWN_CHARACTERS = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The file, and where the same goes in one form."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a file of questions or passages, or a folder of evaluation sets",
    )
    parser.add_argument("--out", metavar="FILE", help="write it as JSON Lines")
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="leave bad rows out, and say how many"
    )


def run(args: argparse.Namespace) -> int:
    """Reads, describes, writes; returns 0. Raises DataError for bad rows."""
    path = Path(args.path).expanduser()
    rows = _passages(path, args) if path.is_file() and _is_corpus(path) else _questions(path, args)
    if args.out:
        from rlflow_environments.retrieval.corpus import write_rows

        print(f"wrote {len(rows):,} rows to {write_rows(args.out, rows)}")
    return 0


def _is_corpus(path: Path) -> bool:
    """Whether the first row that can be read is a passage."""
    from rlflow_environments.search.questions.tables import read_rows

    first = next((row for _, row in read_rows(path, "data") if isinstance(row, dict)), {})
    return (
        ("contents" in first or "text" in first)
        and "question" not in first
        and "prompt" not in first
    )


def _passages(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    from rlflow_environments.retrieval.corpus import Corpus

    passages = list(Corpus(path, skip_bad_rows=args.skip_bad_rows).with_text())
    synthesised = sum(passage.url.startswith("doc://") for passage in passages)
    print(f"{path}: a corpus of {len(passages):,} passages, {synthesised:,} of them without a url")
    _show({"id": passages[0].id, "contents": passages[0].contents, "url": passages[0].url})
    return [passage.fields for passage in passages]


def _questions(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    from rlflow_environments.search.questions import read_tasks

    tasks = read_tasks({"path": path, "skip_bad_rows": args.skip_bad_rows}, "val", "{question}")
    sets = Counter(task.metadata["set"] for task in tasks if "set" in task.metadata)
    counts = (
        f"; sets: {', '.join(f'{name} {count:,}' for name, count in sets.items())}" if sets else ""
    )
    print(
        f"{path}: {len(tasks):,} questions, {sum(len(task.answer) > 1 for task in tasks):,} with "
        f"several gold answers{counts}"
    )
    rows = [row_of(task) for task in tasks]
    _show(rows[0])
    return rows


def row_of(task: Task) -> dict[str, Any]:
    """The task in RLinf's layout; what was only a question stays one, so that the run's own
    template applies."""
    asked = (
        {}
        if task.prompt == str(task.metadata.get("question", "")).strip()
        else {"prompt": task.prompt}
    )
    name = task.id.removeprefix(
        f"{task.metadata.get('set')}-"
    )  # reading puts the set in front again
    return {"id": name, **asked, "solutions": task.answer, **task.metadata}


def _show(row: dict[str, Any]) -> None:
    text = json.dumps(row, ensure_ascii=False)
    print(f"first: {text[:SHOWN_CHARACTERS]}{'...' if len(text) > SHOWN_CHARACTERS else ''}")
