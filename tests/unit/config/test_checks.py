"""Configurations that contradict themselves are refused; the plan says what a step amounts to."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from rlflow.config.batch_plan import batch_plan
from rlflow.config.checks import CHOICES, NOT_NEGATIVE, POSITIVE, SHARES, check_config
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError


def test_the_defaults_fit_together() -> None:
    check_config(load_config(), components=False)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.steps=0"], "run.steps: expected a number above 0, found 0"),
        (["rollout.prompts_per_step=0"], "rollout.prompts_per_step: expected a number above 0"),
        (["trainer.lr=.nan"], "trainer.lr: expected a finite number, found nan"),
        (["rollout.max_aborted_share=1.5"], "rollout.max_aborted_share: expected a number from 0 to 1"),
        (["trainer.backend=megatorn"], "Did you mean 'megatron'?"),
        (["algorithm.aggregate=tokenmean"], "Did you mean 'token_mean'?"),
        (["algorithm.losses.0.name=ppo_clipp"], "ppo_clip"),
        (["algorithm.losses.0.clip=.2"], "clip"),
        (["algorithm.advantage.name=grop"], "Did you mean 'grpo'?"),
        (["algorithm.minibatches_per_step=3", "rollout.prompts_per_step=4"], "a divisor of the 32 trajectories"),
        (["rollout.samples_per_prompt=1"], "grpo compares attempts"),
        (["rollout.engine.top_p=0.9"], "rollout.engine.top_p: training samples from the whole distribution"),
        (["rollout.max_total_tokens=512"], "rollout.max_total_tokens: expected more than"),
        (["trainer.tensor_parallel=2"], "cluster.ranks: expected a multiple of"),
        (["trainer.tensor_parallel=2", "trainer.pipeline_parallel=2", "cluster.ranks=6"], "2 x 2 x 1 = 4, found 6"),
        (["trainer.backend=reference", "cluster.ranks=2"], "'reference' runs on one device"),
        (["trainer.backend=reference", "trainer.packing=true"], "trainer.packing: 'reference' pads"),
        (
            ["trainer.backend=reference", "trainer.distributed_optimizer=true"],
            "trainer.distributed_optimizer: 'reference'",
        ),
        (["trainer.backend=reference", "trainer.recompute=full"], "trainer.recompute: 'reference' keeps all activations"),
        (["trainer.recompute=ful"], "trainer.recompute: expected one of none, selective, full, found 'ful'. Did you mean"),
        (["trainer.sequence_parallel=true"], "expected trainer.tensor_parallel of at least 2, found 1"),
        (["trainer.virtual_pipeline=2"], "expected trainer.pipeline_parallel of at least 2, found 1"),
        (["trainer.context_parallel=2"], "= 1 x 1 x 2 = 2, found 0 (one process); set cluster.ranks=2"),
        (["run.name=a/b"], "run.name: expected a name for a directory"),
    ],
)
def test_contradictions_name_the_keys(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, overrides), components=False)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_components_are_checked_against_their_constructors() -> None:
    with pytest.raises(ConfigError, match=r"environment 'search': unknown keyword 'topk'. Did you mean 'top_k'"):
        check_config(load_config(None, ["environment.name=search", "environment.topk=3"]))
    with pytest.raises(ConfigError, match=r"rollout.engine 'embedded': unknown keyword"):
        check_config(load_config(None, ["rollout.engine.max_concurency=3"]))


def test_every_number_of_the_schema_has_a_range() -> None:
    """A new numeric key must be put into one of the range tables."""
    numeric = set()
    for section in dataclasses.fields(RunConfig):
        value = getattr(RunConfig(), section.name)
        for name, hint in typing.get_type_hints(type(value)).items() if dataclasses.is_dataclass(value) else ():
            if {int, float} & {hint, *typing.get_args(hint)}:
                numeric.add(f"{section.name}.{name}")
    assert numeric == {*POSITIVE, *NOT_NEGATIVE, *SHARES}
    assert all(getattr(getattr(RunConfig(), key.split(".")[0]), key.split(".")[1]) in CHOICES[key] for key in CHOICES)


def test_plan_multiplies_as_by_hand() -> None:
    overrides = ["rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "rollout.max_total_tokens=1000",
                 "data.max_prompt_tokens=500", "algorithm.minibatches_per_step=2", "algorithm.epochs_per_step=3",
                 "trainer.tokens_per_microbatch=4000", "cluster.ranks=8", "trainer.tensor_parallel=2",
                 "trainer.pipeline_parallel=2", "run.steps=10"]  # fmt: skip
    config = load_config(None, overrides)
    check_config(config, components=False)
    plan = dict(line.split("  ", 1) for line in batch_plan(config).splitlines())
    assert plan["trajectories"].strip() == "64 per step = 16 prompts x 4 samples"
    assert "at most 64,000 per step = 64 trajectories x 1,000 tokens" in plan["tokens"]
    assert "2 of 32 trajectories x 3 epochs = 6 optimizer updates per step" in plan["mini-batches"]
    assert "of 4,000 tokens" in plan["micro-batches"]
    assert "at most 4 per mini-batch" in plan["micro-batches"]  # 32 rows / 2 data-parallel ranks / 4 rows of 1,000
    assert "8 (a Ray actor each) = 2 tensor x 2 pipeline x 2 data parallel" in plan["ranks"]
    config.trainer.virtual_pipeline = config.trainer.context_parallel = 2
    plan = dict(line.split("  ", 1) for line in batch_plan(config).splitlines())
    assert "2 tensor x 2 pipeline (2 chunks each) x 2 context x 1 data parallel" in plan["ranks"]
    assert "of 4,000 tokens (sum of the rows' lengths)" in plan["micro-batches"]  # chunks that take turns pack
    assert "10 steps = 640 trajectories" in plan["run"]


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[3].glob("recipes/**/config/*.yaml")), ids=lambda path: path.name
)
def test_every_recipe_fits_together(path: Path) -> None:
    check_config(load_config(path))
