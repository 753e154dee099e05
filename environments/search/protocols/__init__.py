"""Agent protocols by name: how the policy asks for searches, how results are shown, and when an
episode ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.components import Kind
from rlflow.errors import ConfigError, did_you_mean
from rlflow_environments.search.protocols.asearcher import ASearcher
from rlflow_environments.search.protocols.base import (
    TOOLS,
    Call,
    Page,
    Protocol,
    Reading,
    Result,
    Shown,
)
from rlflow_environments.search.protocols.native import Native
from rlflow_environments.search.protocols.searchr1 import RLinf, SearchR1, SkyRL

PROTOCOLS: dict[str, type[Protocol]] = {
    "searchr1": SearchR1,
    "rlinf": RLinf,
    "asearcher": ASearcher,
    "skyrl": SkyRL,
    "native": Native,
}

PROTOCOL = Kind("protocol", __name__, reserved=("tools", "max_document_characters"))
"""A subclass of `Protocol`."""
BUILT_IN = {
    name: f"{protocol.__module__}:{protocol.__name__}" for name, protocol in PROTOCOLS.items()
}
"""Name -> `module:Name`."""

__all__ = ["PROTOCOLS", "Call", "Page", "Protocol", "Reading", "Result", "Shown", "make_protocol"]


def make_protocol(
    component: str | Mapping[str, Any],
    tools: Sequence[str] | None = None,
    max_document_characters: int | None = None,
) -> Protocol:
    """The protocol of a name with its enabled tools (None: search). Raises ConfigError for an
    unknown name, and for a tool that the protocol does not have."""
    enabled = ["search"] if tools is None else list(tools)
    chosen = [tool for tool in TOOLS if tool in enabled]
    protocol, options = PROTOCOL.complete(
        component,
        "environment.protocol",
        tools=chosen,
        max_document_characters=max_document_characters,
    )
    has: Sequence[str] = getattr(protocol, "tools", ())
    for tool in enabled:
        if tool not in has:
            others = [name for name, other in PROTOCOLS.items() if tool in other.tools]
            hint = (
                f" Protocols with it: {', '.join(others)}."
                if others
                else did_you_mean(str(tool), has)
            )
            name = PROTOCOL.component(component)["name"]
            raise ConfigError(
                f"environment.tools: the protocol {name} has {', '.join(has)}, found "
                f"'{tool}'.{hint}"
            )
    if "search" not in enabled:
        raise ConfigError(
            "environment.tools: expected search among them: without it nothing can be looked up."
        )
    return protocol(**options)
