"""Tests any retrieval server against the wire format that clients of the field rely on.

  rlflow search check http://localhost:8000
  rlflow search check 10.0.0.7:5005 --query "who wrote the sea charts"

Prints one line per check and ends with 0 if every required one passes, else with 1. Nothing on the server is changed.
"""

from __future__ import annotations

import argparse
import sys

from rlflow.errors import MissingPackageError, RLFlowError

MARKS = {"pass": "ok", "fail": "FAIL", "missing": "none", "skip": "skip"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and with which queries."""
    parser.add_argument("url", metavar="URL", help="http://host:port or host:port")
    parser.add_argument("--query", action="append", metavar="TEXT", help="a query that finds something there (repeatable)")
    parser.add_argument("--timeout-s", type=float, default=60.0, metavar="S", help="of one request (default 60)")


def run(args: argparse.Namespace) -> int:
    """Checks and prints; returns 0 or 1."""
    try:
        from rlflow_environments.retrieval.conformance.probe import Broken
        from rlflow_environments.retrieval.conformance.runner import SEEDS, Verdict, check_server
    except ImportError as problem:
        raise MissingPackageError(
            f"rlflow search check: the package {problem.name} is not installed. Install it with: pip install 'rlflow[search]'"
        ) from None

    def show(verdict: Verdict) -> None:
        print(f"{MARKS[verdict.outcome]:>4}  {verdict.check.name:<18}  {verdict.check.claim}", flush=True)
        if verdict.reason:
            print(f"{'':26}{verdict.reason}")

    try:
        verdicts = check_server(args.url, seeds=args.query or SEEDS, timeout_s=args.timeout_s, on_verdict=show)
    except Broken as problem:
        print(f"rlflow: {args.url} does not answer a search: {problem}", file=sys.stderr)
        return RLFlowError.exit_code if "ClientConnector" in str(problem) else 1
    failed = [verdict.check.name for verdict in verdicts if verdict.outcome == "fail"]
    required = sum(verdict.check.required and verdict.outcome != "skip" for verdict in verdicts)
    print(f"{required - len(failed)} of {required} required checks pass" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0
