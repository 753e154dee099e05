"""A run on CPU cores against the memory of its machine, and the sizes that it has where it says none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.models.architecture import Architecture, architecture
from rlflow.preflight.estimates import LIBRARIES, RunSizes, run_sizes
from rlflow.preflight.host_memory import (
    CPU_SIZES,
    check_host_memory,
    engine_room,
    host_memory,
    sized_config,
)

GIB = 2**30
SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
           "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
           "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}  # fmt: skip
NAMED = ["model.path=x", "environment.name=mathematics"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a run without GPUs")


def config(*overrides: str) -> RunConfig:
    return load_config(None, [*NAMED, *overrides])


def sizes(model: Architecture, *overrides: str) -> RunSizes:
    return run_sizes(config(*overrides), model)


@pytest.fixture(scope="module")
def model() -> Architecture:
    return architecture(SMOLLM2)


def test_keys_and_values_take_half_of_what_is_free_at_the_most(model: Architecture) -> None:
    token = 30 * 2 * 3 * 64 * 4  # layers, keys and values, groups, width, bytes
    plain = sizes(model)
    engine, load = plain.engine, plain.engine_load
    assert engine.memory(load)["keys and values"] == 128 * 4096 * token  # 22.5 GiB
    room = engine_room(plain, 24 * GIB)
    assert room == 24 * GIB - LIBRARIES - 134_515_008 * 4
    block = 16 * token
    assert engine.memory(load, room)["keys and values"] == room // 2 // block * block
    asked = sizes(model, "rollout.engine.kv_tokens=1600")
    assert asked.engine.memory(load, room)["keys and values"] == 1600 * token
    (rollout, *_) = host_memory(plain, 24 * GIB)
    assert rollout.parts["keys and values"] < 12 * GIB


def test_what_does_not_fit_names_its_largest_posts_and_their_keys(model: Architecture) -> None:
    with pytest.raises(ConfigError, match="this machine has 23") as refused:
        check_host_memory(sizes(model), 23 * GIB + GIB // 2)
    told = str(refused.value)
    assert told.index("activations") < told.index("keys and values")
    assert "trainer.tokens_per_microbatch" in told and "rollout.engine.kv_tokens" in told
    check_host_memory(sizes(model), 200 * GIB)
    check_host_memory(
        sizes(model, "trainer.tokens_per_microbatch=2048", "rollout.max_total_tokens=1024"),
        23 * GIB,
    )


def test_every_process_of_this_machine_counts_and_none_of_others(model: Architecture) -> None:
    small = ("trainer.tokens_per_microbatch=2048", "rollout.max_total_tokens=1024")
    alone = max(phase.total for phase in host_memory(sizes(model, *small), 100 * GIB))
    ranks = host_memory(sizes(model, *small, "cluster.ranks=4"), 100 * GIB)
    (together,) = ranks
    assert together.parts["weights"] == 4 * 134_515_008 * 4
    assert together.parts["engine's weights"] == 134_515_008 * 4
    assert together.parts["libraries"] == 5 * LIBRARIES and together.total > alone
    elsewhere = sizes(model, "cluster.ranks=4", "cluster.address=10.0.0.1:6379")
    assert host_memory(elsewhere, GIB) == []
    on_gpus = sizes(model, "cluster.ranks=4", "cluster.gpus_per_rank=1")
    assert host_memory(on_gpus, GIB) == []


def test_a_run_that_says_nothing_of_its_size_gets_a_cpus(
    tmp_path: Path, model: Architecture
) -> None:
    sized, note = sized_config(None, NAMED)
    rollout = sized.rollout
    assert rollout.prompts_per_step * rollout.samples_per_prompt == 32
    assert (rollout.max_total_tokens, sized.trainer.tokens_per_microbatch) == (1024, 2048)
    assert all(f"{key}={value}" in note for key, value in CPU_SIZES.items())
    check_host_memory(run_sizes(sized, model), 12 * GIB)
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {lr: 1.0e-5}\nrollout: {max_turns: 2}\n")
    assert sized_config(file, NAMED)[0].rollout.samples_per_prompt == 4


@pytest.mark.parametrize("override", [f"{key}=512" for key in CPU_SIZES])
def test_one_size_that_is_said_leaves_all_as_they_are(tmp_path: Path, override: str) -> None:
    assert sized_config(None, [*NAMED, override]) == (config(override), "")
    section, key = override.partition("=")[0].split(".")
    file = tmp_path / "mine.yaml"
    file.write_text(f"{section}: {{{key}: 512}}\n")
    assert sized_config(file, NAMED) == (config(override), "")


def test_a_run_for_gpus_keeps_the_defaults() -> None:
    override = "cluster={ranks: 2, gpus_per_rank: 1}"
    assert sized_config(None, [*NAMED, override]) == (config(override), "")
