"""The algorithm section of a configuration, resolved into its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rlflow.config.schema import RunConfig
from rlflow.errors import CheckpointError, ConfigError, did_you_mean
from rlflow.trainer.options import CriticOptions
from rlflow.trainer.reducing import finish_metrics, reduce_tokens
from rlflow.types import Batch, Group, Loss, as_loss

FILLED = frozenset(
    {
        "entropy",
        "top_logprobs",
        "values",
        "proximal",
        "reference",
        "teacher",
        "current",
        "current_entropy",
    }
)
"""What the training step and the trainers fill where a part `needs` it."""


@dataclass
class Algorithm:
    """What the training step asks, in this order: filters, advantage, aggregate, transforms,
    loss."""

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
    told_of_idle_updates: bool = field(default=False, init=False)  # once a run is enough

    def __post_init__(self) -> None:
        unknown = sorted(self.needs - FILLED)
        if unknown:
            raise ConfigError(
                f"algorithm: a part needs '{unknown[0]}', which nothing fills; expected {', '.join(sorted(FILLED))}."
                f"{did_you_mean(unknown[0], FILLED)}"
            )
        if "values" in self.needs - self.loss.needs:
            raise ConfigError(
                "algorithm.losses: the advantage reads a critic that no loss trains; expected the loss 'value' among them, found "
                "none that needs values."
            )
        self.refreshes = merged_refreshes([*self.loss.terms, *self._others()])
        check_teacher(self.teacher, self.needs)
        check_combination(self.loss.terms, self.transforms, before=(self.advantage, *self.filters))

    @classmethod
    def from_config(cls, config: RunConfig, response_budget: int, **offered: Any) -> Algorithm:
        """The parts that the configuration names. response_budget: the most tokens that an attempt
        may generate. offered: what filters may name in their signatures (`rollout`), beside
        `seed`."""
        section = config.algorithm
        offered["seed"] = config.run.seed
        made = cls(
            advantage=make_advantage(section.advantage),
            loss=Monitored(make_loss(section.losses)),
            aggregate=AGGREGATE.build(
                section.aggregate, "algorithm.aggregate", tokens=response_budget
            ),
            filters=[
                as_part(made)
                for made in _all(FILTER, section.filters, "algorithm.filters", **offered)
            ],
            transforms=[
                as_part(made)
                for made in _all(
                    TRANSFORM, section.transforms, "algorithm.transforms", tokens=response_budget
                )
            ],
            teacher=TEACHER.build(section.teacher, "algorithm.teacher")
            if section.teacher
            else None,
            minibatches_per_step=section.minibatches_per_step,
            epochs_per_step=section.epochs_per_step,
            seed=config.run.seed,
        )
        check_critic(made.needs, section.critic)
        return made

    @property
    def needs(self) -> frozenset[str]:
        """What the training step puts into the batch beyond what trajectories know: the union over
        all parts, less what transforms fill themselves."""
        needs = frozenset().union(self.loss.needs, *(part.needs for part in self._others()))
        return needs - _filled_by(self.transforms)

    @property
    def max_rounds(self) -> int:
        """Rounds of fresh groups that a step may ask for."""
        return min(
            [part.max_rounds for part in self.filters if not part.whole_step],
            default=Filter.max_rounds,
        )

    def admit(self, groups: list[Group]) -> list[Group]:
        """The groups of one round that every filter but those of whole steps lets through, in
        order."""
        for keep in self.filters:
            groups = groups if keep.whole_step else keep(groups)
        return groups

    def complete(self, groups: list[Group]) -> list[Group]:
        """What a step trains on, of all the groups that were admitted: the filters of whole steps,
        in order."""
        for keep in self.filters:
            groups = keep(groups) if keep.whole_step else groups
        return groups

    @torch.no_grad()
    def credit(self, batch: Batch) -> Batch:
        """The step's batch with its advantages, (B, T) float32, the returns for a critic, and the
        rewards behind them."""
        batch = self._changed(batch, "rewards")
        found = self.advantage(batch)
        advantages, returns = found if isinstance(found, tuple) else (found, batch.returns)
        spread = advantages[:, None] * batch.loss_mask if advantages.dim() == 1 else advantages
        batch = batch.replace(advantages=spread.float(), returns=returns)
        return self._changed(batch, "advantages")

    @torch.no_grad()
    def transform(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The minibatch after every transform, in order, and what they report: their own metrics,
        the share of trained tokens that they kept in the kernels, the mean of their coefficients
        and of their clip range."""
        batch = self._changed(batch, "minibatch")
        reported = dict(batch.metrics)
        if batch.coefficients is not None:
            reported |= {
                "kept": (batch.coefficients != 0).float(),
                "coefficient": batch.coefficients,
            }
        if batch.ratio_low is not None and batch.ratio_high is not None:
            reported |= {"ratio_low": batch.ratio_low, "ratio_high": batch.ratio_high}
        sums = {
            name: float(reduce_tokens(value, batch, "mean")) for name, value in reported.items()
        }
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
        """What the parts remember, by their place in the section; parts that remember nothing are
        left out."""
        return {place: state for place, part in self._parts() if (state := part.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. Raises CheckpointError where a part of the checkpoint is not in
        this algorithm."""
        parts = dict(self._parts())
        unknown = sorted(set(state) - set(parts))
        if unknown:
            raise CheckpointError(
                f"the checkpoint holds the memory of {unknown[0]}, which this configuration does not have; resume with the "
                "algorithm section that the run was started with."
            )
        for place, remembered in state.items():
            parts[place].load_state_dict(remembered)

    def report(self) -> dict[str, float]:
        """What the parts report about the step, as `train/<name>`."""
        return {
            f"train/{name}": value
            for part in self._others()
            for name, value in part.report().items()
        }

    def close(self) -> None:
        """Closes the parts."""
        for part in self._others():
            part.close()

    def _parts(self) -> Iterator[tuple[str, Part | Loss | Teacher]]:
        yield "advantage", self.advantage
        if self.teacher is not None:
            yield "teacher", self.teacher
        lists: dict[str, Sequence[Part | Loss]] = {
            "filters": self.filters,
            "transforms": self.transforms,
            "losses": self.loss.terms,
        }
        for name, parts in lists.items():
            yield from ((f"{name}.{place}", part) for place, part in enumerate(parts))

    def _others(self) -> Sequence[Part]:
        """Every part but the loss."""
        return (self.advantage, *self.filters, *self.transforms)


def check_parts(config: RunConfig) -> None:
    """Returns when the parts that the configuration names go together, teacher and critic included;
    before anything else is made of it. Raises ConfigError."""
    section = config.algorithm
    losses, transforms = make_loss(section.losses).terms, _transforms(config)
    check_combination(losses, transforms)
    if config.asynchrony.on:
        check_staleness(losses, transforms)
    needs = config_needs(config)
    check_critic(needs, section.critic)
    teacher = TEACHER.build(section.teacher, "algorithm.teacher") if section.teacher else None
    try:
        check_teacher(teacher, needs)
    finally:
        if teacher is not None:
            teacher.close()


def config_needs(config: RunConfig) -> frozenset[str]:
    """`Algorithm.needs` of a configuration, before a rollout is there to make its filters with: of
    those, what their classes say."""
    section, transforms = config.algorithm, _transforms(config)
    classes = [
        FILTER.check(component, ("tokens",), f"algorithm.filters[{place}]")[0]
        for place, component in enumerate(section.filters)
    ]
    declared = [
        needs for part in classes if isinstance(needs := getattr(part, "needs", None), frozenset)
    ]
    others = [
        make_loss(section.losses).needs,
        make_advantage(section.advantage).needs,
        *(part.needs for part in transforms),
    ]
    return frozenset().union(*declared, *others) - _filled_by(transforms)


def _transforms(config: RunConfig) -> list[Any]:
    budget = config.rollout.max_turns * config.rollout.max_response_tokens
    return [
        as_part(made)
        for made in _all(
            TRANSFORM, config.algorithm.transforms, "algorithm.transforms", tokens=budget
        )
    ]


def check_critic(needs: frozenset[str], critic: CriticOptions | None) -> None:
    """Raises ConfigError where the parts need a critic and there is none, or the other way
    round."""
    if ("values" in needs) == (critic is not None):
        return
    expected = (
        "null, as none of them needs values"
        if critic is not None
        else "a critic, as one of them needs values"
    )
    hint = (
        "remove it, or set algorithm.advantage=gae"
        if critic is not None
        else "set algorithm.critic={lr: 1e-5}"
    )
    raise ConfigError(
        f"algorithm.critic: the other parts expect {expected}; found {'none' if critic is None else 'one'}: {hint}."
    )


def _filled_by(transforms: Sequence[Any]) -> frozenset[str]:
    """What transforms fill themselves."""
    return frozenset().union(
        *(change.fills for change in transforms if isinstance(change, Transform))
    )


def make_loss(components: Sequence[Any]) -> Loss:
    """The sum of the named losses, or the only one alone: [{name: ppo_clip, clip_high: 0.28},
    {name: kl, coefficient: 1}].

    Raises ConfigError for an unknown name or keyword, or a value out of range.
    """
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
