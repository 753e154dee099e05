"""The run configuration: one dataclass per YAML section. Units stand in the names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

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
from rlflow.values import (
    Component,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
)


def named(name: str) -> Any:
    """A field whose default is the component of this name."""
    return field(default_factory=lambda: {"name": name})


def listed(*names: str) -> Any:
    """A field whose default is the list of the components of these names."""
    return field(default_factory=lambda: [{"name": name} for name in names])


@dataclass
class RunSection:
    directory: str = "runs/{name}"  # where the run is written; {name} is run.name
    name: str = "run"  # of the run
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0  # what every generator takes
    steps: Annotated[int, Range(1, 10**9)] = 100  # optimizer steps at the most
    epochs: PositiveFloat | None = None  # passes over the training tasks: they set `steps`
    max_minutes: PositiveFloat | None = None  # stops cleanly after this wall time
    target: Share | None = None  # stops when eval/exact_match reaches this
    deterministic: bool = False  # equal seeds give equal bits in one process
    resume: bool = False  # continue from the newest checkpoint (--resume)
    resume_step: PositiveInt | None = None  # with resume: this step's checkpoint, not the newest
    overwrite: bool = False  # throw away what an earlier run left in `directory`
    folder: str | None = None  # where relative paths start: a run notes where it was started


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
    curator: Annotated[Component, CURATOR] = named("epochs")  # which tasks come next


@dataclass
class Faults:
    """The keys of `rollout.faults`: how much may go wrong, and when a call counts as hung."""

    max_aborted_share: Share = 0.25  # of a step's episodes; above it the run stops
    call_s: PositiveFloat = 600.0  # a reset, step or close of the environment
    episode_s: PositiveFloat = 7200.0  # an episode, generation included


@dataclass
class Asynchrony:
    """The keys of `rollout.asynchronous`; with both numbers 0 nothing runs ahead."""

    max_staleness: NonNegativeInt = 0  # versions that a trained token may lag behind
    run_ahead: NonNegativeInt | None = None  # batches beyond the current; null: 1 with staleness
    when_stale: Literal["wait", "drop"] = "wait"  # for what gets too old, or sample it again
    on_update: Literal["keep", "abort", "wait"] = "keep"  # requests: go on, cut and go on, end
    group_s: PositiveFloat | None = None  # a group ends without attempts that take longer
    score_early: bool = False  # reference and teacher score each group as it ends
    overlap: bool = False  # generate while the trainer works, on cores or GPUs of its own

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
    engine: Annotated[Component, ENGINE] = named("embedded")
    prompts_per_step: PositiveInt = 16  # tasks per step
    samples_per_prompt: PositiveInt = 8  # attempts at each task: one group
    max_turns: PositiveInt = 4  # responses per episode
    max_response_tokens: PositiveInt = 512  # per response
    max_total_tokens: PositiveInt = 4096  # of an episode: prompt, responses and observations
    max_observation_tokens: PositiveInt | None = None  # text observations are cut to this
    temperature: PositiveFloat = 1.0  # of sampling in training
    faults: Faults = field(default_factory=Faults)
    asynchronous: Asynchrony = field(default_factory=Asynchrony)
    chat_template: bool = False  # put text prompts through the chat template as one user message
    chat_template_options: dict[str, Any] = field(default_factory=dict)  # for the chat template
    history: Literal["template", "exact"] = "template"  # earlier turns as it shows them, or as said


@dataclass
class AlgorithmSection:
    advantage: Annotated[Component, ADVANTAGE] = named("grpo")
    losses: list[Annotated[Component, LOSS]] = listed("ppo_clip")  # summed
    aggregate: Annotated[Component, AGGREGATE] = named("token_mean")
    filters: list[Annotated[Component, FILTER]] = listed()  # of a step's groups, in order
    transforms: list[Annotated[Component, TRANSFORM]] = listed()  # of rewards, advantages, batches
    teacher: Annotated[Component, TEACHER] = field(default_factory=dict)  # imitated; {}: none
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
    sinks: list[Annotated[Component, SINK]] = listed()  # beside metrics.jsonl
    trajectories_per_step: NonNegativeInt = 4  # stored as text and tokens, in whole groups
    progress: Literal["auto", "rich", "plain", "none"] = "auto"  # how the terminal shows a run
    picture: bool = True  # draw progress.png
    page: bool = False  # serve a page while the run goes on, for this machine; then report.html


@dataclass
class ClusterSection:
    ranks: NonNegativeInt = 0  # 0: everything in this process; N: N trainer ranks, each a Ray actor
    address: str | None = None  # of a running Ray cluster; None starts one on this machine
    threads_per_rank: PositiveInt = 1  # CPU threads of a rank
    gpus_per_rank: NonNegativeFloat = 0.0  # 1: a GPU each; up to 0.5: shared with a rollout worker
    rollout_workers: NonNegativeInt = 0  # Ray actors with engine and environment; 0: this process
    weight_transfer: Annotated[Component, WEIGHT_TRANSFER] = named("auto")
    stall_timeout_s: PositiveFloat = 600.0  # a rank hangs: no progress for so long

    @property
    def on_gpus(self) -> bool:
        """Whether the run trains on GPUs: ranks do that ask for some, on this machine or another;
        a trainer in this process does where torch finds one."""
        return self.gpus_per_rank > 0 if self.ranks else torch.cuda.is_available()


@dataclass
class RunConfig:
    """Everything that a run is configured by, a section each; `rlflow config` lists the keys."""

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

    def count_steps(self, tasks: int) -> None:
        """Sets `run.steps` to `run.epochs` passes over so many training tasks, where it is set."""
        if self.run.epochs is not None:
            passes = self.run.epochs * tasks / self.rollout.prompts_per_step
            self.run.steps = max(1, math.ceil(passes))

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        algorithm = self.algorithm
        return self.run.steps * algorithm.minibatches_per_step * algorithm.epochs_per_step

    @property
    def policy_updates(self) -> int:
        """Those of the policy: the first ones may be the critic's alone."""
        critic = self.algorithm.critic
        return max(1, self.updates - critic.warmup_updates) if critic else self.updates

    @property
    def asynchrony(self) -> Asynchrony:
        """The options of `rollout.asynchronous`."""
        return self.rollout.asynchronous


def load_config(
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    preset: str | None = None,
) -> RunConfig:
    """The run configuration: a YAML file, a preset and `section.key=value` over the defaults."""
    return configuration.load_config(path, overrides, RunConfig, preset)
