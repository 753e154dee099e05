"""`python -m rlflow ...`: the same as the command `rlflow`."""

import os
import sys

# Of -m: a module beside a downloaded model must not stand in for an installed one
if sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from rlflow.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
