"""Environments of the package verifiers: their own prompts, ends and rubrics. Only text passes, so
that the tokens stay those that the policy sampled.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlflow.environment import Environment
from rlflow.errors import ConfigError, described, needing
from rlflow.values import PositiveFloat
from rlflow_environments.adapters.verifiers.shared import METRICS


def make(
    environment: str,
    options: dict[str, Any] | None = None,
    harness: str | None = None,
    timeout_s: PositiveFloat = 300.0,
) -> Environment:
    """An environment of verifiers by the name of its package, made with the options.

    harness: the program that plays a taskset; none where its tasks are a prompt and one response,
    else `null`, which calls the taskset's tools. timeout_s: between two of its requests. Raises
    ConfigError for an environment that does not map, MissingPackageError."""
    with needing("environment verifiers", "pip install verifiers"):
        library = importlib.import_module("verifiers")
    if not hasattr(library, "load_environment"):
        from rlflow_environments.adapters.verifiers.harness import VerifiersHarness
        from rlflow_environments.adapters.verifiers.tasksets import LoadedTaskset, VerifiersTaskset

        loaded = LoadedTaskset.load(environment, options or {})
        if harness is None and not loaded.needs_harness():
            return VerifiersTaskset(loaded)
        return VerifiersHarness(loaded, harness or "null", timeout_s)
    if harness is not None:
        raise ConfigError(
            f"environment.harness: expected none, found '{harness}': verifiers before 0.4 has no "
            "harnesses. Leave it out, or pip install 'verifiers>=0.4'."
        )
    with _own_signal_handlers():
        try:
            made = library.load_environment(environment, **(options or {}))
        except Exception as problem:  # noqa: BLE001 -- theirs may raise anything
            raise ConfigError(
                f"environment.environment: '{environment}' cannot be made: {described(problem)}"
            ) from None
    from rlflow_environments.adapters.verifiers.classic import VerifiersEnvironment

    return VerifiersEnvironment(library, environment, made)


make.shorthand, make.metrics = "environment", METRICS  # type: ignore[attr-defined]


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keeps the handlers of Ctrl-C and SIGTERM: making an environment of theirs replaces both."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
