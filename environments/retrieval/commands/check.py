"""Tests any retrieval server against the wire format that clients of the field rely on, or an index
folder against its hashes.

  rlflow search check http://localhost:8000
  rlflow search check 10.0.0.7:5005 --query "who wrote the sea charts"
  rlflow search check indices/wiki --deep

Prints one line per check and ends with 0 if every required one passes, else with 1. Nothing on the
server is changed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from rlflow.errors import DataError, RLFlowError, install_command, needing
from rlflow_environments.common.commands import add_option
from rlflow_environments.retrieval.indices.folder import check_folder, read_meta
from rlflow_environments.retrieval.records import file_digest

MARKS = {"pass": "ok", "fail": "FAIL", "missing": "none", "skip": "skip"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and with which queries."""
    where = "http://host:port or host:port; or an index folder"
    parser.add_argument("url", metavar="URL", help=where)
    add = partial(add_option, parser)
    add("--deep", "of an index folder: read every byte of index and corpus")
    query = {"metavar": "TEXT", "help": "a query that finds something there (repeatable)"}
    parser.add_argument("--query", action="append", **query)
    add("--timeout-s S", "of one request", 60.0)


def run(args: argparse.Namespace) -> int:
    """Checks and prints; returns 0 or 1."""
    if Path(args.url).expanduser().is_dir():
        return _check_folder(Path(args.url).expanduser(), args.deep)
    with needing("rlflow search check", install_command("search")):
        from rlflow_environments.retrieval.conformance import SEEDS, Broken, Verdict, check_server

    def show(verdict: Verdict) -> None:
        print(
            f"{MARKS[verdict.outcome]:>4}  {verdict.check.name:<18}  {verdict.check.claim}",
            flush=True,
        )
        if verdict.reason:
            print(f"{'':26}{verdict.reason}")

    try:
        verdicts = check_server(
            args.url, seeds=args.query or SEEDS, timeout_s=args.timeout_s, on_verdict=show
        )
    except Broken as problem:
        print(f"rlflow: {args.url} does not answer a search: {problem}", file=sys.stderr)
        return RLFlowError.exit_code if "no connection to" in str(problem) else 1
    failed = [verdict.check.name for verdict in verdicts if verdict.outcome == "fail"]
    required = sum(verdict.check.required and verdict.outcome != "skip" for verdict in verdicts)
    print(
        f"{required - len(failed)} of {required} required checks pass"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def _check_folder(folder: Path, deep: bool) -> int:
    """Raises DataError for an index, or a corpus at the place it was built from, that is not what
    the build saw."""
    meta = read_meta(folder)
    check_folder(folder, meta, deep=deep)
    corpus = Path(meta.corpus["path"])
    checked = [f"{len(meta.files or {})} files of {folder}"]
    if corpus.is_file():
        key = "sha256" if deep else "bytes"
        if (file_digest(corpus) if deep else corpus.stat().st_size) != meta.corpus[key]:
            raise DataError(
                f"{corpus}: is not the corpus that {folder} was built on ({key} differs). Build "
                "the index again."
            )
        checked.append(str(corpus))
    how = "every byte" if deep else "by samples; --deep reads every byte"
    print(f"as built ({how}): {', '.join(checked)}")
    return 0
