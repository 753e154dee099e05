"""Advantages: how much better an attempt was than its group. One small file per method."""

from __future__ import annotations

BUILT_IN = {"grpo": "rlflow.algorithms.advantages.grpo:grpo"}
"""Name -> `module:Name`."""
