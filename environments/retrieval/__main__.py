"""`python -m rlflow_environments.retrieval ...`: build, serve and try indices."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

if sys.path[:1] == [os.getcwd()]:  # see rlflow/__main__.py
    del sys.path[0]

from rlflow_environments.common.commands import run_group
from rlflow_environments.retrieval.commands import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run_group(
        "python -m rlflow_environments.retrieval",
        "Build, serve and try indices.",
        COMMANDS,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
