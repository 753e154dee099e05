"""Which parts are refused together, and that the others are not."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from rlflow.algorithms import algorithm
from rlflow.algorithms.advantages.opd import OnPolicyDistillation
from rlflow.algorithms.advantages.vtrace import VTrace
from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.base import Advantage, Transform, as_part
from rlflow.algorithms.combinations import check_combination, name_of
from rlflow.algorithms.filters.success_pool import SuccessPool
from rlflow.algorithms.losses.kl import KLLoss
from rlflow.algorithms.losses.ppo_clip import PPOClipLoss
from rlflow.algorithms.transforms.decoupled import Decoupled
from rlflow.algorithms.transforms.dppo import DPPO
from rlflow.algorithms.transforms.kl_reward import KLReward
from rlflow.algorithms.transforms.kpop import KPop
from rlflow.algorithms.transforms.m2po import M2PO
from rlflow.algorithms.transforms.sequence_mask import SequenceMask
from rlflow.algorithms.transforms.tis import TruncatedImportance
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.types import Loss


def check_parts(config: RunConfig) -> None:
    algorithm.check_parts(config.algorithm, config.asynchrony.on)


def configured(losses: list[Any], transforms: list[Any]) -> RunConfig:
    return load_config(
        None,
        [
            f"algorithm.losses={json.dumps(losses)}",
            f"algorithm.transforms={json.dumps(transforms)}",
        ],
    )


def made(losses: list[Any], transforms: list[Any]) -> Algorithm:
    return Algorithm.from_config(configured(losses, transforms), response_budget=8)


def on_proximal(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "anchor": "proximal", **options}


GSPO_OF_TOKENS = on_proximal("gspo", level="token")
UNCLIPPED = {"name": "ppo_clip", "clip_low": None, "clip_high": None}


OF_KERNELS = [
    *(
        "dppo",
        "kpop",
        "high_entropy_tokens",
        "high_entropy_steps",
        "only_sources",
        "kept_mean",
        "tis",
    ),
    *({"name": "mis", "weigh": False}, {"name": "sequence_mask", "threshold": 0.1}),
]


@pytest.mark.parametrize(
    ("losses", "transforms", "message"),
    [
        (
            ["ppo_clip"],
            ["decoupled"],
            r"transform decoupled with loss ppo_clip: .*applied twice.*anchor: proximal",
        ),
        (["sft", "cispo"], ["tis"], "applied twice"),
        (
            ["ppo_clip"],
            [{"name": "mis", "level": "geometric"}],
            "transform mis with loss ppo_clip.*applied twice",
        ),
        (
            [on_proximal("ppo_clip")],
            ["decoupled", "tis"],
            "transform decoupled with transform tis: .*applied twice.*Keep one",
        ),
        ([on_proximal("ppo_clip")], ["icepop", "decoupled"], "applied twice"),
        (
            [on_proximal("soft_adaptive")],
            ["decoupled"],
            "with loss soft_adaptive: .*clip range.*Use tis",
        ),
        (["reinforce"], ["decoupled"], "with loss reinforce: .*Use tis"),
        (
            [on_proximal("gspo")],
            ["tis"],
            "transform tis with loss gspo: the tokens of a row share one ratio",
        ),
        (
            ["gspo"],
            ["high_entropy_tokens"],
            "high_entropy_tokens with loss gspo: the tokens of a row share",
        ),
        (
            ["gmpo"],
            ["high_entropy_steps"],
            "high_entropy_steps with loss gmpo: the tokens of a row share",
        ),
        (["gmpo"], ["dppo"], "with loss gmpo: the tokens of a row share one ratio"),
        (
            [on_proximal("ppo_clip")],
            [{"name": "m2po", "variant": "range"}],
            "sets the clip range.*anchor: rollout",
        ),
        (["aipo"], [{"name": "m2po", "variant": "winsor"}], "sets the clip range"),
        (["aipo"], ["dppo", "m2po"], "transform dppo with transform m2po: each is a trust region"),
        *((["sft"], [change], "no loss is one") for change in OF_KERNELS),
        (
            [on_proximal("ppo_clip")],
            ["kpop", {"name": "decoupled", "proximal": "loglinear"}],
            "kpop needs 'proximal', which transform decoupled fills only after it; put decoupled first",
        ),
    ],
)
def test_combinations_without_sense_are_refused_with_the_reason(losses, transforms, message):
    for build in (check_parts, lambda config: Algorithm.from_config(config, response_budget=8)):
        with pytest.raises(ConfigError, match=message):
            build(configured(losses, transforms))


@pytest.mark.parametrize(
    ("losses", "transforms"),
    [
        ([on_proximal("ppo_clip")], ["decoupled"]),
        ([on_proximal("ppo_clip")], ["kpop", {"name": "decoupled", "cap": 6.0}, "kept_mean"]),
        ([on_proximal("ppo_clip")], [{"name": "decoupled", "proximal": "loglinear"}, "kpop"]),
        ([on_proximal("ppo_clip")], [{"name": "m2po", "variant": "mask_all"}, "decoupled"]),
        (["ppo_clip"], [{"name": "m2po", "variant": "range", "threshold": 0.004}]),
        ([UNCLIPPED], ["m2po", {"name": "sequence_mask", "threshold": 0.1}]),
        ([{"name": "aipo", "max_ratio": 20.0}], ["dppo"]),
        (["reinforce"], ["tis"]),
        (["ppo_clip"], [{"name": "mis", "weigh": False}]),
        ([on_proximal("gspo")], [{"name": "tis", "level": "sequence"}]),
        ([GSPO_OF_TOKENS], ["icepop"]),
        (["gspo", "sft"], [{"name": "sequence_mask", "threshold": 0.1}]),
        ([on_proximal("soft_adaptive")], ["tis"]),
    ],
)
def test_combinations_with_sense_are_not(losses, transforms):
    assert len(made(losses, transforms).transforms) == len(transforms)


def test_an_interpolated_policy_is_not_computed_as_well():
    algorithm = made([on_proximal("ppo_clip")], [{"name": "decoupled", "proximal": "linear"}])
    assert algorithm.needs == {"entropy", "current", "rollout"}
    assert made([on_proximal("ppo_clip")], ["decoupled"]).needs == {"entropy", "proximal"}


def test_a_part_before_the_transforms_cannot_have_what_they_fill():
    early = as_part(lambda batch: batch.rewards)
    object.__setattr__(early, "needs", frozenset({"proximal"}))
    algorithm = made([on_proximal("ppo_clip")], ["decoupled"])
    with pytest.raises(ConfigError, match="needs 'proximal'"):
        Algorithm(
            early, algorithm.loss, algorithm.aggregate, transforms=[Decoupled(proximal="linear")]
        )


def test_attempts_without_log_probs_need_the_trainers():
    pool = SuccessPool(seed=0, recompute=True)
    with pytest.raises(
        ConfigError, match=r"filter success_pool with ppo_clip: .* set anchor: proximal"
    ):
        check_combination([PPOClipLoss()], [], before=[pool])
    check_combination([PPOClipLoss(anchor="proximal")], [], before=[pool])
    check_combination([PPOClipLoss()], [], before=[SuccessPool(seed=0)])


VTRACE_OF_TEACHER = {"name": "opd", "base": "vtrace"}


@pytest.mark.parametrize(
    ("advantage", "losses", "transforms", "message"),
    [
        (
            "vtrace",
            ["ppo_clip", "value"],
            [],
            "advantage vtrace with loss ppo_clip: .*applied twice.*anchor: proximal",
        ),
        (
            "vtrace",
            [on_proximal("ppo_clip"), "value"],
            ["tis"],
            "advantage vtrace with transform tis: .*applied twice",
        ),
        (
            VTRACE_OF_TEACHER,
            [on_proximal("ppo_clip"), "value"],
            ["tis"],
            "advantage opd with transform tis: .*applied twice",
        ),
        (
            "gdpo",
            ["ppo_clip"],
            [{"name": "overlong", "buffer": 5}],
            "transform overlong with advantage gdpo: .*does not read",
        ),
        (
            "opd",
            ["ppo_clip"],
            ["affine_reward"],
            "transform affine_reward with advantage opd: .*does not read",
        ),
        (
            {"name": "opd", "base": "gdpo"},
            ["ppo_clip"],
            ["affine_reward"],
            "transform affine_reward with advantage opd",
        ),
    ],
)
def test_an_advantage_that_undoes_another_part_or_is_undone_is_refused(
    advantage, losses, transforms, message
):
    with pytest.raises(ConfigError, match=message):
        check_parts(
            load_config(
                {"algorithm": {"advantage": advantage, "losses": losses, "transforms": transforms}}
            )
        )


def test_the_rewards_of_an_advantage_beside_the_teachers_can_be_changed():
    check_combination([PPOClipLoss()], [KLReward(0.1)], before=[OnPolicyDistillation(base="grpo")])


def test_vtrace_corrects_for_stale_samples_itself():
    check_parts(load_config(None, ["rollout.asynchronous.max_staleness=2"], preset="oni"))


@pytest.mark.parametrize(
    ("part", "refused"),
    [
        (KLLoss(0.1), True),
        (KLLoss(0.1, anchor="proximal"), False),
        (KLLoss(0.1, "k3"), False),
        (KLReward(0.1), True),
        (KLReward(0.1, anchor="proximal"), False),
        (DPPO(), True),
        (DPPO(anchor="proximal"), False),
        (SequenceMask(0.1), True),
        (KPop(), True),
        (M2PO(), True),
        (M2PO("mask_all"), True),
        (Decoupled(proximal="loglinear"), True),
        (Decoupled(), False),
        (TruncatedImportance(), False),
        (VTrace(), True),
        (OnPolicyDistillation(), True),
        (OnPolicyDistillation(anchor="proximal"), False),
    ],
)
def test_attempts_without_log_probs_are_refused_to_every_part_that_reads_them(part, refused):
    losses = [PPOClipLoss(anchor="proximal"), *([part] if isinstance(part, Loss) else [])]
    transforms = [part] if isinstance(part, Transform) else []
    before = [part] if isinstance(part, Advantage) else []
    told = pytest.raises(
        ConfigError,
        match=f"filter success_pool with {name_of(part)}: it brings attempts without the log-probs",
    )
    with told if refused else nullcontext():
        check_combination(losses, transforms, before=[*before, SuccessPool(seed=0, recompute=True)])
