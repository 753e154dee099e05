"""The algorithm section of a configuration, resolved into its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlflow.algorithms.base import (
    Advantage,
    Filter,
    Part,
    SumLoss,
    Transform,
    as_part,
    merged_refreshes,
)
from rlflow.algorithms.combinations import check_combination, check_staleness
from rlflow.algorithms.early_scores import EarlyScores
from rlflow.algorithms.losses.monitored import Monitored
from rlflow.algorithms.teachers.base import Teacher, check_teacher
from rlflow.components import ADVANTAGE, AGGREGATE, FILTER, LOSS, TEACHER, TRANSFORM
from rlflow.config.schema import AlgorithmSection, RunConfig
from rlflow.errors import (
    CheckpointError,
    ConfigError,
    RLFlowError,
    RolloutError,
    did_you_mean,
)
from rlflow.storage.states import check_alike, load_state
from rlflow.trainer.options import CriticOptions
from rlflow.trainer.reducing import finish_metrics, reduce_tokens
from rlflow.types import Batch, Group, Loss, as_loss

FILLED = frozenset(
    (
        "entropy",
        "top_logprobs",
        "values",
        "rollout",
        "proximal",
        "reference",
        "teacher",
        "current",
        "current_entropy",
    )
)
"""The needs of parts that the rollout, the training step and the trainers fill."""
KINDS = "kinds"
"""Beside the states in a checkpoint: the class of each part that has one, by its place."""
MOST_BUDGET = 2**30
"""Tokens of an attempt, before the environment is there, which may set its own number of turns."""


@dataclass
class Algorithm:
    """The parts, which a training step asks as filters, advantage, aggregate, transforms, loss."""

    advantage: Advantage
    loss: Loss
    aggregate: Callable[[Batch], Tensor]
    filters: Sequence[Filter] = ()
    transforms: Sequence[Transform] = ()
    teacher: Teacher | None = None
    minibatches_per_step: int = 1
    epochs_per_step: int = 1
    seed: int = 0  # of the split into minibatches
    # What scores rows before their step
    early: EarlyScores | None = field(default=None, init=False)
    # Once a run is enough
    told_of_idle_updates: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for unknown in sorted(self.needs - FILLED):
            raise ConfigError(
                f"algorithm: a part needs '{unknown}', which nothing fills; expected "
                f"{', '.join(sorted(FILLED))}.{did_you_mean(unknown, FILLED)}"
            )
        if "values" in self.needs - self.loss.needs:
            raise ConfigError(
                "algorithm.losses: the advantage reads a critic that no loss trains; expected the "
                "loss 'value' among them, found none that needs values."
            )
        self.refreshes = merged_refreshes([*self.loss.terms, *self._others()])
        check_teacher(self.teacher, self.needs)
        check_combination(self.loss.terms, self.transforms, before=(self.advantage, *self.filters))

    @classmethod
    def from_config(cls, config: RunConfig, response_budget: int, **offered: Any) -> Algorithm:
        """The parts that the configuration names. response_budget: the most tokens that an attempt
        may generate. offered: keywords that filters may name (`rollout`), beside `seed`."""
        section, seed = config.algorithm, config.run.seed
        filters = _all(FILTER, section.filters, "algorithm.filters", seed=seed, **offered)
        made = cls(
            advantage=make_advantage(section.advantage),
            loss=Monitored(make_loss(section.losses)),
            aggregate=AGGREGATE.build(
                section.aggregate, "algorithm.aggregate", tokens=response_budget
            ),
            filters=[as_part(one) for one in filters],
            transforms=make_transforms(section.transforms, response_budget),
            teacher=_teacher(section.teacher),
            minibatches_per_step=section.minibatches_per_step,
            epochs_per_step=section.epochs_per_step,
            seed=seed,
        )
        check_critic(made.needs, section.critic)
        return made

    @property
    def needs(self) -> frozenset[str]:
        """The union of all parts' needs, less those that transforms fill."""
        needs = frozenset().union(self.loss.needs, *(part.needs for part in self._others()))
        return needs - _filled_by(self.transforms)

    @property
    def max_rounds(self) -> int:
        """Rounds of fresh groups that a step may ask for."""
        rounds = [part.max_rounds for part in self.filters if not part.whole_step]
        return min(rounds, default=Filter.max_rounds)

    def admit(self, groups: list[Group]) -> list[Group]:
        """The groups of one round that all filters but those of whole steps let through."""
        for keep in self.filters:
            groups = groups if keep.whole_step else keep(groups)
        return groups

    def complete(self, groups: list[Group]) -> list[Group]:
        """The groups that a step trains on: the admitted ones after the filters of whole steps.
        Raises RolloutError where these leave none."""
        admitted, last = len(groups), ""
        for keep in self.filters:
            if keep.whole_step:
                last = type(keep).__name__ if groups else last
                groups = keep(groups)
        if not groups:
            raise RolloutError(
                f"algorithm.filters: {last} left none of the step's {admitted} groups to train on; "
                "keep one at the least, or leave that filter out."
            )
        return groups

    @torch.no_grad()
    def credit(self, batch: Batch) -> Batch:
        """The step's batch with advantages, (B, T) float32, a critic's returns, and rewards."""
        batch = self._changed(batch, "rewards")
        found: Any = self.advantage(batch)
        two = isinstance(found, tuple) and len(found) == 2
        advantages, returns = found if two else (found, batch.returns)
        shape = tuple(batch.tokens.shape)
        is_tensor = isinstance(advantages, Tensor)
        told = tuple(advantages.shape) if is_tensor else type(advantages).__name__
        if told not in (shape[:1], shape):
            part = getattr(self.advantage, "function", self.advantage)
            part = getattr(part, "func", part)  # of a partial: with its options
            name = getattr(part, "__name__", type(part).__name__)
            raise RLFlowError(
                f"algorithm.advantage: {name}: expected a tensor of (rows,) or (rows, tokens) = "
                f"{shape}, found {told}."
            )
        if advantages.dim() == 1:
            advantages = advantages[:, None] * batch.loss_mask
        batch = batch.replace(advantages=advantages.float(), returns=returns)
        return self._changed(batch, "advantages")

    @torch.no_grad()
    def transform(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The minibatch after every transform, and their metrics: their own, the share of trained
        tokens that they kept, the means of coefficients and clip range."""
        batch = self._changed(batch, "minibatch")
        reported = dict(batch.metrics)
        if batch.coefficients is not None:
            kept = (batch.coefficients != 0).float()
            reported |= {"kept": kept, "coefficient": batch.coefficients}
        if batch.ratio_low is not None and batch.ratio_high is not None:
            reported |= {"ratio_low": batch.ratio_low, "ratio_high": batch.ratio_high}
        sums = {name: float(reduce_tokens(one, batch, "mean")) for name, one in reported.items()}
        return dataclasses.replace(batch, metrics={}), finish_metrics(sums, {}, batch)

    def _changed(self, batch: Batch, stage: str) -> Batch:
        """The batch after every transform of that stage, in order."""
        for change in self.transforms:
            if change.stage == stage:
                batch = change(batch)
        return batch

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Tells every loss of an update's metrics."""
        for loss in self.loss.terms:
            loss.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        """The states of parts that remember something, by their place in the section, and the kinds
        of these parts."""
        found, kinds = dict[str, Any](), dict[str, str]()
        for place, part in self._parts().items():
            if state := part.state_dict():
                found[place], kinds[place] = state, type(part).__name__
        return {**found, KINDS: kinds} if found else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. Raises CheckpointError for a part that this algorithm has not."""
        parts, found = self._parts(), dict(state)
        kinds = found.pop(KINDS, {})  # none in an older checkpoint
        check_alike(kinds, {}, f"algorithm.{KINDS}")
        for place, remembered in sorted(found.items()):
            ours = type(parts[place]).__name__ if place in parts else None
            kind = kinds.get(place, ours)
            if ours is None or kind != ours:
                raise CheckpointError(
                    f"the checkpoint holds the memory of {place} ({kind or 'a part'}), which this "
                    "configuration does not have; resume with the algorithm section that the run "
                    "was started with."
                )
            load_state(parts[place], remembered, f"algorithm.{place}")

    def report(self) -> dict[str, float]:
        """The parts' numbers about the step, as `train/<name>`."""
        reports = (part.report().items() for part in self._others())
        return {f"train/{name}": value for report in reports for name, value in report}

    def close(self) -> None:
        """Closes the parts."""
        for part in self._others():
            part.close()

    def _advantages(self) -> dict[str, Advantage]:
        """The advantage, and what it is added to, by their places."""
        found, place = dict[str, Advantage](), "advantage"
        part: Advantage | None = self.advantage
        while part is not None:
            found[place] = part
            place, part = f"{place}.base", getattr(part, "base_advantage", None)
        return found

    def _parts(self) -> dict[str, Part | Loss | Teacher]:
        """Every part by its place in the section."""
        found: dict[str, Part | Loss | Teacher] = {**self._advantages()}
        if self.teacher is not None:
            found["teacher"] = self.teacher
        lists: dict[str, Sequence[Part | Loss]] = {
            "filters": self.filters,
            "transforms": self.transforms,
            "losses": self.loss.terms,
        }
        for name, parts in lists.items():
            found |= {f"{name}.{place}": part for place, part in enumerate(parts)}
        return found

    def _others(self) -> Sequence[Part]:
        """Every part but loss and teacher."""
        return (*self._advantages().values(), *self.filters, *self.transforms)


def check_parts(section: AlgorithmSection, asynchronous: bool) -> None:
    """Raises ConfigError where a configuration's parts, teacher and critic do not go together.
    asynchronous: some are trained on samples of older weights."""
    losses = make_loss(section.losses).terms
    transforms = make_transforms(section.transforms)
    advantage = make_advantage(section.advantage)
    check_combination(losses, transforms, before=[advantage])
    if asynchronous:
        check_staleness(losses, [advantage, *transforms])
    needs = algorithm_needs(section)
    check_critic(needs, section.critic)
    teacher = _teacher(section.teacher)
    try:
        check_teacher(teacher, needs)
    finally:
        if teacher is not None:
            teacher.close()


def algorithm_needs(section: AlgorithmSection) -> frozenset[str]:
    """`Algorithm.needs` before it is made; of filters, which need a rollout, by their classes."""
    transforms = make_transforms(section.transforms)
    parts = [make_loss(section.losses), make_advantage(section.advantage), *transforms]
    needs = [part.needs for part in parts]
    for place, component in enumerate(section.filters):
        target, _ = FILTER.check(component, ("tokens",), f"algorithm.filters[{place}]")
        declared = getattr(target, "needs", None)
        needs += [declared] if isinstance(declared, frozenset) else []
    return frozenset().union(*needs) - _filled_by(transforms)


def make_transforms(components: Sequence[Any], response_budget: int = MOST_BUDGET) -> list[Any]:
    """The named transforms. Raises ConfigError, also where an attempt may
    generate too few tokens for one."""
    where = "algorithm.transforms"
    return [as_part(made) for made in _all(TRANSFORM, components, where, tokens=response_budget)]


def _teacher(component: Any) -> Teacher | None:
    return TEACHER.build(component, "algorithm.teacher") if component else None


def check_critic(needs: frozenset[str], critic: CriticOptions | None) -> None:
    """Raises ConfigError where a critic is needed and not there, or there and not needed."""
    if "values" in needs and critic is None:
        told = "expect a critic, as one of them needs values; found none"
        hint = "set algorithm.critic={lr: 1e-5}"
    elif "values" not in needs and critic is not None:
        told = "expect null, as none of them needs values; found one"
        hint = "remove it, or set algorithm.advantage=gae"
    else:
        return
    raise ConfigError(f"algorithm.critic: the other parts {told}: {hint}.")


def _filled_by(transforms: Sequence[Any]) -> frozenset[str]:
    return frozenset().union(*(change.fills for change in transforms))


def make_loss(components: Sequence[Any]) -> Loss:
    """The sum of the named losses, or the only one: [{name: ppo_clip, clip_high: 0.28}, kl].

    Raises ConfigError for an unknown name or keyword, or a value out of range."""
    if not components:
        raise ConfigError(
            "algorithm.losses: expected at least one loss, found none; try [ppo_clip]"
        )
    losses = _all(LOSS, components, "algorithm.losses")
    return as_loss(losses[0]) if len(losses) == 1 else SumLoss(tuple(losses))


def make_advantage(component: Any) -> Advantage:
    """The named advantage: grpo, or {name: grpo, std: none}. Raises as make_loss."""
    return as_part(ADVANTAGE.build(component, "algorithm.advantage"))


def _all(kind: Any, components: Sequence[Any], where: str, **offered: Any) -> list[Any]:
    return [
        kind.build(component, f"{where}[{place}]", **offered)
        for place, component in enumerate(components)
    ]
