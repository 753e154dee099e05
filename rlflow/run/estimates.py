"""Estimates of a run before it starts: memory by process and phase, disk.

Closed forms of configuration and shapes; numbers measured by `benchmarks/memory_estimate.py` and
`docs/benchmarks.md`. Every episode is taken to fill its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlflow.algorithms.algorithm import config_needs
from rlflow.components import ENGINE
from rlflow.config.schema import RunConfig
from rlflow.errors import RLFlowError
from rlflow.models.architecture import Architecture, architecture, padded_vocab
from rlflow.models.huggingface import read_config
from rlflow.rollout.embedded.block_manager import BLOCK_SIZE, blocks_for
from rlflow.trainer.layout import ParallelLayout, stage_parameters

GRADIENT_BYTES, MOMENT_BYTES = 4, 8  # per parameter: float32; Adam's two
MAIN_BYTES = 4  # per parameter: the float32 weights behind bfloat16
LIBRARIES = 600 * 2**20
"""Of a process once torch, megatron-core and transformers are imported; on a GPU, its context."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
SLACK, SLACK_CUDA = 0.28, 0.1
"""What an update's allocations take beyond their sizes: holes, freed memory that is kept, products'
own. On CPUs 0.19 to 0.38 were measured; on GPUs assumed."""
FIRST_USE, FIRST_DECODE = 64 * 2**20, 8 * 2**20
"""What the first update, or decode step, leaves, whatever the shapes; of a decode step 48 MiB were
measured on Intel, 0 to 32 on AMD (Zen 2)."""
VLLM_FRONT, VLLM_CORE = 900 * 2**20, 800 * 2**20
"""Of vLLM's two processes that do not compute, and of each that does, by imports and threads."""
VLLM_STEP_TOKENS = 8192
"""Of prompts in a step at the least; see `rlflow.rollout.vllm.launch.Launch.flags`."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes by name that one process holds in one phase; on a machine with GPUs, of its device."""

    process: str
    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def estimate(config: RunConfig, model: Architecture, free: int | None = None) -> list[PhaseMemory]:
    """Every process and phase of a run: one process, or a driver with the engine and a rank of each
    pipeline stage. free: see `engine_parts`. Raises ConfigError for a layout that the model cannot
    have."""
    engine, layout = engine_parts(config, model, free), config.trainer.layout
    layout.check_model(model)
    libraries = {"libraries": LIBRARIES}
    found: list[PhaseMemory] = []
    if config.cluster.ranks:
        found.append(PhaseMemory("driver", "rollout", {**libraries, **engine}))
        engine = {}
    given_back = ("sampling", "keys and values") if sleeps(config) else ("sampling",)
    kept = {name: size for name, size in engine.items() if name not in given_back}
    for stage in range(layout.pipeline_parallel):
        rank = "rank" if layout.pipeline_parallel == 1 else f"rank of stage {stage + 1}"
        process = rank if config.cluster.ranks else "process"
        phases = rank_phases(config, model, stage, engine, kept)
        found += [PhaseMemory(process, phase, parts) for phase, parts in phases.items()]
    return found


def rank_phases(
    config: RunConfig,
    model: Architecture,
    stage: int,
    awake: Mapping[str, int],
    asleep: Mapping[str, int],
) -> dict[str, dict[str, int]]:
    """{phase: {part: bytes}} of a rank beside engines that hold `awake` while they sample and
    `asleep` while it trains; both empty: beside none."""
    held = {"libraries": LIBRARIES, **rank_parts(config, model, stage)}
    found = {}
    # Whether the rank gives memory back once it is built
    if awake and (config.trainer.release_gradients or config.trainer.adamw.offload):
        built = rank_parts(config, model, stage, building=True)
        found["build"] = {"libraries": LIBRARIES, **built, **awake}
        found["build"].pop("sampling", None)
    if awake:
        found["rollout"] = {**held, **awake}
        if config.trainer.release_gradients:
            del found["rollout"]["gradients"]
    found["update"] = {**held, **asleep, **update_parts(config, model, stage)}
    return found


# ---------------------------------------------------------------- what lies there all the time


def rank_parts(
    config: RunConfig, model: Architecture, stage: int, building: bool = False
) -> dict[str, int]:
    """Weights, gradients, optimizer of a rank, a critic's included; snapshots and the teacher.
    building: before those two are there, and before Adam's float32 weights go to the host."""
    trainer, layout = config.trainer, config.trainer.layout
    width = DTYPE_BYTES[config.model.dtype]
    parameters = stage_parameters(model, layout)[stage]
    adapters = adapter_parameters(config, model)
    trained = adapters or parameters
    # The experts' optimizer is split over the ranks that hold the same ones
    experts = 0 if adapters else stage_parameters(model, layout, experts=True)[stage]
    if config.algorithm.critic is not None:
        trained += stage_parameters(model, layout, values=True)[stage]
        experts += stage_parameters(model, layout, experts=True)[stage]
    ranks = layout.data_parallel(config.cluster.ranks) * layout.context_parallel
    shards = ranks if trainer.distributed_optimizer else 1
    copies = ranks * layout.tensor_parallel // layout.expert_parallel
    expert_shards = copies if trainer.distributed_optimizer else 1
    main = MAIN_BYTES if width < MAIN_BYTES else 0
    held = main * building if trainer.adamw.offload else main + MOMENT_BYTES
    parts = {
        "weights": (trained + (parameters if adapters else 0)) * width,
        "gradients": trained * GRADIENT_BYTES,
        "optimizer": (trained - experts) * held // shards + experts * held // expert_shards,
    }
    copied = adapters or parameters  # a reference beside adapters is the model without them
    frozen = (
        0
        if trainer.offload_snapshots or building
        else snapshots(config) * copied + teacher_parameters(config, stage)
    )
    return {**parts, **({"reference, teacher": frozen * width} if frozen else {})}


def adapter_parameters(config: RunConfig, model: Architecture) -> int:
    """Parameters of low-rank adapters on a rank: A (rank, in) and B (out, rank) of each target, one
    of the two split over the tensor-parallel ranks; 0 where all weights are trained."""
    lora = config.trainer.lora
    if lora is None:
        return 0
    query, key = model.heads * model.head_dim, model.groups * model.head_dim
    split = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}  # the others: ffn
    tensor = config.trainer.tensor_parallel
    layer = sum(split.get(name, model.ffn) // tensor + model.hidden for name in lora.targets)
    return lora.rank * layer * (model.layers // config.trainer.pipeline_parallel)


def snapshots(config: RunConfig) -> int:
    """Copies of the policy's weights that a run keeps."""
    teacher = config.algorithm.teacher
    copied = teacher.get("name") == "policy" and teacher.get("refresh_steps", 1) != 1
    switched_off = config.trainer.lora is not None
    return ("reference" in config_needs(config) and not switched_off) + copied


def teacher_parameters(config: RunConfig, stage: int) -> int:
    """Parameters of a teacher that is a model, on a rank of a stage."""
    teacher = config.algorithm.teacher
    if teacher.get("name") != "model" or not isinstance(teacher.get("path"), str):
        return 0
    return stage_parameters(architecture(read_config(teacher["path"])), config.trainer.layout)[
        stage
    ]


# ---------------------------------------------------------------- an update


def update_parts(config: RunConfig, model: Architecture, stage: int) -> dict[str, int]:
    """Activations that wait for their backward pass, and what the backward pass or the output layer
    needs at its highest."""
    layout, (tokens, scored) = config.trainer.layout, largest_microbatch(config)
    width = DTYPE_BYTES[config.model.dtype]
    tokens = math.ceil(tokens / layout.context_parallel)
    chunk_layers = model.layers // layout.stages
    in_flight = _in_flight(layout, stage)
    kept = _kept_per_token(model, layout, width, config.trainer.recomputed)
    again = (
        _kept_per_token(model, layout, width, frozenset()) - kept
    )  # of the layer that is computed again
    parts = {"activations": round(tokens * (in_flight * chunk_layers * kept + again))}
    parts["backward pass"] = round(tokens * _transient_per_token(model, layout, width))
    if stage == layout.pipeline_parallel - 1:
        head = _head_bytes(config, model, math.ceil(scored / layout.context_parallel), width)
        # The output layer comes before the first layer of the backward pass: they are not there at
        # the same time.
        parts["backward pass"], parts["logits"] = max(parts["backward pass"] - head, 0), head
    slack = SLACK_CUDA if on_gpus(config) else SLACK
    return {**parts, "slack": round(slack * sum(parts.values())) + FIRST_USE}


def largest_microbatch(config: RunConfig) -> tuple[int, int]:
    """(tokens, those of them that get logits) of the largest micro-batch that a data-parallel rank
    may get. Padded, of episodes that all fill their budget; packed, shorter ones fill it to its
    limit."""
    rollout, trainer = config.rollout, config.trainer
    rows = (
        rollout.prompts_per_step
        * rollout.samples_per_prompt
        // config.algorithm.minibatches_per_step
    )
    rows = math.ceil(rows / trainer.layout.data_parallel(config.cluster.ranks))
    longest, limit = rollout.max_total_tokens, trainer.tokens_per_microbatch
    full = max(limit if trainer.packing else limit // longest * longest, longest)
    tokens = min(full, rows * longest)
    sampled = rollout.max_turns * rollout.max_response_tokens
    return tokens, min(tokens, math.ceil(tokens / longest) * sampled)


def _in_flight(layout: ParallelLayout, stage: int) -> int:
    """Chunks' worth of activations that a rank holds at a time: 1F1B, and its interleaved form
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    after = layout.pipeline_parallel - stage - 1
    if layout.virtual_pipeline == 1:
        return after + 1
    return 2 * after + (layout.virtual_pipeline - 1) * layout.pipeline_parallel + 1


def _kept_per_token(
    model: Architecture, layout: ParallelLayout, width: int, recomputed: frozenset[str]
) -> float:
    """Bytes that a layer keeps of a token for its backward pass; see
    `rlflow.trainer.megatron.layers`."""
    tensor, hidden = layout.tensor_parallel, model.hidden
    outside = hidden / (tensor if layout.sequence_parallel else 1)  # norms and residuals
    query, ffn = model.heads * model.key_dim / tensor, model.active_ffn / tensor
    if "full" in recomputed:
        return width * outside
    residuals, normed = (
        2 * outside,
        2 * outside,
    )  # the inputs of the two norms, and what they give to the linear layers
    scaled = (
        2 * outside * (4 if width == 4 else 8)
    )  # the norms' own, in float32; with bfloat16 their inputs too
    attention = (
        4 * query
    )  # queries, the result, and keys and values, which keep as much memory as the queries
    mlp = 0.0 if "mlp" in recomputed else 3 * ffn  # gate and up, and their product
    statistics = (
        4 * model.heads / tensor + 2 * 4
    )  # log-sum-exp of attention and the norms' scales, float32
    return width * (residuals + normed + attention + mlp) + scaled + statistics


def _transient_per_token(model: Architecture, layout: ParallelLayout, width: int) -> float:
    """Bytes per token beside the kept ones amid a layer's MLP: gradients of its parts."""
    return width * (5 * model.active_ffn / layout.tensor_parallel + 2 * model.hidden)


def _head_bytes(config: RunConfig, model: Architecture, scored: int, width: int) -> int:
    """Hidden states that predict, their gradients, the chunk of logits with what is made of it."""
    columns = (
        padded_vocab(model.vocab, config.trainer.tensor_parallel) // config.trainer.tensor_parallel
    )
    most = max(1, int(min(config.trainer.logits_chunk_mib, 2**40) * 2**20) // (4 * columns))
    chunk = min(scored, most)
    cast = (
        width if width < 4 else 0
    )  # the product in the weights' precision beside the float32 copy
    return chunk * columns * (4 + cast) + 2 * scored * model.hidden * width


# ---------------------------------------------------------------- the embedded engine


def engine_parts(config: RunConfig, model: Architecture, free: int | None = None) -> dict[str, int]:
    """Weights, keys and values, and a step's logits of the embedded engine; nothing of another.
    free: bytes that it finds free, of which keys and values take half at the most; None: enough."""
    options = dict(config.rollout.engine)
    if not is_embedded(config):
        return {}
    width = DTYPE_BYTES[engine_dtype(config)]
    slots = min(int(options.get("max_concurrency", 128)), episodes(config))
    limit = options.get("max_tokens") or config.rollout.max_total_tokens
    blocks = slots * blocks_for(min(limit, config.rollout.max_total_tokens))
    if options.get("kv_tokens") is not None:
        blocks = min(blocks, int(options["kv_tokens"]) // BLOCK_SIZE)
    both = model.key_dim + model.value_dim
    block = model.layers * BLOCK_SIZE * model.groups * both * width
    if options.get("kv_tokens") is None and free is not None:
        blocks = min(blocks, free // 2 // block)
    parameters = stage_parameters(model, ParallelLayout())[0]
    decode = slots * model.vocab * 4 * 4  # logits, scaled ones, log-probs, probabilities
    longest = min(config.data.max_prompt_tokens, config.rollout.max_total_tokens)
    prefilled = min(int(options.get("prefill_tokens", 8192)), slots * longest)
    attention = model.heads * model.key_dim + 2 * model.groups * both
    activations = 3 * model.hidden + attention + 3 * model.active_ffn
    prefill = (
        prefilled * width * (activations + longest)
    )  # with the masks of all that is prefilled in a step
    slack = SLACK_CUDA if on_gpus(config) else SLACK
    sampling = round((1 + slack) * max(decode, prefill)) + FIRST_DECODE
    return {
        "engine's weights": parameters * width,
        "keys and values": blocks * block,
        "sampling": sampling,
    }


def engine_dtype(config: RunConfig) -> str:
    """What an engine of the run keeps weights in: its own `dtype`, else that of the model. Of
    adapters the embedded engine keeps float32: rounded to bfloat16 with the weights that they are
    added to, most of what they learn would be lost for many updates."""
    said = config.rollout.engine.get("dtype")
    if said is not None:
        return str(said)
    adapted = config.trainer.lora is not None and is_embedded(config)
    return "float32" if adapted else config.model.dtype


def is_embedded(config: RunConfig) -> bool:
    """Whether the engine is the one that ships, whose memory is known."""
    return _engine_place(config).endswith(":EmbeddedEngine")


def is_vllm(config: RunConfig) -> bool:
    """Whether the engine is vLLM in processes of the run's own."""
    return _engine_place(config).endswith(":make_vllm_engines")


def _engine_place(config: RunConfig) -> str:
    try:
        return ENGINE.locate(config.rollout.engine["name"])
    except RLFlowError:
        return ""


def sleeps(config: RunConfig) -> bool:
    """Whether the engine gives memory back while the trainer works. Those of rollout workers go
    on."""
    if config.cluster.rollout_workers or config.asynchrony.overlap:
        return False
    asked = config.rollout.engine.get("sleep")
    return on_gpus(config) if asked is None else bool(asked)


def on_gpus(config: RunConfig) -> bool:
    """Whether the run trains on GPUs: ranks do that ask for some, on this machine or another."""
    return config.cluster.gpus_per_rank > 0 if config.cluster.ranks else torch.cuda.is_available()


def episodes(config: RunConfig) -> int:
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


# ---------------------------------------------------------------- the disk


def checkpoint_bytes(config: RunConfig, model: Architecture) -> tuple[int, int]:
    """(a checkpoint of the trainer, the export at the end), in bytes on disk."""
    width = DTYPE_BYTES[config.model.dtype]
    policy = sum(stage_parameters(model, ParallelLayout()))
    lora = (
        adapter_parameters(config, model)
        * config.trainer.tensor_parallel
        * config.trainer.pipeline_parallel
    )
    trained = lora or policy
    if config.algorithm.critic is not None:
        trained += sum(stage_parameters(model, ParallelLayout(), values=True))
    main = MAIN_BYTES if width < MAIN_BYTES else 0
    return trained * (width + main + MOMENT_BYTES) + snapshots(config) * (
        lora or policy
    ) * width, policy * width


# ---------------------------------------------------------------- vLLM on a CPU


def vllm_memory(config: RunConfig, model: Architecture) -> list[PhaseMemory]:
    """vLLM's processes of one engine together, what they share counted once; none on a GPU (see
    `gpu_memory`).

    Keys and values are allotted whole at the start. A step of prompts and an update, which holds
    two files of new weights in memory, do not happen at the same time."""
    if on_gpus(config) or not is_vllm(config):
        return []
    options = config.rollout.engine
    width = DTYPE_BYTES[engine_dtype(config)]
    tensor = int(options.get("tensor_parallel") or 1)
    weights = stage_parameters(model, ParallelLayout())[0] * width
    head = model.vocab * model.hidden * width if model.tied else 0  # packed: a copy
    longest = int(options.get("max_tokens") or config.rollout.max_total_tokens)
    # Of a layer: residual, normed and result; gate, up and their product.
    step = max(VLLM_STEP_TOKENS, longest) * 3 * (model.hidden + model.active_ffn) * width
    update = min(weights + head, 2 * int(options.get("bucket_mib", 256)) * 2**20)
    parts = {
        "libraries": VLLM_FRONT + tensor * VLLM_CORE,
        "engine's weights": weights + head,
        "keys and values": tensor * int(options.get("kv_gib", 1)) * 2**30,
        "a step of prompts, or files of new weights": max(step, update),
    }
    count = int(options.get("engines", 1))
    name = "vLLM" if count == 1 else f"vLLM, each of {count} engines"
    return [PhaseMemory(name, "rollout", parts)]
