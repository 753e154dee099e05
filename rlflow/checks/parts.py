"""The contract of an algorithm's part, as a program: a small made-up batch, turned and stretched, looks for what would break
a training run."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.base import Advantage, Curator, Filter, Transform, as_part
from rlflow.checks.environments import ContractReport
from rlflow.checks.sample_step import (
    FIELDS,
    disturbed,
    map_output,
    sample_batch,
    sample_groups,
    sample_output,
    sample_tasks,
    sample_views,
)
from rlflow.components import ADVANTAGE, AGGREGATE, CURATOR, FILTER, LOSS, PARTS, TRANSFORM, Kind
from rlflow.errors import ConfigError
from rlflow.storage.states import put_back, take_out
from rlflow.types import Batch, Group, Loss, PolicyOutput, Task, as_loss

_CLASSES = {Advantage: ADVANTAGE, Loss: LOSS, Transform: TRANSFORM, Filter: FILTER, Curator: CURATOR}
_KEPT = ("tokens", "loss_mask", "logprobs", "lengths", "temperatures", "advantages")
TOLERANCE = 1e-5


def kind_of(name: str, kind: str | None = None) -> Kind:
    """The kind of a part: as given, or the one that knows its name, or by its base class, or by what its function takes and
    says that it returns. Raises ConfigError where that leaves several or none."""
    if kind is not None:
        return PARTS[kind]
    knowing = [known for known in PARTS.values() if name in known.names()]
    if len(knowing) == 1:
        return knowing[0]
    if knowing or ":" not in name:
        found = ", ".join(known.name for known in knowing) or "none"
        raise ConfigError(f"{name}: expected a name of one kind, or module:Name, or file.py:Name; kinds that know it: {found}. "
                          f"Say --kind {'|'.join(PARTS)}.")  # fmt: skip
    target = ADVANTAGE.resolve(name, "part")
    if isinstance(target, type):
        for base, found_kind in _CLASSES.items():
            if issubclass(target, base):
                return found_kind
    else:
        takes = [p for p in inspect.signature(target).parameters.values() if p.default is p.empty]
        returns = str(inspect.signature(target).return_annotation)
        if len(takes) == 2:
            return LOSS
        if "Batch" in returns:
            return TRANSFORM
        if "Group" in returns:
            return FILTER
        if "Tensor" in returns:  # as of an aggregate, which few write: --kind says so
            return ADVANTAGE
    raise ConfigError(f"{name}: its kind cannot be told from its signature; say --kind {'|'.join(PARTS)}.")


def check_algorithm(name: str, kind: str | None = None, **keywords: Any) -> ContractReport:
    """Holds a part against its contract. name: a known one, `module:Name` or `file.py:Name`; keywords: its own.

    Raises ConfigError where the part cannot be made."""
    found = kind_of(name, kind)
    make = functools.partial(_make, found, {"name": name, **keywords})
    audit = _Findings()
    with audit.expecting(f"making the {found.name}"):
        make()
    if not audit.report.problems:
        {LOSS: _check_loss, ADVANTAGE: _check_advantage, AGGREGATE: _check_aggregate, TRANSFORM: _check_transform,
         FILTER: _check_filter, CURATOR: _check_curator}[found](audit, make)  # fmt: skip
    audit.report.facts.insert(0, f"{found.name} '{name}'")
    return audit.report


class _Findings:
    def __init__(self) -> None:
        self.report = ContractReport()

    @contextmanager
    def expecting(self, what: str) -> Iterator[None]:
        """An exception in here is a problem, not the end of the check; what makes a ConfigError is the caller's keywords."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 -- a stranger's code: whatever it raises is what is reported
            self.problem(f"{what} raised {type(error).__name__}: {error}")

    def problem(self, text: str) -> None:
        if text not in self.report.problems:
            self.report.problems.append(text)

    def same(self, found: Tensor, expected: Tensor, what: str, mask: Tensor) -> None:
        """Equal on the mask up to rounding."""
        found, expected = found.detach().double(), expected.detach().double()
        scale = expected[mask].abs().clamp(min=1)
        worst = ((found[mask] - expected[mask]).abs() / scale).max() if bool(mask.any()) else torch.zeros(())
        if not bool(worst <= TOLERANCE):  # also where it is nan
            self.problem(f"{what}: values differ by up to {float(worst):.3g}")


def _make(kind: Kind, component: Mapping[str, Any]) -> Any:
    offered: dict[str, Any] = {}
    if kind in (AGGREGATE, TRANSFORM):
        offered = {"tokens": 64}
    elif kind is CURATOR:
        offered = {"tasks": sample_tasks(), "seed": 0}
    elif kind is FILTER:
        offered = {"seed": 0}
    made = kind.build(component, "part", **offered)
    return made if kind in (AGGREGATE, CURATOR) else as_loss(made) if kind is LOSS else as_part(made)


def _like(mask: Tensor, value: Tensor) -> Tensor:
    """(B, T) against (B, T) or (B, T, k)."""
    return mask if value.dim() == 2 else mask[..., None]


def _unchanged(audit: _Findings, batch: Batch, copy: Batch, names: tuple[str, ...], what: str) -> None:
    for name in names:
        if not torch.equal(getattr(batch, name), getattr(copy, name)):
            audit.problem(f"{what} changes batch.{name} in place: make a new tensor (batch.replace)")


# ------------------------------------------------------------------ kinds


def _check_loss(audit: _Findings, make: Callable[[], Any]) -> None:
    loss: Loss = make()
    batch = sample_batch(loss.needs)
    output, mask = sample_output(batch, loss.needs), batch.loss_mask
    copy = batch.map(torch.clone)
    result: list[Tensor] = []
    with audit.expecting("the loss"):
        values, metrics = loss(output, batch)
        for name, value in {"loss": values, **metrics}.items():
            if value.shape != batch.tokens.shape:
                audit.problem(f"'{name}' has shape {tuple(value.shape)}, expected (rows, tokens) = {tuple(batch.tokens.shape)}: "
                              "a loss does not sum, Batch.weights does")  # fmt: skip
            elif not bool(value.isfinite().all()):
                audit.problem(f"'{name}' is not finite everywhere")
            elif name != "loss" and value.requires_grad:
                audit.problem(f"metric '{name}' carries gradients: use .detach()")
        result.append(values)
    _unchanged(audit, batch, copy, (*_KEPT, "weights"), "the loss")
    if audit.report.problems or not result:
        return
    values = result[0]
    with audit.expecting("the gradient"):
        (gradient,) = torch.autograd.grad(
            (batch.weights * values).sum(), output.logprobs, retain_graph=True, allow_unused=True
        )
        if gradient is None or not bool(gradient.ne(0).any()):
            audit.report.notes.append("the loss has no gradient with respect to the log-probs")
        elif bool(gradient[~mask].ne(0).any()):
            audit.problem("the gradient reaches log-probs off the loss mask: mask before summing over a row")
    with audit.expecting("the loss with other numbers off the mask"):
        other = map_output(output, lambda value: torch.where(_like(mask, value), value, value - 5.0))
        stirred, _ = loss(other, disturbed(batch))
        audit.same(stirred, values, "other numbers off the loss mask change the loss on it", mask)
    for what, view, change, back in sample_views(batch):
        with audit.expecting(f"the loss with {what}"):
            again, _ = loss(map_output(output, change), view)
            audit.same(back(again), values, f"{what} change the loss", mask)
    with audit.expecting("the loss of single rows"):
        for row in range(len(batch)):
            part = batch.select([row])
            width = part.tokens.shape[1]
            alone, _ = loss(map_output(output, lambda value, row=row, width=width: value[[row], :width]), part)  # type: ignore[misc]
            audit.same(alone, values[[row], :width], "a row alone has another loss than in the batch, so micro-batches would "
                       "change it: what depends on other rows belongs in a transform", part.loss_mask)  # fmt: skip
    _check_extremes(audit, loss, batch, output)
    if loss.vanishes_at_zero_advantage:
        with audit.expecting("the loss at zero advantage"):
            flat, _ = loss(output, batch.replace(advantages=torch.zeros_like(batch.advantages)))
            (gradient,) = torch.autograd.grad((batch.weights * flat).sum(), output.logprobs)
            if bool(gradient.ne(0).any()):
                audit.problem("vanishes_at_zero_advantage is set, but there is a gradient where all advantages are 0")
    audit.report.facts.append(
        f"metrics: {', '.join(metrics) or 'none'}; needs: {', '.join(sorted(loss.needs)) or 'nothing more'}"
    )


def _check_extremes(audit: _Findings, loss: Loss, batch: Batch, output: PolicyOutput) -> None:
    for sign, what in ((1.0, "far more"), (-1.0, "far less")):
        with audit.expecting(f"the loss where the policy finds tokens {what} likely than the behaviour policy"):
            far = {name: torch.where(batch.loss_mask, min(0.0, -1e4 * sign), 0.0) for name in ("logprobs", *FIELDS.values())
                   if name != "current_entropy" and getattr(batch, name) is not None}  # fmt: skip
            mine = dataclasses.replace(
                output, logprobs=torch.where(batch.loss_mask, min(0.0, 1e4 * sign), 0.0).requires_grad_()
            )
            values, _ = loss(mine, batch.replace(**far))
            gradient = torch.autograd.grad((batch.weights * values).sum(), mine.logprobs, allow_unused=True)[0]
            if not bool(values.isfinite().all()) or (gradient is not None and not bool(gradient.isfinite().all())):
                audit.problem(
                    f"not finite at a log-ratio of {1e4 * sign:+g}: clamp it before exp (rlflow.algorithms.base.log_ratio)"
                )


def _check_advantage(audit: _Findings, make: Callable[[], Any]) -> None:
    needs = make().needs
    batch = sample_batch(needs)
    copy = batch.map(torch.clone)
    result: list[Tensor] = []
    with audit.expecting("the advantage"):
        result += _answers(make()(batch))
        for values in result:
            if values.shape != batch.tokens.shape and (len(result) > 1 or values.shape != batch.lengths.shape):
                audit.problem(f"has shape {tuple(values.shape)}, expected (rows, tokens), or (rows,) without returns")
            elif not bool(values.isfinite().all()):
                audit.problem("is not finite everywhere (a group of one attempt? equal rewards?)")
            elif values.requires_grad:
                audit.problem("carries gradients: use .detach()")
    _unchanged(audit, batch, copy, _KEPT, "the advantage")
    if audit.report.problems or not result:
        return
    for place, what in enumerate(("the advantage", "the returns")[: len(result)]):
        _check_views(audit, functools.partial(_answer_of, make, place), batch, result[place], what)
    _check_state(audit, make, lambda part: _answers(part(batch))[0])
    trained = result[0][batch.loss_mask] if result[0].dim() == 2 else result[0]
    audit.report.facts.append(f"from {float(trained.min()):.3g} to {float(trained.max()):.3g} on the made-up batch")


def _answers(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _answer_of(make: Callable[[], Any], place: int) -> Callable[[Batch], Tensor]:
    part = make()
    return lambda batch: _answers(part(batch))[place]


def _check_aggregate(audit: _Findings, make: Callable[[], Any]) -> None:
    batch = sample_batch(frozenset())
    result: list[Tensor] = []
    with audit.expecting("the aggregate"):
        weights = make()(batch)
        if weights.shape != batch.tokens.shape:
            audit.problem(f"has shape {tuple(weights.shape)}, expected (rows, tokens) = {tuple(batch.tokens.shape)}")
        elif not bool(weights.isfinite().all()):
            audit.problem("is not finite everywhere")
        elif bool(weights[~batch.loss_mask].ne(0).any()):
            audit.report.notes.append("gives weight to tokens that the policy did not sample")
        if not audit.report.problems:
            result.append(weights)
    if not result:
        return
    _check_views(audit, make, batch, result[0], "the aggregate")
    with audit.expecting("the aggregate of a batch without a trained token"):
        empty = make()(batch.replace(loss_mask=torch.zeros_like(batch.loss_mask)))
        if not bool(empty.isfinite().all()):
            audit.problem("is not finite where no token is trained")
    audit.report.facts.append(f"the weights sum to {float(result[0].sum()):.6g}")


def _check_transform(audit: _Findings, make: Callable[[], Any]) -> None:
    batch = sample_batch(make().needs)
    copy = batch.map(torch.clone)
    results: list[Batch] = []
    with audit.expecting("the transform"), torch.no_grad():
        made = make()(batch)
        if not isinstance(made, Batch):
            audit.problem(f"expected a Batch, found {type(made).__name__}: return batch.replace(...)")
        else:
            results.append(made)
    _unchanged(audit, batch, copy, (*_KEPT, "weights"), "the transform")
    if not results:
        return
    for name in ("tokens", "loss_mask", "logprobs", "lengths"):
        if not torch.equal(getattr(results[0], name), getattr(copy, name)):
            audit.problem(f"gives other batch.{name}: corrections go to coefficients, row weights to weights")
    for name in ("coefficients", "weights", "advantages", "token_rewards"):
        value = getattr(results[0], name)
        if value is not None and (value.shape != batch.tokens.shape or not bool(value.isfinite().all())):
            audit.problem(f"batch.{name}: expected (rows, tokens), finite everywhere")
    if audit.report.problems:
        return
    for name in ("coefficients", "weights", "rewards", "token_rewards", "ratio_low", "ratio_high"):
        if getattr(results[0], name) is not None:
            with torch.no_grad():
                _check_views(audit, functools.partial(_field_of, make, name), batch, getattr(results[0], name), f"batch.{name}")
    fields = ("coefficients", "weights", "advantages", "rewards", "ratio_low", "ratio_high")
    changed = [name for name in fields if not _equal(results[0], copy, name)]
    audit.report.facts.append(f"changes {', '.join(changed) or 'none'} of the made-up batch")
    if results[0].coefficients is not None:
        kept = results[0].coefficients[batch.loss_mask]
        audit.report.facts.append(
            f"coefficients: mean {float(kept.mean()):.3g}, {float((kept == 0).float().mean()):.0%} are 0"
        )


def _field_of(make: Callable[[], Any], name: str) -> Callable[[Batch], Tensor]:
    """What a new part makes of one field."""
    part = make()
    return lambda batch: getattr(part(batch), name)


def _equal(batch: Batch, other: Batch, name: str) -> bool:
    value, before = getattr(batch, name), getattr(other, name)
    return value is before or (value is not None and before is not None and torch.equal(value, before))


def _check_filter(audit: _Findings, make: Callable[[], Any]) -> None:
    groups = sample_groups()
    with audit.expecting("the filter"):
        kept = make()(list(groups))
        if not isinstance(kept, list) or not all(isinstance(group, Group) for group in kept):
            audit.problem(f"expected a list of Group, found {type(kept).__name__}")
            return
        audit.report.facts.append(f"lets {len(kept)} of {len(groups)} made-up groups through")
        if any(group.usable and any(each.group_stats is None for each in group.usable) for group in kept):
            audit.problem("gives attempts without group statistics: stamp them, the advantage needs them")
    with audit.expecting("the filter of no groups"):
        if make()([]) != []:
            audit.report.notes.append("gives groups where it gets none")
    _check_state(audit, make, lambda part: part(sample_groups()))


def _check_curator(audit: _Findings, make: Callable[[], Any]) -> None:
    with audit.expecting("the curator"):
        curator: Curator = make()
        first = [curator.take(4) for _ in range(4)]
        if not all(
            isinstance(tasks, list) and len(tasks) <= 4 and all(isinstance(t, Task) for t in tasks) for tasks in first
        ):
            audit.problem("take(count): expected a list of at most `count` tasks")
            return
        if not any(first):
            audit.problem("take(count) gives no task at all")
        if not math.isfinite(curator.epoch) or curator.epoch < 0:
            audit.problem(f"epoch: expected passes so far, found {curator.epoch}")
        again = make()
        if [[task.id for task in again.take(4)] for _ in range(4)] != [[task.id for task in tasks] for tasks in first]:
            audit.problem("the same seed gives another order: draw from a generator that is seeded with it")
        curator.observe(sample_groups())
    _check_state(audit, make, lambda part: [task.id for _ in range(3) for task in part.take(4)])


def _check_views(audit: _Findings, make: Callable[[], Any], batch: Batch, values: Tensor, what: str) -> None:
    mask = batch.loss_mask if values.dim() == 2 else torch.ones(len(batch), dtype=torch.bool)
    for done, view, _, back in sample_views(batch):
        with audit.expecting(f"{what} with {done}"):
            audit.same(back(make()(view)), values, f"{done} change {what}", mask)
    with audit.expecting(f"{what} with other numbers off the loss mask"):
        audit.same(make()(disturbed(batch)), values, f"other numbers off the loss mask change {what} on it", mask)


def _check_state(audit: _Findings, make: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    """A part that is restored in the middle goes on as the one that was saved."""
    with audit.expecting("state_dict and load_state_dict"):
        part, restored = make(), make()
        use(part)
        tensors: dict[str, Tensor] = {}
        text = json.dumps(take_out(part.state_dict(), tensors))
        restored.load_state_dict(put_back(json.loads(text), tensors))
        if not _alike(use(part), use(restored)):
            audit.problem(
                "a part restored from its state_dict goes on differently: put all it remembers there, as JSON values and tensors"
            )


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return bool(torch.allclose(first.double(), second.double(), atol=TOLERANCE, equal_nan=True))
    if isinstance(first, list) and first and isinstance(first[0], Group):
        return [group.id for group in first] == [group.id for group in second]
    return bool(first == second)
