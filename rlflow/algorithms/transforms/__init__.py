"""Transforms: Batch -> Batch over a whole mini-batch, before its update. One small file per method."""

from __future__ import annotations

BUILT_IN: dict[str, str] = {}
"""Name -> `module:Name`."""
