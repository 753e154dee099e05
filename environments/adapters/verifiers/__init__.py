"""Tasksets of the package verifiers: their own prompts, ends and rewards. Only text passes, so that
the tokens stay those that the policy sampled.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import MissingPackageError, needing
from rlflow.values import PositiveFloat
from rlflow_environments.adapters.verifiers.tasksets import (
    METRICS,
    LoadedTaskset,
    VerifiersTaskset,
)

INSTALL = "pip install 'verifiers>=0.4'"


def make(
    environment: str,
    options: dict[str, Any] | None = None,
    harness: str | None = None,
    timeout_s: PositiveFloat = 300.0,
) -> Environment:
    """A taskset by the name of its package, made with the options.

    harness: the program that plays it; none where its tasks are a prompt and one response, else
    `null`, which calls the taskset's tools. timeout_s: between two of its requests. Raises
    ConfigError for a taskset that does not map, MissingPackageError."""
    with needing("environment verifiers", INSTALL):
        _check_version(metadata.version("verifiers"))
        importlib.import_module("verifiers")
    loaded = LoadedTaskset.load(environment, options or {})
    if harness is None and not loaded.needs_harness():
        return VerifiersTaskset(loaded)
    from rlflow_environments.adapters.verifiers.harness import VerifiersHarness

    return VerifiersHarness(loaded, harness or "null", timeout_s)


make.shorthand, make.metrics = "environment", METRICS  # type: ignore[attr-defined]


def _check_version(version: str) -> None:
    """Raises MissingPackageError for a verifiers before 0.4, which has no tasksets of this kind."""
    if version.startswith(("0.0.", "0.1.", "0.2.", "0.3.")):
        raise MissingPackageError(
            f"environment verifiers: expected verifiers 0.4 or later, found {version}: {INSTALL}"
        )
