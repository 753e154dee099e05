"""The first call of a part, on a made-up batch: it takes and returns what its kind does, or a line
says what it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.base import as_part
from rlflow.algorithms.trial.sample_step import sample_batch, sample_output
from rlflow.components import (
    ADVANTAGE,
    AGGREGATE,
    CURATOR,
    FILTER,
    LOSS,
    TRANSFORM,
    Kind,
)
from rlflow.errors import ConfigError, RLFlowError, described, raised_at
from rlflow.types import Batch, Group, as_loss

FORMS = {
    LOSS: "a loss takes (output: PolicyOutput, batch: Batch) and returns "
    "((B, T) losses, {name: metric}), metrics (B, T) too: it does not sum, Batch.weights does",
    ADVANTAGE: "an advantage takes (batch: Batch) and returns (B,) or (B, T) advantages, or "
    "(advantages, returns), (B, T) both",
    AGGREGATE: "an aggregate takes (batch: Batch) and returns (B, T) weights",
    TRANSFORM: "a transform takes (batch: Batch) and returns a Batch (batch.replace)",
    FILTER: "a filter takes (groups: list[Group]) and returns a list[Group]",
}


def make_part(kind: Kind, component: Any, where: str, **offered: Any) -> Any:
    """The part that a component names. Raises ConfigError where it cannot be made."""
    made = kind.build(component, where, **offered)
    if kind in (AGGREGATE, CURATOR):
        return made
    return as_loss(made) if kind is LOSS else as_part(made)


def check_first_call(kind: Kind, component: Any, where: str, **offered: Any) -> None:
    """Calls a part of a file or of another module once; those with a name of their own are known.

    Raises ConfigError where it cannot be made, raises, or returns what its kind does not. What the
    made-up batch lacks (`Batch.require`) the run's may have: no problem."""
    name = kind.component(component, where)["name"]
    if kind.locate(name, where) != name:
        return
    part = make_part(kind, component, where, **offered)
    needs: frozenset[str] = getattr(part, "needs", frozenset())
    batch = sample_batch(needs)
    given = (sample_output(batch, needs), batch) if kind is LOSS else (batch,)
    with torch.set_grad_enabled(kind is LOSS):
        _, problem = call_part(kind, part, *given, may_lack=True)
    if kind in (ADVANTAGE, TRANSFORM):
        part.close()
    if problem:
        raise ConfigError(f"{where} '{name}': {problem}.")


def call_part(kind: Kind, part: Any, *given: Any, may_lack: bool = False) -> tuple[Any, str]:
    """(what the part returns, a line on what is wrong with the call or with that, else "").
    may_lack: an RLFlowError is nothing wrong."""
    try:
        found = part(*given)
    except ConfigError:
        raise
    except RLFlowError as error:
        return None, "" if may_lack else f"the {kind.name} {raised(error)}"
    except Exception as error:  # noqa: BLE001 -- others' code: whatever it raises is told
        return None, f"the {kind.name} {raised(error)}; {FORMS[kind]}"
    if _fits(kind, found, given[-1]):
        return found, ""
    batch = given[-1]
    sizes = f", where (B, T) is {_shape(batch.tokens)}" if isinstance(batch, Batch) else ""
    return found, f"the {kind.name} returned {_words(found)}{sizes}; {FORMS[kind]}"


def raised(error: BaseException) -> str:
    """`raised TypeError: text (file:line in function)`."""
    place = raised_at(error)
    return f"raised {described(error)}{f' ({place})' if place else ''}"


def _fits(kind: Kind, found: Any, given: Any) -> bool:
    """Whether types and shapes are those of the kind's form."""
    if kind is FILTER:
        return isinstance(found, list) and all(isinstance(one, Group) for one in found)
    if kind is TRANSFORM:
        return isinstance(found, Batch)
    shapes = [_shape(given.tokens)]
    values = [found]
    if kind is LOSS:
        pair = isinstance(found, tuple) and len(found) == 2
        if not (pair and isinstance(found[1], Mapping)):
            return False
        values = [found[0], *found[1].values()]
    elif kind is ADVANTAGE and isinstance(found, tuple):
        values = list(found) if len(found) == 2 else [None]
    elif kind is ADVANTAGE:
        shapes.append(_shape(given.lengths))
    return all(_shape(value) in shapes for value in values)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _words(value: Any) -> str:
    """What a value is, for people."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {_shape(value)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_words, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_words(one)}' for name, one in value.items())}}}"
    return "None" if value is None else f"a {type(value).__name__}"
