"""Options of a component against the signatures that take them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlflow.errors import ConfigError, did_you_mean


def option_names(schemas: Sequence[Callable[..., Any]]) -> list[str]:
    """The keyword-only parameters of the signatures, in order."""
    parameters = [parameter for schema in schemas for parameter in inspect.signature(schema).parameters.values()]
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def check_options(where: str, options: Mapping[str, Any], schemas: Sequence[Callable[..., Any]]) -> None:
    """Raises ConfigError for an option that no signature has."""
    known = option_names(schemas)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{where}: unknown option '{option}'; known: {', '.join(known)}.{did_you_mean(option, known)}"
            )
