"""Expectations of a part's results, whose breaches go into a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlflow.algorithms.trial.first_call import raised
from rlflow.errors import ConfigError
from rlflow.types import Batch

from .. import OURS
from .report import ContractReport

KEPT = ("tokens", "loss_mask", "logprobs", "lengths", "temperatures", "advantages")
TOLERANCE = 1e-5


@contextmanager
def expecting(report: ContractReport, what: str) -> Iterator[None]:
    """An exception in here is a breach, not the end; a ConfigError is about the keywords."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- others' code: whatever it raises is reported
        report.breach(f"{what} {raised(error, OURS)}")


def expect_tensor(report: ContractReport, name: str, value: Tensor, shape: torch.Size) -> None:
    """Expects that shape, and finite values."""
    expected = f"expected (rows, tokens) = {tuple(shape)}"
    told = f"{name} has shape {tuple(value.shape)}, {expected}"
    if report.expect(value.shape == shape, told):
        report.expect(value.isfinite().all(), f"{name} is not finite everywhere")


def expect_same(
    report: ContractReport, found: Tensor, expected: Tensor, what: str, mask: Tensor
) -> None:
    """Expects equal values on the mask, up to rounding."""
    found, expected = (one.detach().double()[mask] for one in (found, expected))
    far = (found - expected).abs() / expected.abs().clamp(min=1)
    worst = float(far.max()) if far.numel() else 0.0
    report.expect(worst <= TOLERANCE, f"{what}: values differ by up to {worst:.3g}")


def expect_unchanged(
    report: ContractReport, batch: Batch, copy: Batch, what: str, *more: str
) -> None:
    for name in (*KEPT, *more):
        same = torch.equal(getattr(batch, name), getattr(copy, name))
        told = f"{what} changes batch.{name} in place: make a new tensor (batch.replace)"
        report.expect(same, told)
