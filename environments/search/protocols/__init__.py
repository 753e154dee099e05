"""Agent protocols by name: how the policy asks for searches, how results are shown, and when an episode ends."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.errors import ConfigError, did_you_mean
from rlflow_environments.search.protocols.asearcher import ASearcher
from rlflow_environments.search.protocols.base import TOOLS, Call, Page, Protocol, Reading, Result, Shown
from rlflow_environments.search.protocols.native import Native
from rlflow_environments.search.protocols.searchr1 import RLinf, SearchR1, SkyRL

PROTOCOLS: dict[str, type[Protocol]] = {
    "searchr1": SearchR1,
    "rlinf": RLinf,
    "asearcher": ASearcher,
    "skyrl": SkyRL,
    "native": Native,
}

__all__ = ["PROTOCOLS", "Call", "Page", "Protocol", "Reading", "Result", "Shown", "make_protocol"]


def make_protocol(
    name: str, tools: Sequence[str] | None = None, max_document_characters: int | None = None
) -> Protocol:
    """The protocol of a name with its enabled tools (None: search). Raises ConfigError for an unknown name, and for a tool that
    the protocol does not have."""
    if name not in PROTOCOLS:
        raise ConfigError(
            f"environment.protocol: expected one of {', '.join(PROTOCOLS)}, found '{name}'.{did_you_mean(name, PROTOCOLS)}"
        )
    protocol = PROTOCOLS[name]
    enabled = ["search"] if tools is None else list(tools)
    for tool in enabled:
        if tool not in protocol.tools:
            others = [other for other, one in PROTOCOLS.items() if tool in one.tools]
            hint = f" Protocols with it: {', '.join(others)}." if others else did_you_mean(str(tool), protocol.tools)
            raise ConfigError(
                f"environment.tools: the protocol {name} has {', '.join(protocol.tools)}, found '{tool}'.{hint}"
            )
    if "search" not in enabled:
        raise ConfigError("environment.tools: expected search among them: without it nothing can be looked up.")
    return protocol([tool for tool in TOOLS if tool in enabled], max_document_characters)
