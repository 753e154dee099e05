"""Engines by name, a file each: the file's `ENGINE` is a class, or a function that makes one engine
or a list of them."""

from __future__ import annotations

from rlflow.components import by_file

BUILT_IN = by_file(__name__, __path__, "ENGINE")
"""Name -> `module:Name`."""
