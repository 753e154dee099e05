"""How a model lies over ranks, and what makes a layout impossible: all known before anything
expensive starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from rlflow.errors import ConfigError
from rlflow.models.architecture import Architecture
from rlflow.models.rules import Rule
from rlflow.models.tables import EMBEDDING
from rlflow.values import PositiveInt, checked


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of Megatron's parallel dimensions; what remains of the ranks is data parallel. Any
    product is allowed.

    `virtual_pipeline`: model chunks per pipeline rank, which take turns (the interleaved schedule).
    Raises ConfigError for sizes that contradict each other."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "virtual_pipeline",
        ):
            checked(PositiveInt, getattr(self, name), f"trainer.{name}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "trainer.sequence_parallel: splits tokens over the tensor-parallel ranks; expected trainer.tensor_parallel "
                "of at least 2, found 1. Raise it, or set trainer.sequence_parallel=false."
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"trainer.virtual_pipeline={self.virtual_pipeline}: interleaves the model chunks of pipeline ranks; expected "
                "trainer.pipeline_parallel of at least 2, found 1. Raise it, or set trainer.virtual_pipeline=1."
            )

    @classmethod
    def of(cls, section: Any) -> ParallelLayout:
        """The layout that an object with attributes of these names asks for, such as the `trainer`
        section."""
        return cls(**{field.name: getattr(section, field.name) for field in fields(cls)})

    @property
    def model_ranks(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def name(self) -> str:
        """Short, for messages: TP2 PP2 VPP2 CP1."""
        return (
            f"TP{self.tensor_parallel} PP{self.pipeline_parallel} VPP{self.virtual_pipeline} CP{self.context_parallel}"
            f"{' SP' if self.sequence_parallel else ''}"
        )

    @property
    def stages(self) -> int:
        """Model chunks of a pipeline together."""
        return self.pipeline_parallel * self.virtual_pipeline

    def data_parallel(self, ranks: int) -> int:
        """How often `ranks` processes hold the model (0 ranks: this process alone). Raises
        ConfigError for a remainder."""
        if max(ranks, 1) % self.model_ranks:
            sizes = f"{self.tensor_parallel} x {self.pipeline_parallel} x {self.context_parallel}"
            raise ConfigError(
                "cluster.ranks: expected a multiple of trainer.tensor_parallel x pipeline_parallel x context_parallel = "
                f"{sizes} = {self.model_ranks}, found {ranks}{' (one process)' if ranks == 0 else ''}; "
                f"set cluster.ranks={-(-max(ranks, 1) // self.model_ranks) * self.model_ranks}, or make the sizes smaller."
            )
        return max(ranks, 1) // self.model_ranks

    def check_model(self, model: Architecture) -> None:
        """Raises ConfigError unless the model can be split so."""
        parts = (
            ("tensor_parallel", self.tensor_parallel, "attention heads", model.heads),
            ("tensor_parallel", self.tensor_parallel, "key-value heads", model.groups),
            ("tensor_parallel", self.tensor_parallel, "intermediate size", model.ffn),
            ("pipeline_parallel", self.pipeline_parallel, "layers", model.layers),
            (
                "virtual_pipeline",
                self.virtual_pipeline,
                "layers per pipeline rank",
                model.layers // self.pipeline_parallel,
            ),
        )
        for name, count, what, size in parts:
            if size % count or not size:
                divisors = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
                raise ConfigError(
                    f"trainer.{name}={count} does not divide the model's {size} {what}; possible: {divisors}."
                )


def stage_of(
    rule: Rule, layer: int, model: Architecture, layout: ParallelLayout
) -> tuple[int, int]:
    """(pipeline rank, chunk there) that holds a tensor: layers are dealt evenly, and ranks take
    turns with their chunks."""
    stage = layout.stages - 1
    if rule.per_layer:
        stage = layer // (model.layers // layout.stages)
    elif rule is EMBEDDING:
        stage = 0
    return stage % layout.pipeline_parallel, stage // layout.pipeline_parallel
