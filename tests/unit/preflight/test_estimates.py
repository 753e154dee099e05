"""The memory estimate: by hand, against the parameters that ranks really hold, and (slow) against measured peaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow.config.schema import load_config
from rlflow.models.architecture import Architecture, architecture
from rlflow.models.flops import forward_flops
from rlflow.preflight.estimates import (
    RunSizes,
    checkpoint_bytes,
    estimate,
    largest_microbatch,
    rank_parts,
    run_sizes,
    server_memory,
    update_parts,
)
from rlflow.preflight.step_time import CORE_FLOPS, CORE_MEMORY_RATE, estimate_step
from rlflow.rollout.vllm.facts import CORE, FRONT
from rlflow.trainer.layout import ParallelLayout, stage_parameters

ROOT = Path(__file__).resolve().parents[3]
QWEN_7B = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
SMALL = {"model_type": "qwen2", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 20, "tie_word_embeddings": True}  # fmt: skip


def sizes(model: Architecture, *overrides: str) -> RunSizes:
    names = ["model.path=x", "environment.name=none"]
    return run_sizes(load_config(None, [*names, *overrides]), model)


def engine_memory(sizes: RunSizes) -> dict[str, int]:
    return sizes.engine.memory(sizes.engine_load)


@pytest.fixture(scope="module")
def qwen() -> Architecture:
    return architecture(QWEN_7B)


def test_a_qwen_7b_has_its_published_number_of_parameters(qwen: Architecture) -> None:
    # https://huggingface.co/Qwen/Qwen2.5-7B: 7,615,616,512.
    assert stage_parameters(qwen, ParallelLayout()) == [7_615_616_512]


def test_a_qwen_30b_with_experts_has_its_published_number_of_parameters() -> None:
    # https://huggingface.co/Qwen/Qwen3-30B-A3B: 30,532,122,624, of which a token meets 3.3 billion.
    model = architecture(
        {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    )  # fmt: skip
    whole, experts = 30_532_122_624, 48 * 128 * 3 * 2048 * 768
    assert stage_parameters(model, ParallelLayout()) == [whole]
    assert stage_parameters(model, ParallelLayout(), experts=True) == [experts]
    assert stage_parameters(model, ParallelLayout(expert_parallel=8)) == [
        whole - experts + experts // 8
    ]
    active = whole - experts * 120 // 128 - 151936 * 2048  # without the look-up in the embedding
    assert forward_flops(model, [1], 1) == pytest.approx(2 * active, rel=1e-3)


def test_keys_and_values_that_are_given_back_are_not_there_in_an_update(qwen: Architecture) -> None:
    def held(*overrides: str) -> list[int]:
        return [
            phase.parts.get("keys and values", 0) for phase in estimate(sizes(qwen, *overrides))
        ]

    rollout, update = held("rollout.engine={name: embedded, sleep: false}")
    assert rollout == update > 0
    assert held("rollout.engine={name: embedded, sleep: true}") == [rollout, 0]


def test_weights_gradients_and_optimizer_are_counted_as_by_hand(qwen: Architecture) -> None:
    count = 7_615_616_512
    whole = rank_parts(
        sizes(
            qwen,
            "model.dtype=bfloat16",
            "algorithm.losses=[ppo_clip, {name: kl, coefficient: 0.1}]",
        ),
        0,
    )
    assert whole == {
        "weights": 2 * count,
        "gradients": 4 * count,
        "optimizer": 12 * count,
        "reference, teacher": 2 * count,
    }
    split = sizes(
        qwen,
        "model.dtype=bfloat16",
        "cluster.ranks=4",
        "trainer.distributed_optimizer=true",
        "trainer.offload_snapshots=true",
    )
    assert rank_parts(split, 0) == {
        "weights": 2 * count,
        "gradients": 4 * count,
        "optimizer": 3 * count,
    }
    offloaded = sizes(
        qwen, "model.dtype=bfloat16", "trainer.optimizer={name: adamw, offload: true}"
    )
    assert rank_parts(offloaded, 0)["optimizer"] == 0
    assert rank_parts(sizes(qwen), 0)["optimizer"] == 8 * count


def test_a_tied_embedding_lies_on_both_ends_of_a_pipeline() -> None:
    model = architecture(SMALL)
    # A layer: q 8x8 + 8, k and v 8x4 + 4 each, o 8x8, three of 8x12, two norms of 8.
    layer = 64 + 8 + 2 * (32 + 4) + 64 + 3 * 96 + 16
    embedding, norm = 160, 8
    assert stage_parameters(model, ParallelLayout()) == [4 * layer + embedding + norm]
    assert stage_parameters(model, ParallelLayout(pipeline_parallel=2)) == [
        2 * layer + embedding,
        2 * layer + norm + embedding,
    ]
    halves = (64 + 8) // 2 + 2 * (32 + 4) // 2 + 64 // 2 + 3 * 96 // 2 + 16
    assert stage_parameters(model, ParallelLayout(tensor_parallel=2)) == [
        4 * halves + embedding // 2 + norm
    ]


def test_a_critic_is_a_second_model_with_a_vector_for_a_head(qwen: Architecture) -> None:
    overrides = ("algorithm={advantage: gae, losses: [ppo_clip, value], critic: {lr: 1.0e-5}}",)
    both = rank_parts(sizes(qwen, *overrides), 0)["weights"] // 4
    assert both == 2 * 7_615_616_512 - 152064 * 3584 + 3584 + 1


def test_adapters_are_counted_as_by_hand() -> None:
    model = architecture(SMALL)
    found = rank_parts(
        sizes(
            model,
            "model.dtype=bfloat16",
            "trainer.lora={rank: 2, targets: [q_proj, v_proj, down_proj]}",
        ),
        0,
    )
    adapters = 4 * 2 * ((8 + 8) + (8 + 4) + (8 + 12))  # layers, rank, A's and B's sides
    whole = stage_parameters(model, ParallelLayout())[0]
    assert found == {
        "weights": 2 * (whole + adapters),
        "gradients": 4 * adapters,
        "optimizer": 12 * adapters,
    }


def test_short_rows_fill_a_packed_microbatch_to_its_limit(qwen: Architecture) -> None:
    batch = ("rollout.max_total_tokens=1000", "rollout.max_turns=2", "rollout.max_response_tokens=100",
             "trainer.tokens_per_microbatch=1800")  # fmt: skip
    assert largest_microbatch(sizes(qwen, *batch)) == (1000, 200)
    packed = largest_microbatch(sizes(qwen, *batch, "trainer.packing=true"))
    assert packed == (1800, 400)


def test_activations_fall_with_every_way_to_spare_them(qwen: Architecture) -> None:
    batch = (
        "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=1",
        "rollout.max_total_tokens=1024",
    )

    def activations(*overrides: str, stage: int = 0) -> int:
        return update_parts(sizes(qwen, *batch, *overrides), stage)["activations"]

    whole = activations()
    assert (
        activations("trainer.recompute=full") < activations("trainer.recompute=selective") < whole
    )
    assert activations("trainer.tensor_parallel=2", "cluster.ranks=2") < whole
    assert activations("trainer.tokens_per_microbatch=2048") == whole // 4
    assert activations("trainer.context_parallel=2", "cluster.ranks=2") == whole // 2
    stages = ("trainer.pipeline_parallel=2", "cluster.ranks=2")
    assert activations(*stages, stage=1) < activations(
        *stages, stage=0
    )  # 1F1B: the first stage waits longest


def test_logits_never_exceed_their_chunk(qwen: Architecture) -> None:
    for limit in (64, 512):
        parts = update_parts(sizes(qwen, f"trainer.logits_chunk_mib={limit}"), 0)
        hidden = 2 * 16384 * 3584 * 4
        assert parts["logits"] - hidden <= limit * 2**20 < parts["logits"] + 4 * 152064 * 4


def test_keys_and_values_are_those_of_all_slots_or_of_the_pool(qwen: Architecture) -> None:
    overrides = (
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=4",
        "rollout.max_total_tokens=1000",
    )
    token = 28 * 2 * 4 * 128 * 4  # layers, keys and values, groups, dimensions, float32
    assert (
        engine_memory(sizes(qwen, *overrides))["keys and values"] == 8 * 1024 * token
    )  # blocks of 32
    assert (
        engine_memory(sizes(qwen, *overrides, "rollout.engine.kv_tokens=2048"))["keys and values"]
        == 2048 * token
    )


def test_with_adapters_the_engine_keeps_what_the_policy_is_in(qwen: Architecture) -> None:
    half, lora = "model.dtype=bfloat16", "trainer.lora={rank: 8, targets: [q_proj]}"
    plain, adapted, merged, whole = (
        engine_memory(sizes(qwen, *overrides))["engine's weights"]
        for overrides in (
            (half,),
            (half, lora),
            (half, lora, "trainer.lora.sync=merged"),
            (half, lora, "rollout.engine.dtype=float32"),
        )
    )
    factors = 28 * 8 * (3584 + 3584)  # layers, rank, inputs and outputs
    assert plain == merged == adapted - 2 * factors == (whole - 4 * factors) / 2


def test_vllm_holds_its_weights_a_packed_head_what_it_allots_and_the_larger_of_a_step_and_an_update() -> (
    None
):
    model = architecture(SMALL)
    count, head = stage_parameters(model, ParallelLayout())[0], 20 * 8
    overrides = (
        "rollout.engine={name: vllm, kv_gib: 3, engines: 2}",
        "rollout.max_total_tokens=9000",
    )
    (phase,) = server_memory(sizes(model, *overrides))
    assert phase.process == "vLLM, each of 2 engines" and dict(phase.parts) == {
        "libraries": FRONT + CORE,
        "engine's weights": 4 * (count + head),
        "keys and values": 3 * 2**30,
        "a step of prompts, or files of new weights": 9000 * 3 * (8 + 12) * 4,
    }
    (half,) = server_memory(sizes(model, *overrides, "model.dtype=bfloat16"))
    assert half.parts["engine's weights"] == 2 * (count + head)
    assert server_memory(sizes(model)) == []


def test_an_update_of_vllm_holds_two_buckets(qwen: Architecture) -> None:
    (phase,) = server_memory(sizes(qwen, "rollout.engine={name: vllm, bucket_mib: 2048}"))
    assert phase.parts["a step of prompts, or files of new weights"] == 4 * 2**30


def test_every_process_is_listed(qwen: Architecture) -> None:
    alone = estimate(sizes(qwen))
    assert [(phase.process, phase.phase) for phase in alone] == [
        ("process", "rollout"),
        ("process", "update"),
    ]
    ranks = estimate(sizes(qwen, "cluster.ranks=4", "trainer.pipeline_parallel=2"))
    assert [(phase.process, phase.phase) for phase in ranks] == [
        ("driver", "rollout"), ("rank of stage 1", "update"), ("rank of stage 2", "update")]  # fmt: skip
    assert all(phase.total == sum(phase.parts.values()) > 0 for phase in (*alone, *ranks))
    assert checkpoint_bytes(sizes(qwen))[0] == 12 * 7_615_616_512


def test_the_time_of_a_step_follows_the_operations_and_the_bytes(qwen: Architecture) -> None:
    overrides = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_total_tokens=256",
                 "rollout.max_turns=1", "rollout.max_response_tokens=100",
                 "algorithm.losses=[ppo_clip, {name: kl, coefficient: 0.1}]")  # fmt: skip
    time = estimate_step(sizes(qwen, *overrides), cores=1)
    forward = forward_flops(qwen, [256] * 8, 800)
    assert time["updates"] == pytest.approx(3 * forward / CORE_FLOPS)
    assert time["scores"] == pytest.approx(forward / CORE_FLOPS)
    read = 4 * 7_615_616_512 + 8 * 128 * 28 * 2 * 4 * 128 * 4
    computed_s = forward_flops(qwen, [1] * 8, 8) / CORE_FLOPS
    assert time["sampling"] == pytest.approx(100 * max(read / CORE_MEMORY_RATE, computed_s))
    two = estimate_step(sizes(qwen, *overrides), cores=2)
    assert two["updates"] == pytest.approx(time["updates"] / 2)


@pytest.mark.slow
def test_the_estimate_is_within_15_percent_of_the_peak_at_18m_and_93m_parameters() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "memory_estimate.py"), "--quick"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.strip().splitlines()[-1])["results"]
    assert {result["case"] for result in results} == {"18M", "93M", "18M engine"}
    assert all(result["passed"] for result in results), results
