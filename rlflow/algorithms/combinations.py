"""Refuses parts of an algorithm that make no sense together, by what they declare of themselves
(`Advantage`, `Transform`, `Kernel`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

from rlflow.algorithms.base import Advantage, Filter, Kernel, Part, Transform
from rlflow.components import PARTS
from rlflow.errors import ConfigError
from rlflow.types import Loss

Correction = Advantage | Transform


def check_combination(
    losses: Sequence[Loss], transforms: Sequence[Part], before: Sequence[Part] = ()
) -> None:
    """Raises ConfigError, with the reason, where two parts do not go together. before: parts that
    are asked before the transforms."""
    kernels = [loss for loss in losses if isinstance(loss, Kernel)]
    changes = [change for change in transforms if isinstance(change, Transform)]
    advantages = [part for part in before if isinstance(part, Advantage)]
    corrections: list[Correction] = [*advantages, *changes]
    for kernel, change in product(kernels, corrections):
        for reason in _against_kernel(kernel, change):
            raise ConfigError(f"algorithm: {_told(change)} with {_told(kernel)}: {reason}")
    readers: list[Loss | Part] = [*losses, *before, *transforms]
    for part, reader in product(before, readers):
        if isinstance(part, Filter) and part.unscored and "rollout" in reader.needs:
            raise ConfigError(
                f"algorithm: filter {name_of(part)} with {name_of(reader)}: it brings attempts "
                f"without the log-probs of the policy that sampled them, which {name_of(reader)} "
                "reads; set anchor: proximal where it has one, or leave one of them out."
            )
    for first, second in combinations(corrections, 2):
        for reason in _against_each_other(first, second):
            raise ConfigError(f"algorithm: {_told(first)} with {_told(second)}: {reason}")
    for advantage, change in product(advantages, changes):
        if change.stage == "rewards" and not advantage.reads_rewards:
            raise ConfigError(
                f"algorithm: {_told(change)} with {_told(advantage)}: it changes the returns, "
                "which this advantage does not read; take another advantage, or leave it out."
            )
    for change in changes:
        if not kernels and (change.level or change.weighs or change.trusts):
            told = "it acts on policy-gradient terms, and no loss is one"
            raise ConfigError(f"algorithm: transform {name_of(change)}: {told}.")
        for part in (*before, *transforms[: transforms.index(change)]):
            if wanted := part.needs & change.fills:
                name = name_of(change)
                raise ConfigError(
                    f"algorithm: {name_of(part)} needs '{min(wanted)}', which transform {name} "
                    f"fills only after it; put {name} first, or let the trainer compute it."
                )


def name_of(part: Any) -> str:
    """Its name in a configuration; that of its class where it has none."""
    place = f"{type(part).__module__}:{type(part).__qualname__}"
    names = {home: name for kind in PARTS.values() for name, home in kind.homes().items()}
    return names.get(place, type(part).__name__)


def _told(part: Correction | Kernel) -> str:
    kinds = {Advantage: "advantage", Kernel: "loss", Transform: "transform"}
    return next(f"{kind} {name_of(part)}" for of, kind in kinds.items() if isinstance(part, of))


def _against_kernel(kernel: Kernel, change: Correction) -> Iterator[str]:
    if change.weighs and kernel.anchor == "rollout":
        yield (
            "the correction would be applied twice, as this loss's ratio to the rollout policy "
            "holds that of the proximal to the rollout policy. Set anchor: proximal for the loss, "
            f"or leave {name_of(change)} out."
        )
    if isinstance(change, Advantage):
        return
    if change.centres and not kernel.clips:
        yield "it centres a clip range on the proximal policy, and this loss has none. Use tis."
    if change.level == "token" and kernel.level != "token":
        yield (
            "the tokens of a row share one ratio in this loss: one that is left out would learn by "
            "way of the others. Correct whole rows (level: sequence or geometric), or take a loss "
            "of tokens (gspo with level: token)."
        )
    if change.bounds and not (kernel.bounded and kernel.anchor == "rollout"):
        yield (
            "it sets the clip range of the ratio to the rollout policy, which this loss does not "
            "have; use ppo_clip with anchor: rollout."
        )


def _against_each_other(first: Correction, second: Correction) -> Iterator[str]:
    if first.weighs and second.weighs:
        yield (
            "both multiply by the ratio of proximal to rollout policy: the correction would be "
            "applied twice. Keep one."
        )
    if isinstance(first, Advantage) or isinstance(second, Advantage):
        return
    if first.trusts and second.trusts:
        yield "each is a trust region of its own around the policy that sampled. Keep one."


def check_staleness(losses: Sequence[Loss], parts: Sequence[Part]) -> None:
    """Raises ConfigError for a policy-gradient term that ignores the age of tokens: its ratio is
    not taken against the version that sampled them, and no other part (advantage, transforms)
    weighs it."""
    weighed = any(part.weighs for part in parts if isinstance(part, (Advantage, Transform)))
    for kernel in (loss for loss in losses if isinstance(loss, Kernel)):
        if kernel.anchor == "rollout" or weighed:
            continue
        proximal = "its ratio is to the proximal policy"
        found = proximal if kernel.anchor else "it has no importance ratio"
        raise ConfigError(
            f"rollout.asynchronous with loss {name_of(kernel)}: {found}, so nothing corrects for "
            "tokens of older weights. Add a transform that does (algorithm.transforms=[tis]; with "
            "a clip range [decoupled]), take a loss with anchor: rollout, or set "
            "rollout.asynchronous.max_staleness=0."
        )
