"""What rounding alone may do to a result: bounds from the type, the number of operations and the model, from no processor.

Processors, batch shapes and layouts differ in the order in which they sum, so their results differ by rounding. A product
of n terms, however it is summed, is the exact product of weights that are off by at most n u, relatively (Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., 3.1; u is half the type's eps), and by about sqrt(n) u where the roundings do
not all go the same way (Higham and Mary 2019, A new approach to probabilistic rounding error analysis). What weights that
are off by so much do to the result is the model's condition. It is measured in float64, where rounding does not show:

    |result - exact result|  <=  sqrt(n) u * max |exact result of moved weights - exact result| / how far they were moved

Every weight is moved at random, n is the longest sum, and two results in float32 may be twice as far from each other. What
sums in blocks, as all libraries do, stays well below: at a tenth of it (tests/unit/test_rounding.py). It is a bound in
probability, as sqrt(n) is; the certain one, with n u, is ten times as far.

What is exact needs no bound: equal batches, layouts and numbers give equal bits, and a choice whose `margin` is above 1 falls
alike whatever the rounding."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.rollout.embedded.sampling import uniforms
from rlflow.trainer.base import Loss
from rlflow.types import Batch
from tests.reference.trainer import ReferenceTrainer

MOVED = 2.0**-20
"""By which share weights are moved (standard deviation): far above the rounding of float64, and small enough to be linear."""


def accumulated(operations: int, dtype: torch.dtype = torch.float32) -> float:
    """The relative error of so many roundings in a row, half of them either way: sqrt(n) u."""
    return math.sqrt(operations) * torch.finfo(dtype).eps / 2


def logits(path: Path, rows: list[list[int]]) -> tuple[list[Tensor], float]:
    """Exact logits (T, V) of the rows, float64, and how far logits in float32 may be from them."""
    results = [_both(path, row) for row in rows]
    return [exact for exact, _ in results], _bound(path, rows, results)


def logprobs(
    path: Path, rows: list[list[int]], temperature: float = 1.0
) -> tuple[list[Tensor], float]:
    """As `logits`, of log-probs of the next token at the temperature (0: greedy, of temperature 1)."""
    results = [_logprobs(path, row, temperature) for row in rows]
    return [exact for exact, _ in results], _bound(path, rows, results)


def cumulative(
    path: Path, rows: list[list[int]], temperature: float = 1.0
) -> tuple[list[Tensor], float]:
    """As `logits`, of the cumulative shares of the next token, in the order of the ids: what sampling looks its number up in."""
    results = [
        (exact.exp().cumsum(-1), moved.exp().cumsum(-1))
        for exact, moved in (_logprobs(path, row, temperature) for row in rows)
    ]
    return [exact for exact, _ in results], _bound(path, rows, results)


def margin(
    path: Path, prompt: list[int], tokens: list[int], temperature: float, seed: int = 0
) -> float:
    """How far the choice of each of the tokens was from another one, at the least, in the bounds of rounding: above 1, every
    engine that computes in float32 chooses the same.

    Greedily (temperature 0): by what the second best token is less likely, where both may be off by the bound. In sampling: by
    what the number drawn is away from the ends of the token's part of the cumulative distribution."""
    row, chosen = prompt + tokens, torch.tensor(tokens)[:, None]
    if temperature == 0:
        (exact,), bound = logprobs(path, [row])
        exact = exact[len(prompt) - 1 : -1]
        second = exact.scatter(-1, chosen, -torch.inf).amax(-1, keepdim=True)
        return float((exact.gather(-1, chosen) - second).min()) / (2 * bound)
    (shares,), bound = cumulative(path, [row], temperature)
    ends = torch.nn.functional.pad(shares[len(prompt) - 1 : -1], (1, 0))
    lengths = torch.arange(len(prompt), len(row))
    drawn = uniforms(torch.full_like(lengths, seed), lengths)[:, None]
    return (
        float(
            torch.minimum(
                drawn - ends.gather(-1, chosen), ends.gather(-1, chosen + 1) - drawn
            ).min()
        )
        / bound
    )


def rows_of(batch: Batch) -> list[list[int]]:
    """The tokens of a batch without padding."""
    return [
        row[:length].tolist() for row, length in zip(batch.tokens, batch.lengths.tolist()) if length
    ]


def moved(model: torch.nn.Module, seed: int = 0) -> None:
    """Moves every parameter at random by the share MOVED of itself, in place."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                1 + MOVED * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
            )


@functools.lru_cache(maxsize=4)
def _models(path: Path) -> tuple[Any, Any]:
    """The model of a directory in float64, and a copy whose weights were moved."""
    from transformers import AutoModelForCausalLM

    # transformers' grouped products of experts know no float64.
    exact = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float64, experts_implementation="eager"
    )
    other = copy.deepcopy(exact)
    moved(other)
    return exact, other


@torch.no_grad()
def _both(path: Path, row: list[int]) -> tuple[Tensor, Tensor]:
    exact, other = (model(torch.tensor([row])).logits[0] for model in _models(path))
    return exact, other


def _logprobs(path: Path, row: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    exact, other = ((one / (temperature or 1.0)).log_softmax(-1) for one in _both(path, row))
    return exact, other


def _bound(path: Path, rows: list[list[int]], results: list[tuple[Tensor, Tensor]]) -> float:
    condition = max(float((other - exact).abs().max()) for exact, other in results) / MOVED
    longest = max(parameter.shape[-1] for parameter in _models(path)[0].parameters())
    return accumulated(max(longest, *map(len, rows))) * condition


class Updates:
    """What rounding may do to a few updates from the same start with Adam, derived from the same updates in float64.

    A step is lr m / (sqrt(v) + eps), with m an average of the gradients so far and sqrt(v) a root mean square of them. Gradients
    that are off by d, as the condition says, move both by d at most, and |m| <= r sqrt(v) (Cauchy and Schwarz; r is 1.001 after
    three updates), so a step is off by at most (1 + r) d / (sqrt(v) + eps) learning rates; and never by more than 2 r. That is
    nothing where the gradient is large, and much where it is as small as its own rounding: in biases of keys, which shift all
    scores of a query alike but for the rotary embedding, whose slow parts barely turn within a short row."""

    def __init__(
        self, make: Callable[[], ReferenceTrainer], batch: Batch, loss: Loss, updates: int
    ) -> None:
        exact, other = make(), make()
        for trainer in (exact, other):
            trainer.model.double()
        moved(other.model)
        self.lr, self.eps = exact.optimizer.defaults["lr"], exact.optimizer.defaults["eps"]
        self.betas = exact.optimizer.defaults["betas"]
        self.norm_bounds: list[float] = []
        self._gradients: dict[str, list[Tensor]] = {}
        self._bounds: dict[str, list[float]] = {}
        off = (
            accumulated(batch.tokens.numel()) / MOVED
        )  # a gradient is a sum over tokens, the longest sum of all
        for _ in range(updates):
            norm, _ = (trainer.update(batch, loss)["gradient_norm"] for trainer in (exact, other))
            differences = []
            for (name, one), two in zip(exact.model.named_parameters(), other.model.parameters()):
                assert one.grad is not None and two.grad is not None
                self._gradients.setdefault(name, []).append(one.grad.clone())
                differences.append((one.grad - two.grad).flatten())
                self._bounds.setdefault(name, []).append(off * float(differences[-1].abs().max()))
            difference = torch.cat(
                differences
            )  # of gradients that were clipped to 1 (or are shorter)
            own = (
                accumulated(len(difference)) / 2
            )  # of a sum of squares, of which the norm is the root
            self.norm_bounds.append(max(norm, 1.0) * (off * float(difference.norm()) + own))

    def most_apart(self, name: str, weight: Tensor) -> Tensor:
        """Of every element, how far two runs in float32 may be from each other after the updates."""
        gradients, bounds = torch.stack(self._gradients[name]), self._bounds[name]
        apart = torch.zeros_like(gradients[0])
        for done in range(1, len(bounds) + 1):
            first, second = (self._shares(beta, done) for beta in self.betas)
            most = float((first.square() / second).sum().sqrt())  # r
            size = (second[:, None] * gradients[:done].flatten(1).square()).sum(0).sqrt().view_as(
                apart
            ) + self.eps
            apart += (2 * (1 + most) * max(bounds[:done]) / size).clamp(max=2 * most)
        # Weight decay and the difference round the weight, half a dozen operations the step.
        rounded = 2 * len(bounds) * torch.finfo(torch.float32).eps * (weight.abs() + 6 * self.lr)
        return self.lr * apart + rounded

    @staticmethod
    def _shares(beta: float, updates: int) -> Tensor:
        """The share of each of the gradients in a mean that forgets by `beta`, without the bias of its start."""
        powers = beta ** torch.arange(updates - 1, -1, -1, dtype=torch.float64)
        return powers / powers.sum()
