"""The kit for authors: environments, parts of algorithms and tiny policies, written, checked and
played (`rlflow env`, `rlflow algorithm`)."""

import os
from pathlib import Path

OURS = f"{Path(__file__).parent}{os.sep}"
"""Where code that raises is not the author's, for `raised_at`."""
