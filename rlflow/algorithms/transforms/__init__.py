"""Transforms: Batch -> Batch over a whole mini-batch, before its update. One small file per method."""

from __future__ import annotations

BUILT_IN = {
    "duration_weight": "rlflow.algorithms.transforms.row_weights:duration_weight",
    "size_weight": "rlflow.algorithms.transforms.row_weights:size_weight",
    "kept_mean": "rlflow.algorithms.transforms.kept_mean:kept_mean",
}
"""Name -> `module:Name`."""
