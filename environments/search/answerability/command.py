"""Says how many questions can be answered from a corpus at all: a gold answer occurs in one of its
passages, normalized as for exact match, and, where the questions name their supporting articles
(HotpotQA, 2WikiMultihopQA), all of these are there.

The corpus is read once, about 10,000 passages a second on one core. With --out every question is
written with `answerable`, true or false; `skip_unanswerable: true` beside `path` of
environment.train then leaves out those that are false.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlflow.types import Task
    from rlflow_environments.retrieval.corpus import Passage
    from rlflow_environments.search.answerability.finder import Finding

EXAMPLES = """examples:
  rlflow search check-questions train.jsonl --corpus corpus.jsonl
  rlflow search check-questions data/flashrag --index indices/wiki             # evaluation sets; the corpus that the index has
  rlflow search check-questions train.parquet --corpus wiki-18.jsonl --out train-marked.jsonl
"""
REPORT_ROWS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Questions, corpus, and where the marked questions go."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "questions",
        metavar="QUESTIONS",
        nargs="+",
        help="files of questions, or folders of evaluation sets",
    )
    parser.add_argument("--corpus", metavar="FILE", help="passages, one JSON object per line")
    parser.add_argument(
        "--index", metavar="FOLDER", help="an index folder instead: the corpus that it was built on"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the questions as JSON Lines, each marked `answerable`"
    )
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="leave bad rows of the questions out"
    )


def run(args: argparse.Namespace) -> int:
    """Reads, prints a line per set and one for all, writes; returns 0. Raises ConfigError,
    DataError."""
    from rlflow_environments.retrieval.corpus import write_rows
    from rlflow_environments.search.answerability.finder import AnswerFinder
    from rlflow_environments.search.questions import read_tasks
    from rlflow_environments.search.questions.command import row_of
    from rlflow_environments.search.questions.reading import MARK

    tasks = read_tasks(
        {"path": args.questions, "skip_bad_rows": args.skip_bad_rows}, "val", "{question}"
    )
    finder = AnswerFinder(tasks)
    finder.read(_shown(_corpus(args)))
    report(tasks, finder.findings)
    if args.out:
        rows = [
            {**row_of(task), MARK: finding.answerable}
            for task, finding in zip(tasks, finder.findings, strict=True)
        ]
        print(f"wrote {len(rows):,} rows to {write_rows(args.out, rows)}")
    return 0


def report(tasks: Sequence[Task], findings: Sequence[Finding]) -> None:
    """Prints shares by set, and those of all questions."""
    sets: dict[str, list[Finding]] = {}
    for task, finding in zip(tasks, findings, strict=True):
        sets.setdefault(str(task.metadata.get("set", "")), []).append(finding)
    for name, some in sets.items():
        if name:
            print(_line(name, some))
    print(_line("all", findings))


def _line(name: str, findings: Sequence[Finding]) -> str:
    count = len(findings)
    text = f"{name}: {count:,} questions; answerable {_share([finding.answerable for finding in findings])}"
    titled = [finding for finding in findings if finding.titles]
    if titled:
        text += (
            f"; gold answer in the corpus {_share([finding.answer for finding in findings])}; of "
            f"{len(titled):,} with supporting articles, all there "
            f"{_share([finding.found == finding.titles for finding in titled])}, gold answer in "
            f"one of them {_share([finding.supported for finding in titled])}"
        )
    return text


def _share(claims: Sequence[bool]) -> str:
    return f"{sum(claims) / len(claims):.1%}"


def _corpus(args: argparse.Namespace) -> Path:
    """The corpus to read. Raises ConfigError where none is given, or an index whose corpus is
    gone."""
    from rlflow.errors import ConfigError
    from rlflow_environments.retrieval.indices.folder import read_meta

    if (args.corpus is None) == (args.index is None):
        raise ConfigError("check-questions: expected --corpus or --index, one of them.")
    if args.corpus is not None:
        return Path(args.corpus).expanduser()
    found = read_meta(Path(args.index).expanduser()).corpus["path"]
    if found is None or not Path(found).is_file():
        raise ConfigError(
            f"--index {args.index}: its corpus was {found}, where none is now. Give it with "
            "--corpus."
        )
    return Path(found)


def _shown(path: Path) -> Iterator[Passage]:
    """The passages of a corpus; what share is read stands on the terminal."""
    from rlflow_environments.common.progress import ProgressLine
    from rlflow_environments.retrieval.corpus import Corpus

    progress, corpus = ProgressLine(sys.stderr), Corpus(path)
    for row, passage in enumerate(corpus):
        if row % REPORT_ROWS == 0:
            progress("reading the corpus", row, len(corpus))
        yield passage
    progress("reading the corpus", len(corpus), len(corpus))
