"""The states of a run's parts, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """A part of a run that remembers something from step to step. A state is made of what JSON can say."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def states(parts: Mapping[str, object]) -> dict[str, Any]:
    """{name: state} of the parts; empty for one that remembers nothing."""
    return {name: part.state_dict() if isinstance(part, Stateful) else {} for name, part in parts.items()}


def load_states(parts: Mapping[str, object], saved: Mapping[str, Any]) -> None:
    """Restores `states`. A part that remembered nothing when they were saved begins anew."""
    for name, part in parts.items():
        if saved[name] and isinstance(part, Stateful):
            part.load_state_dict(saved[name])
