"""Named components of the algorithm section -> losses and advantages; a constructor's signature is its schema."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rlflow.algorithms.advantages.grpo import grpo
from rlflow.algorithms.base import LossTerm, SumLoss
from rlflow.algorithms.losses.entropy import EntropyLoss
from rlflow.algorithms.losses.kl import KLLoss
from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
from rlflow.algorithms.losses.sft import SFTLoss
from rlflow.errors import ConfigError, did_you_mean
from rlflow.types import Batch

LOSSES: Mapping[str, Callable[..., LossTerm]] = {
    "ppo_clip": PPOClipLoss,
    "kl": KLLoss,
    "entropy": EntropyLoss,
    "sft": SFTLoss,
}
ADVANTAGES: Mapping[str, Callable[..., Tensor]] = {"grpo": grpo}


def make_loss(components: Sequence[Mapping[str, Any]]) -> LossTerm:
    """The sum of the named losses, or the one alone: [{name: ppo_clip, clip_high: 0.28}, {name: kl, coefficient: 1}].

    A name is built in (ppo_clip, kl, entropy, sft; sum takes `losses`, a list like this one) or
    `package.module:Name`. Raises ConfigError for an unknown name, an unknown or missing keyword, or a value that is
    not a number where one must be.
    """
    if not components:
        raise ConfigError("algorithm.losses: expected at least one loss, found none; try [{name: ppo_clip}]")
    losses = [_make_one_loss(component, f"algorithm.losses[{index}]") for index, component in enumerate(components)]
    return losses[0] if len(losses) == 1 else SumLoss(tuple(losses))


def make_advantage(component: Mapping[str, Any]) -> Callable[[Batch], Tensor]:
    """The named advantage with its keywords bound, Batch -> (B,) or (B, T): {name: grpo}. Raises as make_loss."""
    where = "algorithm.advantage"
    function = _resolve(component, ADVANTAGES, where)
    first, *_ = inspect.signature(function).parameters
    keywords = _checked_keywords(component, function, where, given=(first,))
    return functools.partial(function, **keywords)


def _make_one_loss(component: Mapping[str, Any], where: str) -> LossTerm:
    if component.get("name") == "sum":
        keywords = _checked_keywords(component, SumLoss, where)
        return make_loss(keywords["losses"])
    constructor = _resolve(component, LOSSES, where, further=("sum",))
    return constructor(**_checked_keywords(component, constructor, where))


def _resolve(
    component: Mapping[str, Any], table: Mapping[str, Callable[..., Any]], where: str, further: Sequence[str] = ()
) -> Callable[..., Any]:
    name = str(component.get("name", ""))
    if name in table:
        return table[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        known = [*table, *further]
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"{where}.name: expected one of {', '.join(known)} or package.module:Name, found '{name}'.{hint}"
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}.name: cannot import '{name}': {error}") from error


def _checked_keywords(
    component: Mapping[str, Any], target: Callable[..., Any], where: str, given: Sequence[str] = ()
) -> dict[str, Any]:
    keywords = {key: value for key, value in component.items() if key != "name"}
    parameters = {key: one for key, one in inspect.signature(target).parameters.items() if key not in given}
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for key, value in keywords.items():
        if key not in parameters and not open_ended:
            takes = ", ".join(parameters) or "no keywords"
            raise ConfigError(
                f"{where}: {component['name']} takes {takes}; found '{key}'.{did_you_mean(key, parameters)}"
            )
        if key in parameters:
            _check_number(value, parameters[key], f"{where}.{key}")
    for key, one in parameters.items():
        required = one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if required and key not in keywords:
            raise ConfigError(f"{where}: {component['name']} needs '{key}'")
    return keywords


def _check_number(value: Any, parameter: inspect.Parameter, where: str) -> None:
    annotation = parameter.annotation if isinstance(parameter.annotation, str) else ""
    if annotation not in ("float", "float | None", "int", "int | None"):
        return
    if value is None and annotation.endswith("None"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: expected a number, found {value!r} (YAML reads 1e-6 as text: write 1.0e-6)")
