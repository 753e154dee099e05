"""`python tools/ckpt_convert` and `python -m tools.ckpt_convert`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not this folder: its modules belong to a package.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tools.ckpt_convert.command import main

    sys.exit(main())
