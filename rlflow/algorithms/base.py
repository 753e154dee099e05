"""The parts of an algorithm: seams at which a method is added in a small file of its own.

    tasks --Curator--> groups --Filter--> batch --Advantage--> minibatch --Transform--> losses

A part says in `needs` what must be in the batch beyond what `make_batch` puts there, and the
training step fills exactly the union: `proximal`, `reference` and `teacher` (log-probs, once per
step), `values` (of the critic, once per step), `current` and `current_entropy` (once per minibatch,
just before its update). `rollout` are the log-probs of the policy that sampled, which rows of an
`unscored` filter lack. A part that remembers something returns it from `state_dict`; it is in the
checkpoint."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rlflow.algorithms.rewards import add_reward_term
from rlflow.errors import ConfigError, RLFlowError
from rlflow.types import (
    Batch,
    Group,
    Loss,
    LossResult,
    PolicyOutput,
    Reduction,
    Task,
    as_loss,
    check_needs,
)
from rlflow.values import check_annotated

# Nats; exp(20) is 4.9e8, far beyond any clip and still finite when squared in float32
MAX_LOG_RATIO = 20.0
Anchor = Literal["rollout", "proximal"]
"""The log-probs that an importance ratio is taken against: the engine's, of the behaviour policy,
or the trainer's for the same tokens before the step's first update."""
Level = Literal["token", "sequence", "geometric", "max"]
"""The unit of a ratio: a token, or a row (a segment), by the product, the geometric mean or the
largest of its tokens' ratios."""


class Part(ABC):  # noqa: B024 -- every kind of part adds its own call
    """Base of every part of an algorithm other than a loss; everything has a default."""

    needs: frozenset[str] = frozenset()
    # Snapshots that are taken anew, and after how many steps each, as of a Loss
    refreshes: Mapping[str, int] = {}
    remembers: tuple[str, ...] = ()
    """Names of its state: what JSON can say, in attributes of these names behind an underscore."""
    counters: tuple[str, ...] = ()
    """Names of what it counts in `counted` from report to report."""

    @cached_property
    def counted(self) -> Counter[str]:
        """By the names of `counters`, since the last report."""
        return Counter()

    def state_dict(self) -> dict[str, Any]:
        """The state of a resumed run, as JSON-able values and tensors: by default `remembers`."""
        return {name: copy.deepcopy(getattr(self, f"_{name}")) for name in self.remembers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        for name in self.remembers:
            setattr(self, f"_{name}", copy.deepcopy(state[name]))

    def report(self) -> dict[str, float]:
        """Numbers about the time since the last call: logged as `train/<name>`, once per step. By
        default `counters`."""
        found = {name: float(self.counted[name]) for name in self.counters}
        self.counted.clear()
        return found

    def close(self) -> None:
        """Called when the run ends: frees what outlives steps (connections, threads)."""


@dataclass(frozen=True)
class FunctionPart(Part):
    """A function as a part that remembers nothing; as a transform, one of minibatches."""

    function: Callable[[Any], Any]
    stage = "minibatch"
    fills: frozenset[str] = frozenset()
    whole_step = False  # where it is a filter, what `Filter` says
    max_rounds = 10

    def __call__(self, value: Any) -> Any:
        return self.function(value)


Function = TypeVar("Function", bound=Callable[..., Any])


def compares_attempts(function: Function) -> Function:
    """Marks an advantage that is a plain function as one with `Advantage.compares_attempts`."""
    function.compares_attempts = True  # type: ignore[attr-defined]
    return function


def as_part(part: Any) -> Any:
    """The part, wrapped if it is a function. Raises ConfigError as `check_needs` does."""
    made = part if isinstance(part, Part) else FunctionPart(part)
    check_needs(made)
    return made


class Filter(Part):
    """[groups] -> those of them to train on. Fresh groups replace the others, and are asked about
    again, in at most `max_rounds` rounds in all."""

    whole_step: bool = False
    """Asked once per step, after all others, about the groups that they let through in any round;
    it may add or leave out groups without asking for more."""

    max_rounds: int = 10
    """Rounds of fresh groups in a step at the most; among several filters the least one holds."""

    unscored: bool = False
    """It may bring attempts without behaviour log-probs: no part may need `rollout`."""

    compares_attempts: bool = False
    """It asks in what attempts at a task differ: one attempt per task is refused at the start."""

    @abstractmethod
    def __call__(self, groups: list[Group]) -> list[Group]: ...


class Curator(Part):
    """The source of a run's training tasks, made from (tasks, seed), and `samples` where it names
    them: the attempts per prompt. Its position is state of its own: a filter that refuses groups
    makes a step take more tasks than another."""

    @property
    @abstractmethod
    def epoch(self) -> float:
        """Passes over the tasks so far; 1.5 is the middle of the second one."""

    @abstractmethod
    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; fewer, or none, where there are no more."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Called with every finished group, before any filter."""


class Advantage(Part):
    """Batch -> (B,) or (B, T): how much better an attempt, or a token, was than expected. A (B,) is
    spread over the row's trained tokens. With a critic: also (B, T) returns for it to learn."""

    compares_attempts: bool = False
    """Attempts at a task are compared: one attempt per task is refused at the start."""
    weighs: bool = False
    """It holds the ratios of the proximal to the rollout policy."""
    reads_rewards: bool = True
    """Returns are in it, so that a transform of them (`stage: rewards`) has an effect."""
    base_advantage: Advantage | None = None
    """Another advantage that it is added to: a part of the algorithm too."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]: ...


class Transform(Part):
    """Batch -> Batch, without gradients, on a whole minibatch or step: independent of
    micro-batches and ranks. On the minibatch, importance corrections and keep-masks go to
    `coefficients`, row weights to `weights`, numbers for the user to `metrics`. Its attributes are
    for `rlflow/algorithms/combinations.py`."""

    stage: Literal["rewards", "advantages", "minibatch"] = "minibatch"
    """Its input: the step's batch before or after the advantage is made, or each minibatch."""
    fills: frozenset[str] = frozenset()
    """Needs of later parts that this one puts into the batch."""
    level: Level | None = None
    """`token`: its coefficients may differ between the tokens of a row, else they do not; None: it
    has none, or does not say."""
    weighs: bool = False
    """Its coefficients are ratios of the proximal to the rollout policy."""
    centres: bool = False
    """It is for kernels with a clip range, to centre on the proximal policy."""
    trusts: bool = False
    """It is a trust region around the policy that sampled; there can be one."""
    bounds: bool = False
    """It sets the clip range (`ratio_low`, `ratio_high`) of a ratio to the rollout policy."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Batch: ...


class RewardTerm(Transform):
    """Adds to the rewards before the advantage is made; group statistics are taken again."""

    stage = "rewards"

    @abstractmethod
    def term(self, batch: Batch) -> Tensor:
        """(B,) to add to returns (all rows of a trajectory have the same), or (B, T) to tokens."""

    def __call__(self, batch: Batch) -> Batch:
        return add_reward_term(batch, self.term(batch), f"transform {type(self).__name__}")


class Kernel(Loss):
    """A policy-gradient term: importance corrections (`Batch.coefficients`) multiply it alone."""

    anchor: Anchor | None = None
    """The policy that its ratio is taken against; None: it has no ratio."""
    level: Level = "token"
    """Other than `token`: tokens of a row share their gradient."""
    clips: bool = False
    """Its ratio is clipped."""
    bounded: bool = False
    """It clips where the batch says (`ratio_low`, `ratio_high`)."""
    __post_init__ = check_annotated  # of a dataclass

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(() if self.anchor is None else {self.anchor})

    @abstractmethod
    def kernel(self, output: PolicyOutput, batch: Batch) -> LossResult:
        """The term before corrections."""

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        loss, metrics = self.kernel(output, batch)
        return (
            loss if batch.coefficients is None else loss * batch.coefficients,
            metrics,
        )


@dataclass(frozen=True)
class SumLoss(Loss):
    """The sum of several terms, with all their metrics; the first of equal names is kept."""

    losses: tuple[Loss, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "losses", tuple(as_loss(loss) for loss in self.losses))
        if not self.losses:
            raise ConfigError("algorithm.losses: expected at least one loss, found none")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset().union(*(loss.needs for loss in self.losses))

    @property
    def vanishes_at_zero_advantage(self) -> bool:  # type: ignore[override]
        return all(loss.vanishes_at_zero_advantage for loss in self.losses)

    @property
    def terms(self) -> tuple[Loss, ...]:
        return tuple(term for loss in self.losses for term in loss.terms)

    @property
    def reductions(self) -> Mapping[str, Reduction]:  # type: ignore[override]
        return dict(ChainMap(*(dict(loss.reductions) for loss in self.losses)))

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        total, metrics = self.losses[0](output, batch)
        for loss in self.losses[1:]:
            term, more = loss(output, batch)
            total, metrics = total + term, {**more, **metrics}
        return total, metrics

    def split(self) -> tuple[Loss | None, Loss | None]:
        of_policy, of_critic = zip(*(loss.split() for loss in self.losses), strict=True)
        return _sum(of_policy), _sum(of_critic)


def _sum(losses: Sequence[Loss | None]) -> Loss | None:
    kept = tuple(loss for loss in losses if loss is not None)
    return SumLoss(kept) if kept else None


def merged_refreshes(parts: Iterable[Loss | Part]) -> dict[str, int]:
    """`refreshes` of all parts. Raises ConfigError where two differ about a snapshot."""
    found: dict[str, int] = {}
    for part in parts:
        for name, steps in part.refreshes.items():
            if found.setdefault(name, steps) != steps:
                raise ConfigError(
                    f"algorithm: two parts refresh the {name}, after {found[name]} and after "
                    f"{steps} steps; expected the same refresh_steps in both: there is one."
                )
    return found


def log_ratio(logprobs: Tensor, base: Tensor, mask: Tensor) -> Tensor:
    """(B, T) logprobs - base on the mask, 0 off it, clamped to +-20 nats.

    The mask comes before any exp: what stands in a masked place can then reach neither value nor
    gradient (inf * 0 is nan)."""
    return torch.where(mask, logprobs - base, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(estimator: str, x: Tensor) -> Tensor:
    """k1, k2 or k3 of KL(policy || other), nats, from x = other log-prob - log-prob of the policy's
    own tokens: -x, x^2 / 2, e^x - x - 1."""
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    # Near 0 the terms cancel: in float32 nothing is left of k3 below |x| of 3e-4
    wide = x.double()
    return (torch.expm1(wide) - wide).to(x.dtype)


def anchor_logprobs(batch: Batch, anchor: Anchor, who: str) -> Tensor:
    """(B, T) log-probs of the policy that a ratio is taken against. Raises RLFlowError without."""
    if anchor == "proximal":
        return batch.require("proximal_logprobs", who)
    known = batch.logprobs_known
    if known is not None and bool((batch.loss_mask & ~known[:, None]).any()):
        raise RLFlowError(
            f"{who}: some rows come without the log-probs of the policy that sampled them: set "
            "anchor: proximal where it has one, so that the trainer computes them, or leave out "
            "those rows or this part"
        )
    return batch.logprobs
