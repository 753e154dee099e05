"""Curators: which tasks are asked next, and how often. One small file per method."""

from __future__ import annotations

BUILT_IN: dict[str, str] = {}
"""Name -> `module:Name`."""
