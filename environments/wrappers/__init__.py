"""Environments over any other environment, which change its rewards; see
docs/reward_wrappers.md."""
