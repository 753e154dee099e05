"""Filters: list[Group] -> list[Group], between rollout and batch. One small file per method."""

BUILT_IN = {
    "dynamic_sampling": "rlflow.algorithms.filters.dynamic_sampling:DynamicSampling",
    "zero_advantage": "rlflow.algorithms.filters.zero_advantage:ZeroAdvantage",
    "overlong_filter": "rlflow.algorithms.filters.overlong_filter:OverlongFilter",
    "success_pool": "rlflow.algorithms.filters.success_pool:SuccessPool",
    "replay": "rlflow.algorithms.filters.earlier_groups:Replay",
}
"""Name -> `module:Name`."""
