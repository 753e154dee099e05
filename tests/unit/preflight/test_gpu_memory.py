"""Memory of each GPU, counted by hand: ranks and vLLM on the same GPUs or on their own, awake and
asleep; a run that does not fit is not ready."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.config.schema import load_config
from rlflow.devices.gpu_plan import Bundle
from rlflow.errors import ConfigError
from rlflow.models.architecture import architecture
from rlflow.preflight import gpu_memory as memory
from rlflow.preflight.estimates import PhaseMemory, RunSizes, run_sizes, update_parts
from rlflow.preflight.gpu_memory import (
    GIB,
    check_gpu_memory,
    gpu_memory,
    gpu_phases,
    gpu_table,
    roles,
)
from rlflow.rollout.vllm import facts
from tests.unit.sources import ROOT

COUNT = 7_615_616_512  # parameters of Qwen2.5-7B
QWEN_7B = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
           "tie_word_embeddings": False}  # fmt: skip
QWEN_3B = {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
           "tie_word_embeddings": True}  # fmt: skip
QWEN_1_5B = {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
             "tie_word_embeddings": True}  # fmt: skip
GPU = 80 * GIB
VLLM = "rollout.engine={name: vllm, engines: 4, arguments: {gpu_memory_utilization: 0.5}}"
FOUR = ("cluster.ranks=4", "cluster.gpus_per_rank=1", "model.dtype=bfloat16", VLLM)


def sizes(*overrides: str) -> RunSizes:
    """Of a Qwen2.5-7B."""
    config = load_config(None, ["model.path=x", "environment.name=none", *overrides])
    return run_sizes(config, architecture(QWEN_7B))


def by_phase(found: list[PhaseMemory]) -> dict[tuple[str, str], dict[str, int]]:
    return {(phase.process, phase.phase): dict(phase.parts) for phase in found}


def test_a_rank_and_vllm_on_one_gpu_take_turns() -> None:
    asked = sizes(*FOUR, "trainer.distributed_optimizer=true", "trainer.release_gradients=true")
    found = by_phase(gpu_memory(asked, GPU))
    held = {"libraries": 600 * 2**20, "weights": 2 * COUNT, "optimizer": 12 * COUNT // 4}
    name = "GPUs 0 to 3: rank + vLLM"
    awake = {"vLLM's share": 40 * GIB, "vLLM's context": facts.CONTEXT}
    assert found == {
        (name, "build"): {**held, "gradients": 4 * COUNT, **awake},
        (name, "rollout"): {**held, **awake},
        (name, "update"): {**held, "gradients": 4 * COUNT, **update_parts(asked, 0),
                           "vLLM asleep": facts.ASLEEP},
    }  # fmt: skip


def test_weights_on_their_way_over_the_gpu_have_a_buffer_there() -> None:
    """Of the embedding, which is larger than a bucket, where the bucket is not made larger than that."""
    asked = sizes(*FOUR, "rollout.engine.transfer=ipc")
    name = "GPUs 0 to 3: rank + vLLM"
    found = by_phase(gpu_memory(asked, GPU))
    rollout = found[name, "rollout"]
    assert found[name, "sync"] == {**rollout, "weights to vLLM": 152_064 * 3584 * 2}
    larger = sizes(*FOUR, "rollout.engine.transfer=ipc", "rollout.engine.bucket_mib=2048")
    assert by_phase(gpu_memory(larger, GPU))[name, "sync"]["weights to vLLM"] == 2 * GIB


def test_gradients_that_are_kept_and_a_vllm_that_does_not_sleep_are_there_all_the_time() -> None:
    found = by_phase(gpu_memory(sizes(*FOUR, "rollout.engine.sleep=false"), GPU))
    rollout, update = found.values()
    assert rollout["gradients"] == update["gradients"] == 4 * COUNT
    assert rollout["vLLM's share"] == update["vLLM's share"] == 40 * GIB
    ahead = sizes(*FOUR, "rollout.asynchronous={run_ahead: 1, overlap: true}")
    assert "vLLM's share" in by_phase(gpu_memory(ahead, GPU))[found_name(4), "update"]


def test_adams_float32_weights_are_beside_vllm_before_they_go_to_the_host() -> None:
    asked = sizes(*FOUR, "trainer.optimizer={name: adamw, offload: true}")
    found = by_phase(gpu_memory(asked, GPU))
    assert found[found_name(4), "build"]["optimizer"] == 4 * COUNT
    assert found[found_name(4), "rollout"]["optimizer"] == 0


def test_engines_of_workers_on_the_ranks_gpus_stay_awake() -> None:
    """Nobody tells a worker to sleep: docs/clusters.md says with what the recipe fits."""
    beside = ("rollout.engine.engines=1", "cluster.rollout_workers=4", "cluster.gpus_per_rank=0.5")
    update = by_phase(gpu_memory(sizes(*FOUR, *beside), GPU))[found_name(4), "update"]
    assert update["vLLM's share"] == 40 * GIB and "vLLM asleep" not in update
    recipe = ROOT / "recipes" / "searchr1" / "config" / "qwen2.5_3b.yaml"
    layout = ["cluster.rollout_workers=8", "rollout.engine.engines=1", "rollout.engine.transfer=files",
              "cluster.gpus_per_rank=0.5"]  # fmt: skip
    needed = [
        max(
            one.total
            for one in gpu_memory(
                run_sizes(load_config(recipe, [*layout, *more]), architecture(QWEN_3B)), GPU
            )
        )
        for more in ((), ("trainer.recompute=selective",))
    ]
    assert needed[0] > memory.ASSUMED_GPU > needed[1]


def found_name(gpus: int) -> str:
    return f"GPUs 0 to {gpus - 1}: rank + vLLM"


def test_engines_of_workers_have_gpus_of_their_own() -> None:
    asked = sizes(*FOUR, "rollout.engine.engines=1", "cluster.rollout_workers=2")
    found = by_phase(gpu_memory(asked, GPU))
    assert list(found) == [("GPUs 0 to 3: rank", "update"), ("GPUs 4 to 5: vLLM", "rollout")]
    assert found["GPUs 4 to 5: vLLM", "rollout"] == {
        "vLLM's share": 40 * GIB, "vLLM's context": facts.CONTEXT}  # fmt: skip
    assert not any(part.startswith("vLLM") for part in found["GPUs 0 to 3: rank", "update"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), [(0, 1)] * 4),
        (("rollout.engine.engines=2",), [(0, 1)] * 2 + [(0, 0)] * 2),
        (("rollout.engine.engines=2", "rollout.engine.tensor_parallel=2"), [(0, 1)] * 4),
        (("rollout.engine.engines=6",), [(0, 1)] * 4 + [(None, 1)] * 2),
        (("trainer.pipeline_parallel=2",), [(0, 1)] * 2 + [(1, True)] * 2),
        (("rollout.engine=embedded",), [(0, 0)] * 4),
    ],
)
def test_engines_lie_on_the_ranks_gpus_from_the_first_on(
    overrides: tuple[str, ...],
    expected: list[tuple[int | None, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "visible_gpus", list)
    assert roles(sizes(*FOUR, *overrides)) == expected


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (1, ("rollout.engine.engines=2",), [(0, 2)]),
        (2, ("rollout.engine.engines=3",), [(0, 2), (None, 1)]),
        (3, ("rollout.engine.engines=2", "rollout.engine.tensor_parallel=2"), [(0, 2), (None, 2)]),
        (8, ("rollout.engine.engines=2",), [(0, 1), (None, 1)]),
        (1, ("rollout.engine.tensor_parallel=2",), [(0, 1)] + [(None, 1)] * 7),  # refused elsewhere
        (
            1,
            ("rollout.engine.engines=2", "cluster.address=auto"),
            [(0, 1), (None, 1)],
        ),  # there may be more
        (
            1,
            ("rollout.engine.engines=1", "cluster.rollout_workers=2"),
            [(0, 0), (None, 1), (None, 1)],
        ),
    ],
)
def test_engines_of_a_process_share_the_gpus_that_it_sees(
    gpus: int,
    overrides: tuple[str, ...],
    expected: list[tuple[int | None, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        memory, "visible_gpus", lambda: [Bundle("here", str(one)) for one in range(gpus)]
    )
    assert roles(sizes(*FOUR, "cluster.ranks=1", *overrides)) == expected


def test_engines_that_share_a_gpu_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second GPU that is not there was planned for the second engine: the run looked as if it fitted."""
    two = sizes(*FOUR, "cluster.ranks=1", "rollout.engine.engines=2", "rollout.engine.sleep=true",
                 "trainer.optimizer={name: adamw, offload: true}")  # fmt: skip
    monkeypatch.setattr(memory, "visible_gpus", lambda: [Bundle("here", "0")])
    monkeypatch.setattr(memory, "gpu_bytes", lambda: GPU)
    found = by_phase(gpu_memory(two, GPU))
    assert {name for name, _ in found} == {"GPU 0: rank + vLLM + vLLM"}
    rollout, update = (found["GPU 0: rank + vLLM + vLLM", phase] for phase in ("rollout", "update"))
    assert (rollout["vLLM's share"], rollout["vLLM's context"]) == (GPU, 2 * facts.CONTEXT)
    assert update["vLLM asleep"] == 2 * facts.ASLEEP
    with pytest.raises(ConfigError, match=r"GPU 0: rank \+ vLLM \+ vLLM, update: about "):
        check_gpu_memory(two)
    most = max(sum(parts.values()) for parts in found.values())
    _, row = gpu_table(two)
    assert row.split() == ["here", "0", "0", "0,", "1", f"{most / GIB:.1f}"]


def test_an_engine_over_several_gpus_keeps_nccls_buffers() -> None:
    asked = sizes(*FOUR, "rollout.engine.engines=2", "rollout.engine.tensor_parallel=2")
    phases = gpu_phases(asked, GPU, None, engines=1)
    assert phases == {"rollout": {"vLLM's share": 40 * GIB,
                                  "vLLM's context": facts.CONTEXT + facts.ASLEEP_SPLIT}}  # fmt: skip


def test_a_run_without_gpus_has_none() -> None:
    assert gpu_memory(sizes("cluster.ranks=4", VLLM), GPU) == []
    assert gpu_memory(sizes(*FOUR, "rollout.engine=embedded"), GPU) == []


def test_what_does_not_fit_is_a_problem_that_names_gpu_phase_and_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = sizes(*FOUR, "trainer.recompute=full")
    monkeypatch.setattr(memory, "gpu_bytes", lambda: 300 * GIB)
    check_gpu_memory(whole)
    monkeypatch.setattr(memory, "gpu_bytes", lambda: GPU)
    needed = 18 * COUNT + 600 * 2**20 + 40 * GIB + facts.CONTEXT  # weights, gradients, Adam
    with pytest.raises(
        ConfigError, match=rf"GPUs 0 to 3: rank \+ vLLM, rollout: about {needed / GIB:.1f} GiB"
    ):
        check_gpu_memory(whole)
    with pytest.raises(ConfigError, match=r"update: .*lower trainer\.tokens_per_microbatch"):
        check_gpu_memory(sizes(*FOUR, "rollout.engine.arguments.gpu_memory_utilization=0.02"))


@pytest.mark.parametrize(
    ("recipe", "model", "card"),
    [
        ("qwen2.5_3b", QWEN_3B, 80),
        ("qwen2.5_3b_1gpu", QWEN_3B, 80),
        ("qwen2.5_7b", QWEN_7B, 80),
        ("qwen2.5_7b_2gpu", QWEN_7B, 80),
        ("qwen2.5_7b_lora_1gpu", QWEN_7B, 80),
        ("qwen2.5_1.5b_lora_1gpu", QWEN_1_5B, 24),
    ],
)
def test_recipes_fit_the_cards_that_they_name(
    recipe: str, model: dict[str, Any], card: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # of recipes without ranks
    asked = load_config(ROOT / "recipes" / "searchr1" / "config" / f"{recipe}.yaml")
    needed = run_sizes(asked, architecture(model))
    size = round(card * memory.ASSUMED_GPU / 80)
    found = gpu_memory(needed, size)
    assert len(roles(needed)) == max(asked.cluster.ranks, 1), "no engine beyond the recipe's GPUs"
    assert found and max(phase.total for phase in found) < size
