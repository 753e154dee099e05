"""Retrievers by name, a file each: the file's `RETRIEVER` is a class or a function of `corpus`, the
passages, and options."""

from __future__ import annotations

from rlflow.components import by_file

BUILT_IN = by_file(__name__, __path__, "RETRIEVER")
"""Name -> `module:Name`."""
