"""`python -m rlflow_environments.search ...`: the same commands as `rlflow search ...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

if sys.path[:1] == [os.getcwd()]:  # see rlflow/__main__.py
    del sys.path[0]

from rlflow_environments.common.commands import run_group
from rlflow_environments.search.commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run_group("rlflow search", "Retrieval for the search environment.", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
