"""Filters: list[Group] -> list[Group], between rollout and batch. One small file per method."""

from __future__ import annotations

BUILT_IN: dict[str, str] = {}
"""Name -> `module:Name`."""
