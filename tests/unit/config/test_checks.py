"""Configurations that contradict themselves are refused; the plan says what a step amounts to."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from rlflow.config.batch_plan import batch_plan
from rlflow.config.checks import check_config
from rlflow.config.loading import config_keys
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from tests.reference import ORACLE


def test_the_defaults_fit_together() -> None:
    check_config(load_config(), components=False)


@pytest.mark.parametrize(
    "advantage", ["running", "{name: reinforce, baseline: running}", "reinforce_pp"]
)
def test_advantages_that_compare_no_attempts_do_with_one(advantage: str) -> None:
    check_config(
        load_config(None, ["rollout.samples_per_prompt=1", f"algorithm.advantage={advantage}"]),
        components=False,
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["run.steps=0"], "run.steps: expected a whole number from 1 to 1000000000, found 0"),
        ([f"run.steps={10**30}"], "run.steps: expected a whole number from 1 to 1000000000"),
        ([f"rollout.max_turns={10**30}"], "of at most 9223372036854775807"),
        ([f"trainer.lr={10**400}"], "trainer.lr: expected a"),
        (["cluster.address=10.0.0.1:6379"], "cluster.ranks and cluster.rollout_workers are 0"),
        (
            ["rollout.prompts_per_step=0"],
            "rollout.prompts_per_step: expected a whole number above 0",
        ),
        (["trainer.lr=.nan"], "trainer.lr: expected a number above 0, found nan"),
        (
            ["rollout.faults.max_aborted_share=1.5"],
            "rollout.faults.max_aborted_share: expected a number from 0 to 1",
        ),
        (["trainer.backend=megatorn"], "Did you mean 'megatron'?"),
        (["algorithm.aggregate=tokenmean"], "Did you mean 'token_mean'?"),
        (["algorithm.losses.0.name=ppo_clipp"], "ppo_clip"),
        (["algorithm.losses.0.clip=.2"], "clip"),
        (["algorithm.advantage.name=grop"], "Did you mean 'grpo'?"),
        (
            ["algorithm.minibatches_per_step=3", "rollout.prompts_per_step=4"],
            "a divisor of the 32 trajectories",
        ),
        (["rollout.samples_per_prompt=1"], "grpo compares attempts"),
        (["rollout.samples_per_prompt=1", "algorithm.advantage=rloo"], "rloo compares attempts"),
        (
            ["rollout.samples_per_prompt=1", "algorithm.advantage=reinforce"],
            "reinforce compares attempts",
        ),
        (
            [
                "rollout.samples_per_prompt=1",
                "algorithm.advantage=running",
                "algorithm.filters=[dynamic_sampling]",
            ],
            "dynamic_sampling compares attempts at the same prompt; expected at least 2, found 1",
        ),
        (
            [
                "rollout.samples_per_prompt=1",
                "algorithm.advantage=running",
                "algorithm.filters=[zero_advantage]",
            ],
            "zero_advantage compares attempts",
        ),
        (
            ["algorithm.transforms=[{name: overlong}]"],
            "algorithm.transforms[0] 'overlong': missing keyword buffer",
        ),
        (
            ["algorithm.transforms=[{name: normalize_advantages, over: token}]"],
            "Did you mean 'tokens'?",
        ),
        (
            ["rollout.engine.top_p=0.9"],
            "rollout.engine.top_p: training samples from the whole distribution",
        ),
        (["rollout.max_total_tokens=512"], "rollout.max_total_tokens: expected more than"),
        (["trainer.tensor_parallel=2"], "cluster.ranks: expected a multiple of"),
        (
            ["trainer.tensor_parallel=2", "trainer.pipeline_parallel=2", "cluster.ranks=6"],
            "2 x 2 x 1 = 4, found 6",
        ),
        ([f"trainer.backend={ORACLE}", "cluster.ranks=2"], "'reference' runs on one device"),
        (
            [f"trainer.backend={ORACLE}", "trainer.packing=true"],
            "trainer.packing: 'reference' pads",
        ),
        (
            [f"trainer.backend={ORACLE}", "trainer.distributed_optimizer=true"],
            "trainer.distributed_optimizer: 'reference'",
        ),
        (
            [f"trainer.backend={ORACLE}", "trainer.recompute=full"],
            "trainer.recompute: 'reference' keeps all activations",
        ),
        (
            ["trainer.recompute=ful"],
            "full or a list ([a, b]) of one of core_attn, mlp, found 'ful' (text). Did you mean 'full'?",
        ),
        (
            ["trainer.sequence_parallel=true"],
            "expected trainer.tensor_parallel of at least 2, found 1",
        ),
        (
            ["trainer.virtual_pipeline=2"],
            "expected trainer.pipeline_parallel of at least 2, found 1",
        ),
        (
            ["trainer.context_parallel=2"],
            "= 1 x 1 x 2 = 2, found 0 (one process); set cluster.ranks=2",
        ),
        (
            ["trainer.optimizer.beta2=1.0"],
            "trainer.optimizer.beta2: expected a number from 0 below 1, found 1.0",
        ),
        (
            ["trainer.optimizer.eps=-1"],
            "trainer.optimizer.eps: expected a number above 0, found -1",
        ),
        (["trainer.optimizer=sgd"], "trainer.optimizer: unknown name 'sgd'. Known: adamw"),
        (
            ["trainer.schedule={name: cosine, min_lr: 1}"],
            "trainer.schedule.min_lr: expected at most trainer.lr = 1e-06, found 1",
        ),
        (["trainer.schedule.warm_up_steps=3"], "Did you mean 'warmup_steps'?"),
        (
            [f"trainer.backend={ORACLE}", "trainer.optimizer.offload=true"],
            "trainer.optimizer.offload: 'reference'",
        ),
        (
            ["algorithm.losses.0.clip_high=.nan"],
            "algorithm.losses[0].clip_high: expected a number from 0 or null, found nan",
        ),
        (
            ["metrics.sinks=[tensorbord]"],
            "metrics.sinks[0]: unknown name 'tensorbord'. Did you mean 'tensorboard'?",
        ),
        (
            ["metrics.sinks=[{name: wandb, projct: x}]"],
            "metrics.sinks[0] 'wandb': unknown keyword 'projct'",
        ),
        (["run.name=a/b"], "run.name: expected a name for a directory"),
    ],
)
def test_contradictions_name_the_keys(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, overrides), components=False)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_components_are_checked_against_their_constructors() -> None:
    with pytest.raises(
        ConfigError, match=r"environment 'search': unknown keyword 'topk'. Did you mean 'top_k'"
    ):
        check_config(load_config(None, ["environment.name=search", "environment.topk=3"]))
    with pytest.raises(ConfigError, match=r"rollout.engine 'embedded': unknown keyword"):
        check_config(load_config(None, ["rollout.engine.max_concurency=3"]))
    with pytest.raises(
        ConfigError,
        match=r"max_concurrency: expected a whole number above 0, found 'lots' \(text\)",
    ):
        check_config(load_config(None, ["rollout.engine.max_concurrency=lots"]))
    for given in (
        "max_concurrency=0",
        "prefill_tokens=-1",
        "max_tokens=0",
        "kv_tokens=1",
        "dtype=float16",
    ):
        key = given.partition("=")[0]  # before the dry run estimates with it
        with pytest.raises(ConfigError, match=rf"rollout.engine.{key}: expected"):
            check_config(load_config(None, [f"rollout.engine.{given}", "environment.name=search"]))
    with pytest.raises(
        ConfigError,
        match=r"environment.top_k: expected a whole number above 0, found 'many' \(text\)",
    ):
        check_config(load_config(None, ["environment.name=search", "environment.top_k=many"]))


def numbers(schema: type, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from numbers(hint, f"{name}.")
        kinds = (
            () if typing.get_origin(hint) is typing.Annotated else (hint, *typing.get_args(hint))
        )
        yield from ((path + name, kind) for kind in kinds if kind in (int, float))


def test_every_number_of_the_schema_has_a_range() -> None:
    assert [key for key, _ in numbers(RunConfig)] == []


def test_values_that_python_sets_are_checked_as_those_of_a_file() -> None:
    config = load_config()
    config.run.steps = 0
    with pytest.raises(
        ConfigError, match=r"run.steps: expected a whole number from 1 to \d+, found 0"
    ):
        check_config(config)


def test_the_trunk_of_the_configuration_stays_small() -> None:
    assert len(config_keys(RunConfig)) <= 101


def test_plan_says_how_far_episodes_run_ahead() -> None:
    ahead = [
        "rollout.prompts_per_step=16",
        "rollout.asynchronous.max_staleness=4",
        "rollout.asynchronous.run_ahead=2",
    ]
    assert "asynchronous" not in batch_plan(load_config(None, ahead[:1]))
    assert (
        "at most 48 prompts under way or waiting; no trained token older than 4 updates"
        in batch_plan(load_config(None, ahead))
    )


def test_plan_multiplies_as_by_hand() -> None:
    overrides = ["rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "rollout.max_total_tokens=1000",
                 "data.max_prompt_tokens=500", "algorithm.minibatches_per_step=2", "algorithm.epochs_per_step=3",
                 "trainer.tokens_per_microbatch=4000", "cluster.ranks=8", "trainer.tensor_parallel=2",
                 "trainer.pipeline_parallel=2", "run.steps=10"]  # fmt: skip
    config = load_config(None, overrides)
    check_config(config, components=False)
    plan = dict(line.split("  ", 1) for line in batch_plan(config).splitlines())
    assert plan["trajectories"].strip() == "64 per step = 16 prompts x 4 samples"
    assert plan["evaluation"].strip() == "at the start, every 25 steps; all tasks"
    some = batch_plan(load_config(None, ["evaluation.questions=16"]))
    assert "every 25 steps; 16 tasks, all tasks at the end" in some
    assert "at most 64,000 per step = 64 trajectories x 1,000 tokens" in plan["tokens"]
    assert "2 of 32 trajectories x 3 epochs = 6 optimizer updates per step" in plan["mini-batches"]
    assert "of 4,000 tokens" in plan["micro-batches"]
    assert (
        "at most 4 per mini-batch" in plan["micro-batches"]
    )  # 32 rows / 2 data-parallel ranks / 4 rows of 1,000
    assert "8 (a Ray actor each) = 2 tensor x 2 pipeline x 2 data parallel" in plan["ranks"]
    config.trainer = dataclasses.replace(config.trainer, virtual_pipeline=2, context_parallel=2)
    plan = dict(line.split("  ", 1) for line in batch_plan(config).splitlines())
    assert "2 tensor x 2 pipeline (2 chunks each) x 2 context x 1 data parallel" in plan["ranks"]
    assert (
        "of 4,000 tokens (sum of the rows' lengths)" in plan["micro-batches"]
    )  # chunks that take turns pack
    assert "10 steps = 640 trajectories" in plan["run"]
