"""The states of a run's parts, as a checkpoint holds them: what JSON can say in state.json, tensors
and bytes in a file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError, ConfigError
from rlflow.values import LARGEST, show

if TYPE_CHECKING:
    from torch import Tensor

TENSOR = "__tensor__"
"""Key of the mapping that stands in state.json in a tensor's place: {TENSOR: its name in the
tensors' file}."""
BYTES = "__bytes__"
"""The same for bytes."""
MISREAD = (
    *(AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError),
    ConfigError,
)
"""What a part raises that reads a state of another form."""


def states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """{name: state} of the parts of a run; empty for one that has no `state_dict`. A state is made
    of what JSON can say, of tensors and of bytes."""
    return {
        name: part.state_dict() if hasattr(part, "state_dict") else {}
        for name, part in parts.items()
    }


def load_states(parts: Mapping[str, Any], saved: Mapping[str, Any], where: object = "") -> None:
    """Restores `states`. A part that remembered nothing when they were saved begins anew.

    where: the file that they are from. Raises CheckpointError for a state that is not of its
    part's form."""
    for name, part in parts.items():
        place = f"{where}: {name}" if where else name
        check_alike(saved[name], {}, place)
        if saved[name] and hasattr(part, "load_state_dict"):
            load_state(part, saved[name], place)


def load_state(part: Any, state: Mapping[str, Any], where: str) -> None:
    """Restores one part. Raises CheckpointError for a state that is not of the part's form."""
    check_alike(state, part.state_dict(), where)
    kind = type(part).__name__
    try:
        part.load_state_dict(state)
    except CheckpointError:
        raise
    except MISREAD as problem:
        reason = f"no {problem}" if isinstance(problem, KeyError) else str(problem)[:200]
        raise CheckpointError(
            f"{where}: expected the state of {kind}, found another one's ({reason}); resume with "
            "the configuration that the run was started with, or begin anew with --overwrite or "
            "another run.name."
        ) from problem


def check_alike(state: Any, like: Any, where: str) -> None:
    """Raises CheckpointError where a state holds, under a name that `like` has too, a value of
    another kind. like: the state of the part as it was made; None and empty collections in it say
    nothing of what comes there."""
    if isinstance(like, Mapping):
        if not isinstance(state, Mapping):
            raise _unlike(state, "a mapping with keys", where)
        for name, value in state.items():
            check_alike(value, like.get(name), f"{where}.{name}")
        return
    if isinstance(state, Mapping):
        for name, value in state.items():
            check_alike(value, None, f"{where}.{name}")
    elif isinstance(state, (list, tuple)):
        for place, value in enumerate(state):
            check_alike(value, None, f"{where}[{place}]")
    elif isinstance(state, int) and abs(state) > LARGEST:
        raise CheckpointError(
            f"{where}: expected at most {LARGEST}, found a number of {state.bit_length()} bits."
        )
    wanted, found = _kind(like), _kind(state)
    # A number may have become a tensor, or null, which stands for one that is not finite
    if wanted and found and wanted != found:
        raise _unlike(state, wanted, where)


def _kind(value: Any) -> str:
    """What JSON calls a value, in words; "" for nothing and for tensors and bytes."""
    kinds: tuple[tuple[Any, str], ...] = (
        (bool, "true or false"),
        ((int, float), "a number"),
        (str, "text"),
        ((list, tuple), "a list"),
        (Mapping, "a mapping with keys"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), "")


def _unlike(state: Any, expected: str, where: str) -> CheckpointError:
    return CheckpointError(f"{where}: expected {expected}, found {show(state)}.")


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
