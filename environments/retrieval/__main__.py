"""`python -m rlflow_environments.search ...`: the same commands as `rlflow search ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlflow.errors import RLFlowError
from rlflow_environments.retrieval.commands import FORMATTER, add_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or the error's after an error that it prints in one line."""
    parser = argparse.ArgumentParser(prog="rlflow search", description=__doc__, formatter_class=FORMATTER)
    add_commands(parser)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args) or 0)
    except RLFlowError as problem:
        print(f"rlflow: {type(problem).__name__}: {problem}", file=sys.stderr)
        return problem.exit_code


if __name__ == "__main__":
    sys.exit(main())
