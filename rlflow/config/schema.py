"""The run configuration: one dataclass per YAML section. Units stand in the names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.config import loading as configuration
from rlflow.values import Component


@dataclass
class RunSection:
    directory: str = "runs/{name}"  # {name} is run.name
    name: str = "run"
    seed: int = 0
    steps: int = 100  # optimizer steps at the most
    max_minutes: float | None = None  # stops cleanly after this wall time
    target: float | None = None  # stops when eval/exact_match reaches this
    deterministic: bool = False  # fixed admission order and batch shapes; equal seeds give equal bits in one process
    resume: bool = False
    resume_step: int | None = None  # with resume: the checkpoint of this step, not the newest
    overwrite: bool = False  # throw away what an earlier run left in `directory`


@dataclass
class ModelSection:
    path: str = ""  # HuggingFace directory: config.json, *.safetensors, tokenizer
    dtype: str = "float32"  # float32 | bfloat16
    trust_remote_code: bool = False


@dataclass
class DataSection:
    train_split: str = "train"
    val_split: str = "val"
    max_prompt_tokens: int = 4096  # longer prompts are dropped and counted
    shuffle: bool = True
    curator: Component | None = None  # which tasks are worth an attempt now; None: every one, in its turn


@dataclass
class RolloutSection:
    engine: Component = field(default_factory=lambda: {"name": "embedded"})
    prompts_per_step: int = 16
    samples_per_prompt: int = 8
    max_turns: int = 4  # responses per episode
    max_response_tokens: int = 512  # per response
    max_total_tokens: int = 4096  # prompt, responses and observations of an episode together
    max_observation_tokens: int | None = None
    temperature: float = 1.0
    max_aborted_share: float = 0.25  # of a step's episodes; above it the run stops
    chat_template: bool = False  # put text prompts through the chat template as one user message


@dataclass
class AlgorithmSection:
    advantage: Component = field(default_factory=lambda: {"name": "grpo"})
    losses: list[Component] = field(default_factory=lambda: [{"name": "ppo_clip"}])  # summed
    aggregate: Component = field(default_factory=lambda: {"name": "token_mean"})
    filters: list[Component] = field(default_factory=list)  # of a step's groups, in order
    transforms: list[Component] = field(default_factory=list)  # of each minibatch, in order
    minibatches_per_step: int = 1
    epochs_per_step: int = 1


@dataclass
class TrainerSection:
    backend: str = "megatron"  # megatron | reference
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1  # every row's tokens split over these ranks
    virtual_pipeline: int = 1  # model chunks per pipeline rank, interleaved
    sequence_parallel: bool = False  # norms and residuals split over the tensor-parallel ranks
    distributed_optimizer: bool = False  # Adam's state split over the data- and context-parallel ranks
    recompute: str = "none"  # none | selective | full: activations computed again in the backward pass
    lr: float = 1e-6
    lr_schedule: str = "constant"  # constant | cosine | linear
    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None  # None: run.steps
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    tokens_per_microbatch: int = 16384
    packing: bool = False  # rows end to end instead of padded to the longest
    logits_chunk_mib: float = 512.0  # of float32 logits that exist at a time, per rank
    offload_optimizer: bool = False  # Adam's moments and update in host memory; GPUs only
    offload_snapshots: bool = False  # the reference's weights in host memory; GPUs only
    release_gradients: bool = False  # no gradient buffers between updates


@dataclass
class EvaluationSection:
    every_steps: int = 25  # 0: only at the end
    at_start: bool = True
    questions: int | None = None  # the first N of data.val_split; None: all
    final_questions: int | None = None  # for the last evaluation; None: all
    samples_per_prompt: int = 1
    temperature: float = 0.0  # 0 is greedy


@dataclass
class CheckpointSection:
    every_steps: int = 25  # 0: only at the end
    keep: int = 2  # the newest N
    asynchronous: bool = False  # copy the state, write it while training goes on
    export: bool = True  # a HuggingFace directory at the end, checked against the trainer's logits


@dataclass
class MetricsSection:
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "rlflow"
    trajectories_per_step: int = 4  # written to trajectories/
    progress: str = "auto"  # auto | rich | plain | none
    picture: bool = True


@dataclass
class ClusterSection:
    ranks: int = 0  # 0: everything in this process; N: N trainer ranks, each a Ray actor
    address: str | None = None  # of a running Ray cluster; None starts one on this machine
    threads_per_rank: int = 1
    gpus_per_rank: float = 0.0


@dataclass
class RunConfig:
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    environment: Component = field(default_factory=dict)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The run configuration from a YAML file and `section.key=value` overrides, over the defaults above."""
    return configuration.load_config(path, overrides, RunConfig)
