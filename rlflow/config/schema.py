"""The run configuration: one dataclass per YAML section. Units stand in the names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rlflow.components import (
    ADVANTAGE,
    AGGREGATE,
    CURATOR,
    ENGINE,
    ENVIRONMENT,
    FILTER,
    LOSS,
    SINK,
    TEACHER,
    TRANSFORM,
    WEIGHT_TRANSFER,
)
from rlflow.config import loading as configuration
from rlflow.trainer.options import CriticOptions, DType, TrainerOptions
from rlflow.values import Component, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, Share


@dataclass
class RunSection:
    directory: str = "runs/{name}"  # where the run is written; {name} is run.name
    name: str = "run"  # of the run
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0  # what every generator takes
    steps: PositiveInt = 100  # optimizer steps at the most
    max_minutes: PositiveFloat | None = None  # stops cleanly after this wall time
    target: Share | None = None  # stops when eval/exact_match reaches this
    deterministic: bool = False  # fixed admission order and batch shapes; equal seeds give equal bits in one process
    resume: bool = False  # continue from the newest checkpoint (--resume)
    resume_step: PositiveInt | None = None  # with resume: the checkpoint of this step, not the newest
    overwrite: bool = False  # throw away what an earlier run left in `directory`


@dataclass
class ModelSection:
    path: str = ""  # HuggingFace directory: config.json, *.safetensors, tokenizer
    dtype: DType = "float32"  # of weights and engine
    trust_remote_code: bool = False  # allow Python code of the model directory to run


@dataclass
class DataSection:
    train_split: str = "train"  # the environment's training split
    val_split: str = "val"  # the environment's validation split
    max_prompt_tokens: PositiveInt = 4096  # longer prompts are dropped and counted
    curator: Annotated[Component, CURATOR] = field(default_factory=lambda: {"name": "epochs"})  # which tasks come next


@dataclass
class Faults:
    """The keys of `rollout.faults`: how much may go wrong in episodes, and when a call counts as hung."""

    max_aborted_share: Share = 0.25  # of a step's episodes; above it the run stops
    call_s: PositiveFloat = 600.0  # a reset, step or close of the environment
    episode_s: PositiveFloat = 7200.0  # an episode, generation included


@dataclass
class Asynchrony:
    """The keys of `rollout.asynchronous`. With both numbers 0 each step is sampled when the one before is over."""

    max_staleness: NonNegativeInt = 0  # versions that a trained token may lag behind the weights in training
    run_ahead: NonNegativeInt | None = None  # batches finished or under way beyond the current one; null: 1 with staleness
    when_stale: Literal["wait", "drop"] = "wait"  # for what would be too old next, or sample it again
    on_update: Literal["keep", "abort", "wait"] = "keep"  # requests in flight: go on, are cut and go on, end first
    group_s: PositiveFloat | None = None  # a group's last attempts may run so long; then it ends without them
    score_early: bool = False  # reference and teacher score a group when it has ended, while others are still sampled
    overlap: bool = False  # generate while the trainer works, for cores or GPUs of its own; else it waits

    @property
    def ahead(self) -> int:
        """`run_ahead`, or what stands in its place."""
        return min(self.max_staleness, 1) if self.run_ahead is None else self.run_ahead

    @property
    def on(self) -> bool:
        """Whether anything is sampled before its step."""
        return self.ahead > 0


@dataclass
class RolloutSection:
    engine: Annotated[Component, ENGINE] = field(default_factory=lambda: {"name": "embedded"})
    prompts_per_step: PositiveInt = 16  # tasks per step
    samples_per_prompt: PositiveInt = 8  # attempts at each task: one group
    max_turns: PositiveInt = 4  # responses per episode
    max_response_tokens: PositiveInt = 512  # per response
    max_total_tokens: PositiveInt = 4096  # prompt, responses and observations of an episode together
    max_observation_tokens: PositiveInt | None = None  # text observations are cut to this; None: no limit
    temperature: PositiveFloat = 1.0  # of sampling in training
    faults: Faults = field(default_factory=Faults)
    asynchronous: Asynchrony = field(default_factory=Asynchrony)
    chat_template: bool = False  # put text prompts through the chat template as one user message


@dataclass
class AlgorithmSection:
    advantage: Annotated[Component, ADVANTAGE] = field(default_factory=lambda: {"name": "grpo"})
    losses: list[Annotated[Component, LOSS]] = field(default_factory=lambda: [{"name": "ppo_clip"}])  # summed
    aggregate: Annotated[Component, AGGREGATE] = field(default_factory=lambda: {"name": "token_mean"})
    filters: list[Annotated[Component, FILTER]] = field(default_factory=list)  # of a step's groups, in order
    transforms: list[Annotated[Component, TRANSFORM]] = field(default_factory=list)  # of rewards, advantages, minibatches
    teacher: Annotated[Component, TEACHER] = field(default_factory=dict)  # whose log-probs are imitated; {}: nobody's
    critic: CriticOptions | None = None  # a second model that learns values; None: no critic
    minibatches_per_step: PositiveInt = 1  # optimizer updates per pass over a step's episodes
    epochs_per_step: PositiveInt = 1  # passes over a step's episodes


@dataclass
class EvaluationSection:
    every_steps: NonNegativeInt = 25  # 0: only at the end
    at_start: bool = True  # also before the first step
    questions: PositiveInt | None = None  # the first N of data.val_split; None: all
    final_questions: PositiveInt | None = None  # for the last evaluation; None: all
    samples_per_prompt: PositiveInt = 1  # attempts at each task
    temperature: NonNegativeFloat = 0.0  # 0 is greedy


@dataclass
class CheckpointSection:
    every_steps: NonNegativeInt = 25  # 0: only at the end
    keep: PositiveInt = 2  # the newest N
    asynchronous: bool = False  # copy the state, write it while training goes on
    export: bool = True  # a HuggingFace directory at the end, checked against the trainer's logits


@dataclass
class MetricsSection:
    sinks: list[Annotated[Component, SINK]] = field(default_factory=list)  # beside metrics.jsonl
    trajectories_per_step: NonNegativeInt = 4  # written to trajectories/ and tokens/, in whole groups
    progress: Literal["auto", "rich", "plain", "none"] = "auto"  # how the terminal shows a run
    picture: bool = True  # draw progress.png
    page: bool = False  # served while the run goes on, on this machine alone; report.html at the end


@dataclass
class ClusterSection:
    ranks: NonNegativeInt = 0  # 0: everything in this process; N: N trainer ranks, each a Ray actor
    address: str | None = None  # of a running Ray cluster; None starts one on this machine
    services: str | None = None  # name under which `rlflow serve` offers processes there; None: actors of the run's own
    threads_per_rank: PositiveInt = 1  # CPU threads of a rank
    gpus_per_rank: NonNegativeFloat = 0.0  # GPUs of a rank or rollout worker
    rollout_workers: NonNegativeInt = 0  # 0: episodes in this process; N: N Ray actors, each with engine and environment
    weight_transfer: Annotated[Component, WEIGHT_TRANSFER] = field(default_factory=lambda: {"name": "auto"})
    stall_timeout_s: PositiveFloat = 300.0  # nothing has moved for so long, or three times as long as it ever took: it hangs


@dataclass
class RunConfig:
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    environment: Annotated[Component, ENVIRONMENT] = field(default_factory=dict)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.run.steps * self.algorithm.minibatches_per_step * self.algorithm.epochs_per_step

    @property
    def asynchrony(self) -> Asynchrony:
        """The options of `rollout.asynchronous`."""
        return self.rollout.asynchronous


def load_config(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), preset: str | None = None
) -> RunConfig:
    """The run configuration from a YAML file, a preset and `section.key=value` overrides, over the defaults above."""
    return configuration.load_config(path, overrides, RunConfig, preset)
