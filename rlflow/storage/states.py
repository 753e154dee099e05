"""The states of a run's parts, as a checkpoint holds them: what JSON can say in state.json, tensors
and bytes in a file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TENSOR = "__tensor__"
"""Key of the mapping that stands in state.json in a tensor's place: {TENSOR: its name in the
tensors' file}."""
BYTES = "__bytes__"
"""The same for bytes."""


def states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """{name: state} of the parts of a run; empty for one that has no `state_dict`. A state is made
    of what JSON can say, of tensors and of bytes."""
    return {
        name: part.state_dict() if hasattr(part, "state_dict") else {}
        for name, part in parts.items()
    }


def load_states(parts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Restores `states`. A part that remembered nothing when they were saved begins anew."""
    for name, part in parts.items():
        if saved[name] and hasattr(part, "load_state_dict"):
            part.load_state_dict(saved[name])


def take_out(state: Any, tensors: dict[str, Tensor]) -> Any:
    """The state with its tensors and bytes exchanged for names, and copies of them in `tensors`."""
    import numpy
    import torch  # not with the module: every command reads run directories, few need tensors

    name = str(len(tensors))
    if isinstance(state, torch.Tensor):
        tensors[name] = state.detach().cpu().clone().contiguous()
        return {TENSOR: name}
    if isinstance(state, bytes):
        tensors[name] = torch.from_numpy(numpy.frombuffer(state, numpy.uint8).copy())
        return {BYTES: name}
    if isinstance(state, Mapping):
        return {key: take_out(value, tensors) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [take_out(value, tensors) for value in state]
    return state


def put_back(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `take_out`. Raises KeyError for a tensor that is not there."""
    if isinstance(state, Mapping):
        if set(state) == {TENSOR}:
            return tensors[state[TENSOR]]
        if set(state) == {BYTES}:
            return tensors[state[BYTES]].numpy().tobytes()
        return {key: put_back(value, tensors) for key, value in state.items()}
    return [put_back(value, tensors) for value in state] if isinstance(state, list) else state
