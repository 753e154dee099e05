"""Every error that rlflow raises on purpose, and the spelling suggestions that they carry."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RLFlowError(Exception):
    """A problem that the user can mend. The text says what, where, expected, found and how to fix it, in one line."""


class ConfigError(RLFlowError):
    """A configuration value is missing, misspelled, of the wrong type, or contradicts another."""


class DataError(RLFlowError):
    """A data file is missing or holds rows that cannot be read."""


class ModelError(RLFlowError):
    """A model directory cannot be loaded: unknown family, missing file, shapes that do not fit the layout."""


class CheckpointError(RLFlowError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class EnvironmentContractError(RLFlowError):
    """An environment broke the contract of `rlflow.Environment`, or what it said cannot be tokenized exactly."""


class RolloutError(RLFlowError):
    """Too many episodes were aborted, or an engine failed."""


class MissingPackageError(RLFlowError):
    """An optional package is needed for what was asked."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `" Did you mean 'x'?"` for the closest known word, or `""`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
