"""`python -m rlflow ...`: the same as the command `rlflow`."""

import sys

from rlflow.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
