"""The contract of each kind of part, held against a made-up batch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.base import Curator
from rlflow.algorithms.trial.first_call import call_part, sign_problem
from rlflow.algorithms.trial.sample_step import (
    FIELDS,
    sample_batch,
    sample_groups,
    sample_output,
)
from rlflow.components import ADVANTAGE, AGGREGATE, CURATOR, FILTER, LOSS, TRANSFORM
from rlflow.storage.states import put_back, take_out
from rlflow.types import Batch, Group, Loss, PolicyOutput, Task

from .expectations import (
    TOLERANCE,
    expect_same,
    expect_tensor,
    expect_unchanged,
    expecting,
)
from .report import ContractReport
from .views import disturbed, map_output, sample_views

EXTREME = 1e4  # a log-ratio that exp cannot take
CHANGED = (
    *("coefficients", "weights", "advantages", "rewards", "token_rewards"),
    *("ratio_low", "ratio_high"),
)
"""Fields of a batch that a transform may set."""


def check_loss(report: ContractReport, make: Callable[[], Any]) -> None:
    loss: Loss = make()
    batch = sample_batch(loss.needs)
    output, mask = sample_output(batch, loss.needs), batch.loss_mask
    copy = batch.map(torch.clone)
    found, problem = call_part(LOSS, loss, output, batch)
    if not report.expect(not problem, problem):
        return
    values, metrics = found
    for name, value in {"loss": values, **metrics}.items():
        expect_tensor(report, f"'{name}'", value, batch.tokens.shape)
    for name, value in metrics.items():
        detached = not value.requires_grad
        report.expect(detached, f"metric '{name}' carries gradients: use .detach()")
    expect_unchanged(report, batch, copy, "the loss", "weights")
    if not report.passed:
        return
    with expecting(report, "the gradient"):
        gradient = _gradient(values, batch, output)
        if gradient is None or not gradient.any():
            report.note("the loss has no gradient with respect to the log-probs")
        else:
            told = "the gradient reaches log-probs off the loss mask: mask before summing over rows"
            report.expect(not gradient[~mask].any(), told)
    with expecting(report, "the loss with other numbers off the mask"):

        def lowered(value: Tensor) -> Tensor:
            kept = mask if value.dim() == 2 else mask[..., None]
            return torch.where(kept, value, value - 5.0)

        stirred, _ = loss(map_output(output, lowered), disturbed(batch))
        expect_same(
            report,
            stirred,
            values,
            "other numbers off the loss mask change the loss on it",
            mask,
        )
    for what, view, change, back in sample_views(batch):
        with expecting(report, f"the loss with {what}"):
            again, _ = loss(map_output(output, change), view)
            expect_same(report, back(again), values, f"{what} change the loss", mask)
    with expecting(report, "the loss at advantages of 1 and -1"):
        odd, of_all = sign_problem(loss)
        if of_all:
            report.breach(odd)
        elif odd:
            report.note(odd)
    _check_rows(report, loss, batch, output, values)
    _check_extremes(report, loss, batch, output)
    if loss.vanishes_at_zero_advantage:
        with expecting(report, "the loss at zero advantage"):
            flat, _ = loss(output, batch.replace(advantages=torch.zeros_like(batch.advantages)))
            gradient = _gradient(flat, batch, output)
            told = "vanishes_at_zero_advantage is set, but at advantages of 0 there is a gradient"
            report.expect(gradient is None or not gradient.any(), told)
    named, needs = (
        ", ".join(metrics) or "none",
        ", ".join(sorted(loss.needs)) or "nothing more",
    )
    report.fact(f"metrics: {named}; needs: {needs}")


def _gradient(values: Tensor, batch: Batch, output: PolicyOutput) -> Tensor | None:
    """(B, T) of the weighted sum with respect to the log-probs; None where there is none."""
    total = (batch.weights * values).sum()
    return torch.autograd.grad(total, output.logprobs, retain_graph=True, allow_unused=True)[0]


def _check_rows(
    report: ContractReport,
    loss: Loss,
    batch: Batch,
    output: PolicyOutput,
    values: Tensor,
) -> None:
    told = (
        "a row alone has another loss than in the batch, so micro-batches would change it: what "
        "depends on other rows belongs in a transform"
    )
    with expecting(report, "the loss of single rows"):
        for row in range(len(batch)):
            part = batch.select([row])
            own = itemgetter(([row], slice(part.tokens.shape[1])))
            alone, _ = loss(map_output(output, own), part)
            expect_same(report, alone, own(values), told, part.loss_mask)


def _check_extremes(report: ContractReport, loss: Loss, batch: Batch, output: PolicyOutput) -> None:
    fields = [name for name in FIELDS.values() if name != "current_entropy"]
    given = ["logprobs", *(name for name in fields if getattr(batch, name) is not None)]
    for ratio, what in ((EXTREME, "far more"), (-EXTREME, "far less")):
        whom = f"tokens {what} likely than the behaviour policy"
        with expecting(report, f"the loss where the policy finds {whom}"):
            theirs, ours = (
                torch.where(batch.loss_mask, min(0.0, end), 0.0) for end in (-ratio, ratio)
            )
            mine = dataclasses.replace(output, logprobs=ours.requires_grad_())
            far = batch.replace(**dict.fromkeys(given, theirs))
            values, _ = loss(mine, far)
            gradient = _gradient(values, batch, mine)
            finite = values.isfinite().all() and (gradient is None or gradient.isfinite().all())
            advice = "clamp it before exp (rlflow.algorithms.base.log_ratio)"
            report.expect(finite, f"not finite at a log-ratio of {ratio:+g}: {advice}")


def check_advantage(report: ContractReport, make: Callable[[], Any]) -> None:
    batch = sample_batch(make().needs)
    copy = batch.map(torch.clone)
    found, problem = call_part(ADVANTAGE, make(), batch)
    if not report.expect(not problem, problem):
        return
    result = _answers(found)
    for values in result:
        report.expect(values.isfinite().all(), "it is not finite everywhere")
        report.expect(not values.requires_grad, "carries gradients: use .detach()")
    expect_unchanged(report, batch, copy, "the advantage")
    if not report.passed:
        return
    for place, what in enumerate(("the advantage", "the returns")[: len(result)]):
        _check_views(
            report,
            make,
            batch,
            result[place],
            what,
            read=partial(_answer, place),
        )
    _check_state(report, make, lambda part: _answers(part(batch))[0])
    trained = result[0][batch.loss_mask] if result[0].dim() == 2 else result[0]
    ends = f"from {float(trained.min()):.3g} to {float(trained.max()):.3g}"
    report.fact(f"{ends} on the made-up batch")


def _answers(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _answer(place: int, found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return _answers(found)[place]


def check_aggregate(report: ContractReport, make: Callable[[], Any]) -> None:
    batch = sample_batch(frozenset())
    weights, problem = call_part(AGGREGATE, make(), batch)
    if not report.expect(not problem, problem):
        return
    if not report.expect(weights.isfinite().all(), "it is not finite everywhere"):
        return
    if weights[~batch.loss_mask].any():
        report.note("gives weight to tokens that the policy did not sample")
    _check_views(report, make, batch, weights, "the aggregate")
    with expecting(report, "the aggregate of a batch without a trained token"):
        empty = make()(batch.replace(loss_mask=torch.zeros_like(batch.loss_mask)))
        report.expect(empty.isfinite().all(), "is not finite where no token is trained")
    report.fact(f"the weights sum to {float(weights.sum()):.6g}")


def check_transform(report: ContractReport, make: Callable[[], Any]) -> None:
    batch = sample_batch(make().needs)
    copy = batch.map(torch.clone)
    with torch.no_grad():
        made, problem = call_part(TRANSFORM, make(), batch)
    if not report.expect(not problem, problem):
        return
    expect_unchanged(report, batch, copy, "the transform", "weights")
    for name in ("tokens", "loss_mask", "logprobs", "lengths"):
        told = f"gives other batch.{name}: corrections go to coefficients, row weights to weights"
        report.expect(torch.equal(getattr(made, name), getattr(copy, name)), told)
    for name in ("coefficients", "weights", "advantages", "token_rewards"):
        if (value := getattr(made, name)) is not None:
            expect_tensor(report, f"batch.{name}", value, batch.tokens.shape)
    if not report.passed:
        return
    changed = []
    for name in CHANGED:
        value, before = getattr(made, name), getattr(batch, name)
        if value is not None:
            with torch.no_grad():
                _check_views(report, make, batch, value, f"batch.{name}", attrgetter(name))
            if before is None or not torch.equal(value, before):
                changed.append(name)
    report.fact(f"changes {', '.join(changed) or 'none'} of the made-up batch")
    if made.coefficients is not None:
        kept = made.coefficients[batch.loss_mask]
        share = float((kept == 0).float().mean())
        report.fact(f"coefficients: mean {float(kept.mean()):.3g}, {share:.0%} are 0")


def check_filter(report: ContractReport, make: Callable[[], Any]) -> None:
    groups = sample_groups()
    kept, problem = call_part(FILTER, make(), list(groups))
    if not report.expect(not problem, problem):
        return
    report.fact(f"lets {len(kept)} of {len(groups)} made-up groups through")
    stamped = all(each.group_stats is not None for group in kept for each in group.usable)
    told = "gives attempts without group statistics: stamp them, the advantage needs them"
    report.expect(stamped, told)
    with expecting(report, "the filter of no groups"):
        if make()([]) != []:
            report.note("gives groups where it gets none")
    _check_state(report, make, lambda part: part(sample_groups()))


def check_curator(report: ContractReport, make: Callable[[], Any]) -> None:
    with expecting(report, "the curator"):
        curator: Curator = make()
        first = [curator.take(4) for _ in range(4)]
        right = all(
            isinstance(tasks, list) and len(tasks) <= 4 and all(isinstance(t, Task) for t in tasks)
            for tasks in first
        )
        if not report.expect(right, "take(count): expected a list of at most `count` tasks"):
            return
        report.expect(any(first), "take(count) gives no task at all")
        sane = math.isfinite(curator.epoch) and curator.epoch >= 0
        report.expect(sane, f"epoch: expected passes so far, found {curator.epoch}")
        again, names = make(), [[task.id for task in tasks] for tasks in first]
        told = "the same seed gives another order: draw from a generator that is seeded with it"
        report.expect([[task.id for task in again.take(4)] for _ in first] == names, told)
        curator.observe(sample_groups())
    _check_state(report, make, lambda part: [task.id for _ in range(3) for task in part.take(4)])


def _check_views(
    report: ContractReport,
    make: Callable[[], Any],
    batch: Batch,
    values: Tensor,
    what: str,
    read: Callable[[Any], Tensor] = lambda found: found,
) -> None:
    mask = batch.loss_mask if values.dim() == 2 else torch.ones(len(batch), dtype=torch.bool)
    for done, view, _, back in sample_views(batch):
        with expecting(report, f"{what} with {done}"):
            expect_same(report, back(read(make()(view))), values, f"{done} change {what}", mask)
    with expecting(report, f"{what} with other numbers off the loss mask"):
        told = f"other numbers off the loss mask change {what} on it"
        expect_same(report, read(make()(disturbed(batch))), values, told, mask)


def _check_state(
    report: ContractReport, make: Callable[[], Any], use: Callable[[Any], Any]
) -> None:
    """A part that is restored in the middle goes on as the one that was saved."""
    with expecting(report, "state_dict and load_state_dict"):
        part, restored = make(), make()
        use(part)
        tensors: dict[str, Tensor] = {}
        text = json.dumps(take_out(part.state_dict(), tensors))
        restored.load_state_dict(put_back(json.loads(text), tensors))
        told = "a part restored from its state_dict goes on differently: put all it remembers there"
        report.expect(_alike(use(part), use(restored)), f"{told}, as JSON values and tensors")


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return bool(torch.allclose(first.double(), second.double(), atol=TOLERANCE, equal_nan=True))
    if isinstance(first, list) and first and isinstance(first[0], Group):
        return [group.id for group in first] == [group.id for group in second]
    return bool(first == second)


CHECKS = {
    LOSS: check_loss,
    ADVANTAGE: check_advantage,
    AGGREGATE: check_aggregate,
    TRANSFORM: check_transform,
    FILTER: check_filter,
    CURATOR: check_curator,
}
