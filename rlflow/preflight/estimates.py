"""Estimates of a run before it starts: memory by process and phase, disk.

Closed forms of configuration and shapes; numbers measured by `benchmarks/memory_estimate.py` and
`docs/benchmarks.md`. Every episode is taken to fill its budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.algorithms.algorithm import algorithm_needs
from rlflow.config.schema import AlgorithmSection, ClusterSection, RunConfig
from rlflow.models.architecture import Architecture, architecture, padded_vocab
from rlflow.models.huggingface import read_config
from rlflow.rollout.engine_facts import EngineFacts, EngineLoad, engine_facts
from rlflow.run.gpus import adapters_alone
from rlflow.trainer.layout import ParallelLayout, stage_parameters
from rlflow.trainer.options import TrainerOptions, torch_dtype

GRADIENT_BYTES, MOMENT_BYTES = 4, 8  # per parameter: float32; Adam's two
MAIN_BYTES = 4  # per parameter: the float32 weights behind bfloat16
LIBRARIES = 600 * 2**20
"""Of a process once torch, megatron-core and transformers are imported; on a GPU, its context."""
SLACK, SLACK_CUDA = 0.28, 0.1
"""What allocations take beyond their sizes: holes, freed memory that is kept, products' own. On CPUs
0.19 to 0.38 were measured; on GPUs assumed."""
FIRST_USE = 64 * 2**20
"""What the first update leaves, whatever the shapes."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes by name that one process holds in one phase; on a machine with GPUs, of its device."""

    process: str
    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class RunSizes:
    """What a run's memory and time follow from.

    dtype: of the policy. episodes: of a step; minibatches: of them; epochs: passes over them.
    needs: what the algorithm needs (`Algorithm.needs`). max_total_tokens: of an
    episode; sampled_tokens: those of them that the policy may say. snapshots: copies of the
    policy's weights that are kept. teacher: the model of one that is a model. engine_sleeps: it
    gives memory back while the trainer works."""

    model: Architecture
    dtype: str
    trainer: TrainerOptions
    cluster: ClusterSection
    episodes: int
    minibatches: int
    epochs: int
    needs: frozenset[str]
    max_total_tokens: int
    sampled_tokens: int
    critic: bool
    snapshots: int
    teacher: Architecture | None
    engine: EngineFacts
    engine_load: EngineLoad
    engine_sleeps: bool

    @property
    def layout(self) -> ParallelLayout:
        return self.trainer.layout

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return torch_dtype(self.dtype).itemsize

    @property
    def data_parallel(self) -> int:
        return self.layout.data_parallel(self.cluster.ranks)

    @property
    def slack(self) -> float:
        """The share of memory that allocations take beyond their sizes."""
        return SLACK_CUDA if self.cluster.on_gpus else SLACK


def run_sizes(config: RunConfig, model: Architecture) -> RunSizes:
    """The sizes of a configuration. Raises ModelError where the teacher's directory holds no
    model."""
    rollout = config.rollout
    engine = engine_facts(rollout.engine)
    on_gpus = config.cluster.on_gpus
    engine_dtype = engine.dtype(config.model.dtype)
    episodes = rollout.prompts_per_step * rollout.samples_per_prompt
    needs = algorithm_needs(config.algorithm)
    lora = config.trainer.lora
    beside = 0
    if lora is not None and adapters_alone(lora, engine):
        # A whole one, however many ranks the trainer has
        beside = adapter_parameters(TrainerOptions(lora=lora), model)
    # Engines of rollout workers, and those that sample while the trainer works, go on
    taking_turns = not (config.cluster.rollout_workers or rollout.asynchronous.overlap)
    return RunSizes(
        model=model,
        dtype=config.model.dtype,
        trainer=config.trainer,
        cluster=config.cluster,
        episodes=episodes,
        minibatches=config.algorithm.minibatches_per_step,
        epochs=config.algorithm.epochs_per_step,
        needs=needs,
        max_total_tokens=rollout.max_total_tokens,
        sampled_tokens=rollout.max_turns * rollout.max_response_tokens,
        critic=config.algorithm.critic is not None,
        snapshots=_snapshots(
            config.algorithm.teacher,
            reference="reference" in needs,
            adapters=config.trainer.lora is not None,
        ),
        teacher=_teacher_model(config.algorithm),
        engine=engine,
        engine_load=EngineLoad(
            model=model,
            parameters=stage_parameters(model, ParallelLayout())[0] + beside,
            width=torch_dtype(engine_dtype).itemsize,
            episodes=episodes,
            max_total_tokens=rollout.max_total_tokens,
            max_prompt_tokens=config.data.max_prompt_tokens,
            slack=SLACK_CUDA if on_gpus else SLACK,
        ),
        engine_sleeps=taking_turns and engine.sleeps(on_gpus),
    )


def _snapshots(teacher: Mapping[str, object], reference: bool, adapters: bool) -> int:
    """Copies of the policy's weights. The reference beside adapters is the model without them."""
    copied = teacher.get("name") == "policy" and teacher.get("refresh_steps", 1) != 1
    return (reference and not adapters) + copied


def _teacher_model(algorithm: AlgorithmSection) -> Architecture | None:
    teacher = algorithm.teacher
    if teacher.get("name") != "model" or not isinstance(teacher.get("path"), str):
        return None
    return architecture(read_config(teacher["path"]))


def estimate(sizes: RunSizes, free: int | None = None) -> list[PhaseMemory]:
    """Every process and phase of a run: one process, or a driver with the engine and a rank of each
    pipeline stage. free: see `EngineFacts.memory`. Raises ConfigError for a layout that the model
    cannot have."""
    layout = sizes.layout
    layout.check_model(sizes.model)
    engine = sizes.engine.memory(sizes.engine_load, free)
    phases: list[PhaseMemory] = []
    if sizes.cluster.ranks:
        phases.append(PhaseMemory("driver", "rollout", {"libraries": LIBRARIES, **engine}))
        engine = {}
    idle = sizes.engine.idle_memory(engine, sizes.engine_sleeps)
    for stage in range(layout.pipeline_parallel):
        rank = "rank" if layout.pipeline_parallel == 1 else f"rank of stage {stage + 1}"
        process = rank if sizes.cluster.ranks else "process"
        phases += [
            PhaseMemory(process, phase, parts)
            for phase, parts in rank_phases(sizes, stage, engine, idle).items()
        ]
    return phases


def server_memory(sizes: RunSizes) -> list[PhaseMemory]:
    """The processes of one engine together, where engines have some on CPU cores; else []."""
    if sizes.cluster.on_gpus:
        return []
    parts = sizes.engine.server_memory(sizes.engine_load)
    if not parts:
        return []
    count, process = sizes.engine.count, sizes.engine.process
    name = process if count == 1 else f"{process}, each of {count} engines"
    return [PhaseMemory(name, "rollout", parts)]


def rank_phases(
    sizes: RunSizes, stage: int, awake: Mapping[str, int], asleep: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """{phase: {part: bytes}} of a rank beside engines that hold `awake` while they sample and
    `asleep` while it trains; both empty: beside none."""
    trainer = sizes.trainer
    held = {"libraries": LIBRARIES, **rank_parts(sizes, stage)}
    phases = {}
    # Whether the rank gives memory back once it is built
    if awake and (trainer.release_gradients or trainer.adamw.offload):
        built = rank_parts(sizes, stage, building=True)
        phases["build"] = {"libraries": LIBRARIES, **built, **awake}
        phases["build"].pop("sampling", None)
    if awake:
        phases["rollout"] = {**held, **awake}
        if trainer.release_gradients:
            del phases["rollout"]["gradients"]
    phases["update"] = {**held, **asleep, **update_parts(sizes, stage)}
    return phases


# ---------------------------------------------------------------- what lies there all the time


def rank_parts(sizes: RunSizes, stage: int, building: bool = False) -> dict[str, int]:
    """Weights, gradients, optimizer of a rank, a critic's included; snapshots and the teacher.
    building: before those two are there, and before Adam's float32 weights go to the host."""
    trainer, layout, model = sizes.trainer, sizes.layout, sizes.model
    parameters = stage_parameters(model, layout)[stage]
    adapters = adapter_parameters(trainer, model)
    trained = adapters or parameters
    # The experts' optimizer is split over the ranks that hold the same ones
    experts = 0 if adapters else stage_parameters(model, layout, experts=True)[stage]
    if sizes.critic:
        trained += stage_parameters(model, layout, values=True)[stage]
        experts += stage_parameters(model, layout, experts=True)[stage]
    ranks = sizes.data_parallel * layout.context_parallel
    shards = ranks if trainer.distributed_optimizer else 1
    copies = ranks * layout.tensor_parallel // layout.expert_parallel
    expert_shards = copies if trainer.distributed_optimizer else 1
    main = MAIN_BYTES if sizes.width < MAIN_BYTES else 0
    held = main * building if trainer.adamw.offload else main + MOMENT_BYTES
    parts = {
        "weights": (trained + (parameters if adapters else 0)) * sizes.width,
        "gradients": trained * GRADIENT_BYTES,
        "optimizer": (trained - experts) * held // shards + experts * held // expert_shards,
    }
    if trainer.offload_snapshots or building:
        return parts
    # A reference beside adapters is the model without them
    frozen = sizes.snapshots * (adapters or parameters)
    if sizes.teacher is not None:
        frozen += stage_parameters(sizes.teacher, layout)[stage]
    return {**parts, **({"reference, teacher": frozen * sizes.width} if frozen else {})}


def adapter_parameters(trainer: TrainerOptions, model: Architecture) -> int:
    """Parameters of low-rank adapters on a rank: A (rank, in) and B (out, rank) of each target, one
    of the two split over the tensor-parallel ranks; 0 where all weights are trained."""
    lora = trainer.lora
    if lora is None:
        return 0
    query, key = model.heads * model.head_dim, model.groups * model.head_dim
    split = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}  # the others: ffn
    layer = sum(
        split.get(name, model.ffn) // trainer.tensor_parallel + model.hidden
        for name in lora.targets
    )
    return lora.rank * layer * (model.layers // trainer.pipeline_parallel)


# ---------------------------------------------------------------- an update


def update_parts(sizes: RunSizes, stage: int) -> dict[str, int]:
    """Activations that wait for their backward pass, and what the backward pass or the output layer
    needs at its highest."""
    layout, model, width = sizes.layout, sizes.model, sizes.width
    tokens, scored = largest_microbatch(sizes)
    tokens = math.ceil(tokens / layout.context_parallel)
    chunk_layers = model.layers // layout.stages
    in_flight = _in_flight(layout, stage)
    kept = _kept_per_token(model, layout, width, sizes.trainer.recomputed)
    # Of the layer that is computed again
    again = _kept_per_token(model, layout, width, frozenset()) - kept
    parts = {"activations": round(tokens * (in_flight * chunk_layers * kept + again))}
    parts["backward pass"] = round(tokens * _transient_per_token(model, layout, width))
    if stage == layout.pipeline_parallel - 1:
        head = _head_bytes(sizes, math.ceil(scored / layout.context_parallel))
        # The output layer comes before the first layer of the backward pass: they are not there at
        # the same time.
        parts["backward pass"], parts["logits"] = max(parts["backward pass"] - head, 0), head
    return {**parts, "slack": round(sizes.slack * sum(parts.values())) + FIRST_USE}


def largest_microbatch(sizes: RunSizes) -> tuple[int, int]:
    """(tokens, those of them that get logits) of the largest micro-batch that a data-parallel rank
    may get. Padded, of episodes that all fill their budget; packed, shorter ones fill it to its
    limit."""
    rows = math.ceil(sizes.episodes // sizes.minibatches / sizes.data_parallel)
    longest, limit = sizes.max_total_tokens, sizes.trainer.tokens_per_microbatch
    full = max(limit if sizes.trainer.packing else limit // longest * longest, longest)
    tokens = min(full, rows * longest)
    return tokens, min(tokens, math.ceil(tokens / longest) * sizes.sampled_tokens)


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
    # The inputs of the two norms, and what they give to the linear layers
    residuals, normed = 2 * outside, 2 * outside
    # The norms' own, in float32; with bfloat16 their inputs too
    scaled = 2 * outside * (4 if width == 4 else 8)
    # Queries, the result, and keys and values, which keep as much memory as the queries
    attention = 4 * query
    mlp = 0.0 if "mlp" in recomputed else 3 * ffn  # gate and up, and their product
    # Log-sum-exp of attention and the norms' scales, float32
    statistics = 4 * model.heads / tensor + 2 * 4
    return width * (residuals + normed + attention + mlp) + scaled + statistics


def _transient_per_token(model: Architecture, layout: ParallelLayout, width: int) -> float:
    """Bytes per token beside the kept ones amid a layer's MLP: gradients of its parts."""
    return width * (5 * model.active_ffn / layout.tensor_parallel + 2 * model.hidden)


def _head_bytes(sizes: RunSizes, scored: int) -> int:
    """Hidden states that predict, their gradients, the chunk of logits with what is made of it."""
    tensor, width = sizes.layout.tensor_parallel, sizes.width
    columns = padded_vocab(sizes.model.vocab, tensor) // tensor
    chunk_bytes = int(min(sizes.trainer.logits_chunk_mib, 2**40) * 2**20)
    chunk = min(scored, max(1, chunk_bytes // (4 * columns)))
    cast = width if width < 4 else 0  # the product in the weights' precision beside the float32
    return chunk * columns * (4 + cast) + 2 * scored * sizes.model.hidden * width


# ---------------------------------------------------------------- the disk


def checkpoint_bytes(sizes: RunSizes) -> tuple[int, int]:
    """(a checkpoint of the trainer, the export at the end), in bytes on disk."""
    model, trainer, width = sizes.model, sizes.trainer, sizes.width
    policy = sum(stage_parameters(model, ParallelLayout()))
    ranks = trainer.tensor_parallel * trainer.pipeline_parallel
    adapters = adapter_parameters(trainer, model) * ranks
    trained = adapters or policy
    if sizes.critic:
        trained += sum(stage_parameters(model, ParallelLayout(), values=True))
    main = MAIN_BYTES if width < MAIN_BYTES else 0
    checkpoint = trained * (width + main + MOMENT_BYTES)
    checkpoint += sizes.snapshots * (adapters or policy) * width
    return checkpoint, policy * width
