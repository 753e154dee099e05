"""The options of every trainer, written once: the `trainer` section of a configuration and the
keywords of the backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args

import torch

from rlflow.components import TRAINER, check_options
from rlflow.errors import ConfigError
from rlflow.trainer.layout import ParallelLayout
from rlflow.trainer.optimizers import OPTIMIZER, AdamW
from rlflow.trainer.schedule import SCHEDULE
from rlflow.values import (
    Component,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    checked,
)

DType = Literal["float32", "bfloat16"]
T = TypeVar("T")
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a transformer's layer, by their HuggingFace names."""
Module = Literal["core_attn", "mlp"]
"""Parts of a transformer's layer whose activations can be computed again, by Megatron's names."""


@dataclass(frozen=True)
class Routing:
    """What a policy with experts does: `replay` as `TrainerOptions.router_replay`, over so many
    `experts` of a layer."""

    replay: str
    experts: int


@dataclass(frozen=True)
class CriticOptions:
    """What can be said about a critic (`algorithm.critic`). In everything else it is trained as the
    policy is."""

    lr: PositiveFloat = 1e-5  # learning rate of the critic
    schedule: Annotated[Component, SCHEDULE] = field(default_factory=lambda: {"name": "constant"})
    warmup_updates: NonNegativeInt = 0  # of the critic alone, before the policy's first

    def decaying_over(self, updates: int) -> CriticOptions:
        """As `TrainerOptions.decaying_over`."""
        return dataclasses.replace(
            self, schedule=_ending(self.schedule, "algorithm.critic.schedule", updates)
        )

    def check(self) -> None:
        """Raises ConfigError for a schedule that does not fit."""
        SCHEDULE.build(self.schedule, "algorithm.critic.schedule")(0, self.lr)


@dataclass(frozen=True)
class LoraOptions:
    """What can be said about low-rank adapters: each target computes W x + alpha / rank * B (A x),
    and A and B alone are trained (LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1). Names and
    meanings are those of the package peft."""

    rank: PositiveInt = 16  # columns of A's output
    alpha: PositiveFloat = 32.0  # the product is scaled by alpha / rank
    targets: Sequence[Projection] = get_args(Projection)  # layers that get an adapter
    sync: Literal["adapters", "merged"] = "adapters"  # what engines get: these alone, or weights

    def __post_init__(self) -> None:
        """Puts the targets in the order of a layer. Raises ConfigError for no target."""
        known = get_args(Projection)
        if not self.targets:
            raise ConfigError(
                f"trainer.lora.targets: expected at least one of {', '.join(known)}, found none; "
                "leave it out for all."
            )
        ordered = tuple(name for name in known if name in self.targets)
        object.__setattr__(self, "targets", ordered)

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class BalanceOptions:
    """What can be said about an even load of experts (`rlflow.trainer.megatron.balancing`).
    aux_loss, z_loss: coefficients of transformers' load-balancing loss and of the squared
    log-sum-exp of routers; bias_rate: what an update adds to or takes from each entry of a bias."""

    aux_loss: NonNegativeFloat = 0.0  # coefficient of transformers' load-balancing loss
    z_loss: NonNegativeFloat = 0.0  # coefficient of the routers' squared log-sum-exp
    bias_rate: NonNegativeFloat = 0.0  # by how much an update moves a router's bias


@dataclass(frozen=True)
class TrainerOptions:
    """What can be said about a trainer. The default backend does all of it; another one says what
    it cannot do (`Trainer.check_options`)."""

    backend: str = "megatron"  # megatron | package.module:Name
    tensor_parallel: PositiveInt = 1  # ranks that split each layer
    pipeline_parallel: PositiveInt = 1  # ranks that split the stack of layers
    context_parallel: PositiveInt = 1  # every row's tokens split over these ranks
    virtual_pipeline: PositiveInt = 1  # model chunks per pipeline rank, interleaved
    sequence_parallel: bool = False  # norms and residuals split over the tensor-parallel ranks
    expert_parallel: PositiveInt = 1  # ranks of a stage that deal a layer's experts out, each whole
    distributed_optimizer: bool = False  # its state split over data- and context-parallel ranks
    router_replay: Literal["off", "rollout", "recompute"] = "off"  # experts: anew, sampled, scored
    balance: BalanceOptions | None = None  # of the load of experts; None: as config.json says
    recompute: Literal["none", "selective", "full"] | Sequence[Module] = "none"  # parts of layers
    lr: PositiveFloat = 1e-6  # learning rate of the optimizer
    schedule: Annotated[Component, SCHEDULE] = field(default_factory=lambda: {"name": "constant"})
    optimizer: Annotated[Component, OPTIMIZER] = field(default_factory=lambda: {"name": "adamw"})
    max_gradient_norm: NonNegativeFloat = 1.0  # L2, over all parameters; 0 does not clip
    tokens_per_microbatch: PositiveInt = 16384  # rows x longest row; packed: the sum of the lengths
    packing: bool = False  # rows end to end instead of padded to the longest
    logits_chunk_mib: PositiveFloat = 512.0  # of float32 logits that exist at a time, per rank
    offload_snapshots: bool = False  # the reference's weights in host memory; GPUs only
    release_gradients: bool = False  # no gradient buffers between updates
    lora: LoraOptions | None = None  # adapters that are trained; None: the weights
    fp8: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"  # GPUs only

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TrainerOptions:
        """From keywords. Raises ConfigError for an unknown one and for a value of another type or
        out of range."""
        for name, kind in (("lora", LoraOptions), ("balance", BalanceOptions)):
            given = options.get(name)
            if given is not None and not isinstance(given, kind):
                options = {**options, name: section(kind, given, f"trainer.{name}")}
        return section(cls, options, "trainer")

    @property
    def layout(self) -> ParallelLayout:
        """Raises ConfigError for sizes that contradict each other."""
        names = (size.name for size in dataclasses.fields(ParallelLayout))
        return ParallelLayout(**{name: getattr(self, name) for name in names})

    @property
    def recomputed(self) -> frozenset[str]:
        """The parts of a layer that the backward pass computes again; all of it: {"full"}."""
        if not isinstance(self.recompute, str):
            return frozenset(self.recompute)
        return {
            "none": frozenset(),
            "selective": frozenset({"core_attn", "mlp"}),
            "full": frozenset({"full"}),
        }[self.recompute]

    @property
    def adamw(self) -> AdamW:
        """The optimizer's options. Raises ConfigError for an optimizer that is not AdamW, the one
        that the backends have."""
        made = OPTIMIZER.build(self.optimizer, "trainer.optimizer")
        if not isinstance(made, AdamW):
            raise ConfigError(
                f"trainer.optimizer: the trainers have adamw, found '{self.optimizer['name']}'."
            )
        return made

    def check_without_gpu(self) -> None:
        """Raises ConfigError for what spares GPU memory, of a trainer that has no GPU."""
        for name, asked in (
            ("optimizer.offload", self.adamw.offload),
            ("offload_snapshots", self.offload_snapshots),
        ):
            if asked:
                raise ConfigError(
                    f"trainer.{name}: found true, but the trainer has no GPU whose memory it could "
                    "spare; set it to false."
                )

    def learning_rate(self) -> Callable[[int], float]:
        """Optimizer step, from 0 -> rate. Raises ConfigError for a schedule that does not fit,
        before any step."""
        schedule = SCHEDULE.build(self.schedule, "trainer.schedule")
        schedule(0, self.lr)
        return lambda step: schedule(step, self.lr)

    def decaying_over(self, updates: int) -> TrainerOptions:
        """The options with a schedule that ends after so many optimizer updates, where it does not
        say itself when it ends."""
        return dataclasses.replace(
            self, schedule=_ending(self.schedule, "trainer.schedule", updates)
        )

    def check(self, ranks: int = 0) -> None:
        """Raises ConfigError for what contradicts itself, the number of ranks (0: this process
        alone), or the backend."""
        self.layout.data_parallel(ranks)
        self.learning_rate()
        OPTIMIZER.check(self.optimizer, where="trainer.optimizer")
        if self.lora is not None and self.fp8 != "none":
            raise ConfigError(
                f"trainer.fp8: '{self.fp8}' with trainer.lora: adapters stand beside "
                "megatron-core's own layers, which have no fp8; set one of the two to none."
            )
        if (
            self.backend != TrainerOptions.backend
        ):  # the default does everything, and takes seconds to import
            TRAINER.resolve(self.backend, "trainer.backend").check_options(self, ranks)


def section(kind: type[T], options: Mapping[str, Any], where: str) -> T:
    """The options of a section, checked. Raises ConfigError for an unknown key, and for a value of
    another type or out of range."""
    return kind(**check_options(options, kind, where=where))


def _ending(schedule: Mapping[str, Any], where: str, updates: int) -> dict[str, Any]:
    _, keywords = SCHEDULE.complete(schedule, where, decay_steps=updates)
    return {"name": schedule["name"], **keywords}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a model's weights. Raises ConfigError."""
    return getattr(torch, checked(DType, name, "model.dtype"))
