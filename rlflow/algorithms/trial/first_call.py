"""The first call of a part, on a made-up batch: it takes and returns what its kind does, or a line
says what it found."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.base import as_part
from rlflow.algorithms.trial.sample_step import FIELDS, sample_batch, sample_output
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
from rlflow.types import Batch, FunctionLoss, Group, Loss, PolicyOutput, as_loss

logger = logging.getLogger(__name__)

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
    if kind is LOSS:
        # Of what the made-up batch lacks; or others' code, which the run itself tells of
        with contextlib.suppress(Exception):
            odd, _ = sign_problem(part)
            if odd:
                logger.warning("%s '%s': %s", where, name, odd)


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
        lacking = _lacking(part, *given) if "NoneType" in str(error) else ""
        return None, f"the {kind.name} {lacking or f'{raised(error)}; {FORMS[kind]}'}"
    if _fits(kind, found, given[-1]):
        return found, _detached(found[0]) if kind is LOSS and torch.is_grad_enabled() else ""
    batch = given[-1]
    sizes = f", where (B, T) is {_shape(batch.tokens)}" if isinstance(batch, Batch) else ""
    return found, f"the {kind.name} returned {_words(found)}{sizes}; {FORMS[kind]}"


def _detached(loss: Tensor) -> str:
    """A line on a loss through which no gradient can go, else ""."""
    if loss.requires_grad:
        return ""
    return (
        "the loss has no gradient: it is cut off from output.logprobs. Look for .detach(), "
        ".item(), .numpy(), torch.no_grad, or batch.logprobs where output.logprobs is meant"
    )


def _lacking(part: Any, *given: Any) -> str:
    """A line on what a part reads that is there only for a part whose `needs` name it, else ""."""
    read: dict[str, str] = {}
    with contextlib.suppress(Exception):  # the same one again
        part(*(_reading(value, read) for value in given))
    if not read:
        return ""
    names = ", ".join(repr(name) for name in sorted(set(read.values())))
    how = f"write needs = frozenset({{{names}}}) into the class"
    if isinstance(part, FunctionLoss):
        how = f"derive a class from rlflow.types.Loss with needs = frozenset({{{names}}})"
    return f"reads {', '.join(read)}, which is None where `needs` does not name it: {how}"


def _reading(value: Any, read: dict[str, str]) -> Any:
    """The batch or output, which notes what is None and would be filled by a need: {what: need}."""
    if not isinstance(value, Batch | PolicyOutput):
        return value
    owner = "batch" if isinstance(value, Batch) else "output"
    needs = {field: need for need, field in FIELDS.items()} if owner == "batch" else {}
    needs |= {"values": "values", "entropy": "entropy", "top_logprobs": "top_logprobs"}

    class NotesReads(type(value)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if found is None and name in needs:
                read[f"{owner}.{name}"] = needs[name]
            return found

    return NotesReads(**vars(value))


LOWERED = "the gradient lowers tokens of positive advantage: is a minus missing?"


def sign_problem(loss: Loss) -> tuple[str, bool]:
    """(what is odd about how a loss follows the advantages, else "", whether it does so of all
    tokens).

    On the policy's own samples, where no ratio is clipped, a loss that goes by advantages raises
    the tokens of positive ones and lowers those of negative ones, next to what it does without. A
    loss that asks for no advantages is none of them."""
    batch = sample_batch(loss.needs)
    fields = [name for name in FIELDS.values() if name != "current_entropy"]
    there = [name for name in fields if getattr(batch, name) is not None]
    batch = batch.replace(**dict.fromkeys(there, batch.logprobs))
    output = sample_output(batch, loss.needs)
    output = dataclasses.replace(output, logprobs=batch.logprobs.clone().requires_grad_())
    mask = batch.loss_mask
    pulls = []
    for advantage in (1.0, 0.0, -1.0):
        values, _ = loss(output, batch.replace(advantages=mask * advantage))
        total = (batch.weights * values).sum()
        found = torch.autograd.grad(total, output.logprobs, allow_unused=True)[0]
        pulls.append(torch.zeros_like(output.logprobs) if found is None else found)
    up, none, down = pulls
    turns = torch.cat([(up - none)[mask], (none - down)[mask]])
    turns = turns[turns.abs() > 1e-9]
    wrong = int((turns > 0).sum())
    if wrong == 0:
        return "", False
    if wrong == len(turns):
        return LOWERED, True
    return f"of {wrong} of {len(turns)} tokens: {LOWERED}", False


def raised(error: BaseException, *besides: str) -> str:
    """`raised TypeError: text (file:line in function)`; besides: as for `raised_at`."""
    place = raised_at(error, *besides)
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
