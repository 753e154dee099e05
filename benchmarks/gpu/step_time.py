#!/usr/bin/env python
"""How long a step of a recipe should take on GPUs, line by line: a model, not a measurement.

    python benchmarks/gpu/step_time.py [--config FILE] [--gpu H100] [--efficiency 0.45] [section.key=value ...]

Operations are counted by rlflow/models/flops.py, sizes are the configuration's; what the trainer
and the engine do is read from code and configuration (`features`); every constant has its source
beside it. Without --config: the 3B recipe on 8 GPUs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

RECIPE = ROOT / "recipes" / "searchr1" / "config" / "qwen2.5_3b.yaml"
QWEN = {  # Qwen2.5's config.json by size, so that nothing has to be fetched
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "3B": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
BF16 = 2


@dataclass(frozen=True)
class Gpu:
    """Of NVIDIA's data sheets: dense bfloat16 FLOP/s, bytes/s of its memory, of NVLink in one
    direction, of PCIe."""

    flops: float
    memory: float
    nvlink: float = 450e9
    pcie: float = 50e9  # Gen5 x16, 64e9 nominal


GPUS = {
    "H100": Gpu(989e12, 3.35e12),
    "H200": Gpu(989e12, 4.8e12),
    "A100": Gpu(312e12, 2.0e12, 300e9, 25e9),
}


@dataclass(frozen=True)
class Episodes:
    """What an episode is like. Search-R1 with Qwen2.5-3B after some training; assumed, as RLinf
    publishes none of it."""

    tokens: int = 1500  # in all
    trained: float = 0.4  # of them, sampled by the policy; the rest are prompt and passages
    longest: float = (
        2.0  # sampled tokens of an engine's longest episode over the mean: what a wave waits for
    )


EPISODES = Episodes()
UNFUSED, FUSED = 0.45, 0.50
"""Of the peak that products reach in training: assumed. 0.45 is what is aimed at; the best
published figure of dense RL is about 0.35. Rope and SwiGLU fusion: "~20%" and "~25%" of training
performance in NeMo-RL's grpo_math_1B.yaml; a tenth in all is taken."""
PUBLISHED = 0.35
HEAD_S, HEAD_FUSED_S = 7e-6, 2.5e-6
"""Per trained token on an H100: passes over 152k logits in float32, 128 bytes of traffic each.
Fused about a third: assumed."""
RECOMPUTED_MLP = 0.88  # share of the MLP in a 3B layer's products
PAGEABLE, OBJECT_STORE, FILE_WRITE, FILE_READ = 3e9, 2e9, 5e9, 4.6e9
"""Bytes/s: device to pageable memory; Ray's object store and the driver's copy; a file in memory
written by the driver, one for each engine; read by one engine (docs/benchmarks.md). But the last
assumed."""
CALL_S = 0.02  # assumed: a call to an engine's process and back, per bucket
BUCKET = 256 * 2**20
WAKE_S = 0.3  # assumed: vLLM maps its memory again, weights first, then keys and values
BATCH_BYTES = 28  # per token of a batch: int64 ids, five float32 rows
BATCHES = 4  # passes of a step: two scores, two mini-batches
BATCHES_PUT = 2  # of them: both scores are of the same tensors, each mini-batch is half of them
WIRE = 1.2e9  # bytes/s through Ray with a copy at both ends
PROBE_S, PROBES_TOGETHER_S = 0.15, 0.3  # of an engine, one behind the other; of all at once
DECODE_SHARE = 0.7  # of the memory's bytes/s that decoding reaches
DECODE_STEP_S = (
    2.5e-3  # scheduler, sampling, launch: 6 ms in all at 128 sequences of a 3B model, assumed
)
SEED_S = (
    6e-6  # per request and step with a seed of its own (vLLM, topk_topp_sampler.py: a Python loop)
)
SEARCH_S = 0.3  # until the first search is answered; later ones overlap with decoding
OPTIMIZER_BYTES = (
    28  # per parameter: gradient, two moments and the float32 weight read, three written
)


@dataclass(frozen=True)
class Features:
    """What the code does; True is the faster way, but for seeds."""

    fused: bool  # rope and SwiGLU
    fused_head: bool
    scored_only: bool  # logits of trained tokens alone in scoring passes
    device_weights: bool  # by CUDA IPC from each rank to the engine on its GPU
    shared_files: bool  # else each engine gets files of its own
    rows_per_rank: bool  # a rank gets its rows, unpadded
    batches_once: (
        bool  # each tensor is put into Ray's memory once; ranks copy their rows from there
    )
    probes_together: bool
    seeds: bool  # one per request
    recompute: tuple[str, ...]  # modules that are computed again; full: whole layers
    concurrency: int


DESK_CHECK = Features(
    fused=False,
    fused_head=False,
    scored_only=False,
    device_weights=False,
    shared_files=False,
    rows_per_rank=False,
    batches_once=False,
    probes_together=False,
    seeds=True,
    recompute=("core_attn", "mlp"),
    concurrency=128,
)
"""As the code was when the model was first made: 65 to 80 s."""
SAID = dict.fromkeys(("fused_head", "rows_per_rank"), False)
SAID |= dict.fromkeys(("batches_once", "shared_files", "probes_together"), True)
"""What cannot be read from the code: logprobs.py has chunks of float32 logits, all padded rows are
put into Ray's memory once, of which a rank copies its own (cluster/wire.py: Parcels, receive),
engines of a process read the same file (vllm/buckets.py), and are probed at once (rollout.py)."""


def features(config: Any) -> Features:
    """Those of this code with a configuration."""
    from rlflow.rollout.vllm.engines import VLLMOptions
    from rlflow.rollout.vllm.vllm_engine import VLLMEngine
    from rlflow.trainer.megatron import model
    from rlflow.types import Batch

    engine = config.rollout.engine
    return Features(
        fused=model._fusions(on_cpu=False)["bias_activation_fusion"],
        scored_only="wanted" in Batch.__dataclass_fields__,
        device_weights=engine.get("transfer", VLLMOptions.transfer) == "ipc",
        seeds=not VLLMEngine.slow_seeds,
        recompute=tuple(sorted(config.trainer.recomputed)),
        concurrency=int(engine.get("max_concurrency", VLLMOptions.max_concurrency)),
        **SAID,
    )


@dataclass(frozen=True)
class Line:
    """A part of the step: seconds, and what they were made of."""

    name: str
    seconds: float
    why: str


def lines(
    config: Any,
    model: Any,
    gpu: Gpu,
    found: Features,
    efficiency: float | None = None,
    of: Episodes = EPISODES,
) -> list[Line]:
    """The parts of a step, one after the other."""
    from rlflow.algorithms.algorithm import algorithm_needs

    share = efficiency or (FUSED if found.fused else UNFUSED)
    ranks = max(config.cluster.ranks, 1)
    episodes = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    forward, head = _operations(model, episodes, of)
    rate = ranks * gpu.flops * share
    trained_tokens = episodes * of.tokens * of.trained
    passes = sum(
        name in algorithm_needs(config.algorithm) for name in ("proximal", "reference", "values")
    )
    updates = config.algorithm.minibatches_per_step * config.algorithm.epochs_per_step
    epochs = config.algorithm.epochs_per_step
    scored = of.trained if found.scored_only else 1.0
    again = (
        1.0 if "full" in found.recompute else RECOMPUTED_MLP if "mlp" in found.recompute else 0.0
    )
    each_s = HEAD_FUSED_S if found.fused_head else HEAD_S
    products = 3 * (forward + head * of.trained) * epochs / rate
    engines = _engines(config)
    probe_s = PROBES_TOGETHER_S if found.probes_together else PROBE_S * engines
    return [
        Line(
            "train",
            products,
            f"3 x {(forward + head * of.trained) / 1e15:.1f} PFLOP at {share:.0%} of {ranks} x peak",
        ),
        Line(
            "recompute",
            again * forward * epochs / rate,
            ", ".join(found.recompute) or "nothing is computed again",
        ),
        Line(
            "head's passes",
            each_s * trained_tokens * epochs / ranks,
            f"{trained_tokens / 1e6:.2f}M trained tokens, {'fused' if found.fused_head else 'float32 logits'}",
        ),
        Line(
            "scoring",
            passes * (forward + head * scored) / rate,
            f"{passes} passes, logits of {scored:.0%} of tokens",
        ),
        Line(
            "optimizer",
            updates * _update_s(config, model, gpu),
            f"{updates} updates: gradients, Adam, new weights",
        ),
        Line(
            "weight sync",
            _sync_s(model, gpu, found, engines),
            "CUDA IPC on each GPU" if found.device_weights else "through the host, by files",
        ),
        Line(
            "batches to ranks",
            _batches_s(config, found, ranks, of),
            "each rank's rows" if found.rows_per_rank else "all rows, padded",
        ),
        Line(
            "probe",
            probe_s,
            f"{engines} engines, {'at once' if found.probes_together else 'one by one'}",
        ),
        *_rollout(config, model, gpu, found, of),
    ]


def _operations(model: Any, episodes: int, of: Episodes) -> tuple[float, float]:
    """FLOP of one forward pass over all episodes without logits, and of the logits of every
    token."""
    from rlflow.models.flops import forward_flops

    rows = [of.tokens] * episodes
    whole = forward_flops(model, rows, 0)
    return whole, forward_flops(model, rows, of.tokens * episodes) - whole


def _parameters(model: Any) -> int:
    from rlflow.trainer.layout import ParallelLayout, stage_parameters

    return stage_parameters(model, ParallelLayout())[0]


def _update_s(config: Any, model: Any, gpu: Gpu) -> float:
    """Gradients summed in float32 over NVLink, Adam over this rank's part, weights gathered."""
    count, ranks = _parameters(model) / config.trainer.tensor_parallel, max(config.cluster.ranks, 1)
    shards = ranks // config.trainer.tensor_parallel if config.trainer.distributed_optimizer else 1
    exchanged = (4 + BF16) * count / gpu.nvlink if ranks > 1 else 0.0
    return exchanged + OPTIMIZER_BYTES * count / shards / gpu.memory


def _engines(config: Any) -> int:
    return int(config.rollout.engine.get("engines", 1)) * max(config.cluster.rollout_workers, 1)


def _sync_s(model: Any, gpu: Gpu, found: Features, engines: int) -> float:
    """Until every engine has the new weights, and is awake."""
    size = BF16 * _parameters(model)
    if found.device_weights:  # packed and copied out again: four times read or written
        return WAKE_S + 4 * size / gpu.memory + math.ceil(size / BUCKET) * CALL_S
    files = 1 if found.shared_files else engines
    each = 1 / PAGEABLE + 1 / OBJECT_STORE + files / FILE_WRITE + 1 / FILE_READ + 4 / gpu.pcie
    return WAKE_S + size * each


def _batches_s(config: Any, found: Features, ranks: int, of: Episodes) -> float:
    """Batches through the object store: padded and whole to every rank, or put once and read by
    each rank in place, which copies its rows; or a rank's rows as they are."""
    episodes = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if found.rows_per_rank:
        return BATCHES * episodes * of.tokens * BATCH_BYTES / WIRE
    padded = episodes * config.rollout.max_total_tokens * BATCH_BYTES
    if found.batches_once:
        return BATCHES_PUT * padded / OBJECT_STORE + BATCHES * padded / ranks / PAGEABLE
    return BATCHES * padded * (1 + ranks / 8) / WIRE


def _rollout(config: Any, model: Any, gpu: Gpu, found: Features, of: Episodes) -> list[Line]:
    """Prompts and passages, and decoding in waves of `concurrency` episodes; a wave has half of
    its episodes on average."""
    engines, tensor = _engines(config), int(config.rollout.engine.get("tensor_parallel", 1))
    episodes = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    each = math.ceil(episodes / engines)
    waves = math.ceil(each / found.concurrency)
    running = min(each, found.concurrency) / 2
    token = model.layers * 2 * model.groups * model.head_dim * BF16
    read = (BF16 * _parameters(model) + running * of.tokens * 0.7 * token) / tensor
    step_s = read / (gpu.memory * DECODE_SHARE) + DECODE_STEP_S + found.seeds * SEED_S * running
    steps = of.longest * of.tokens * of.trained
    forward, _ = _operations(model, episodes, of)
    prefill_s = (1 - of.trained) * forward / (engines * tensor * gpu.flops * UNFUSED)
    return [
        Line(
            "prefill",
            prefill_s,
            f"{(1 - of.trained) * of.tokens * episodes / 1e6:.1f}M tokens over {engines} engines",
        ),
        Line(
            "decode",
            waves * steps * step_s,
            f"{waves} x {steps:.0f} steps of {step_s * 1e3:.1f} ms, {running:.0f} at a time",
        ),
        Line("search", SEARCH_S * waves, "the first of a wave"),
    ]


def architecture_of(config: Any) -> Any:
    """The architecture that the configuration's model has, by its name where it is not here."""
    from rlflow.models.architecture import architecture
    from rlflow.models.huggingface import read_config

    path = str(config.model.path)
    size = next((size for size in QWEN if f"-{size}" in path), None)
    if size is None or Path(path).is_dir():
        return architecture(read_config(path))
    return architecture({"model_type": "qwen2", **QWEN[size]})


def table(found: Sequence[Line]) -> str:
    total = sum(line.seconds for line in found)
    shown = [*found, Line("a step", total, "one part after the other; nothing overlaps")]
    return "\n".join(f"{line.name:<18}{line.seconds:>8.2f} s  {line.why}" for line in shown)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default=str(RECIPE), help="a recipe (searchr1's qwen2.5_3b.yaml)"
    )
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument(
        "--efficiency", type=float, help=f"of the peak in training ({UNFUSED}; fused {FUSED})"
    )
    parser.add_argument(
        "--desk-check", action="store_true", help="with the features of the first desk check"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    given = parser.parse_args()
    from rlflow.config.schema import load_config

    config = load_config(given.config, given.overrides)
    found = DESK_CHECK if given.desk_check else features(config)
    if given.desk_check:
        config.trainer = replace(config.trainer, recompute="selective")
    model, gpu = architecture_of(config), GPUS[given.gpu]
    parts = lines(config, model, gpu, found, given.efficiency)
    print(table(parts))
    low = sum(line.seconds for line in lines(config, model, gpu, found, PUBLISHED))
    print(f"at {PUBLISHED:.0%} of the peak, the best published of dense RL: {low:.0f} s")
    print(
        json.dumps(
            {
                "seconds": sum(line.seconds for line in parts),
                "parts": {line.name: line.seconds for line in parts},
                "features": found.__dict__,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
