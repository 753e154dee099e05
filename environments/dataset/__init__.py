"""Prompts out of files and a reward function, as an environment without a class."""

from rlflow_environments.dataset.environment import DatasetEnvironment

__all__ = ["DatasetEnvironment"]
