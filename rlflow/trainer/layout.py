"""A model's layout over ranks, and what makes one impossible, before anything expensive starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlflow.errors import ConfigError
from rlflow.models.architecture import Architecture, padded_vocab, placed_rules
from rlflow.models.layer_rules import EMBEDDING, OUTPUT, TIED_OUTPUT
from rlflow.models.rules import Rule, Split
from rlflow.values import PositiveInt, checked


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of Megatron's parallel dimensions; what remains of the ranks is data parallel. Any
    product is allowed.

    `virtual_pipeline`: model chunks per pipeline rank, which take turns (the interleaved schedule).
    `expert_parallel`: ranks of a pipeline stage, whatever else they split, that deal a layer's
    experts out among themselves, each expert whole (Megatron's expert tensor parallel size is 1).
    Raises ConfigError for sizes that contradict each other."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if name != "sequence_parallel":
                checked(PositiveInt, size, f"trainer.{name}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "trainer.sequence_parallel: splits tokens over the tensor-parallel ranks; expected "
                "trainer.tensor_parallel of at least 2, found 1. Raise it, or set "
                "trainer.sequence_parallel=false."
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"trainer.virtual_pipeline={self.virtual_pipeline}: interleaves the model chunks "
                "of pipeline ranks; expected trainer.pipeline_parallel of at least 2, found 1. "
                "Raise it, or set trainer.virtual_pipeline=1."
            )

    @property
    def model_ranks(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def name(self) -> str:
        """Short, for messages: TP2 PP2 VPP2 CP1."""
        return (
            f"TP{self.tensor_parallel} PP{self.pipeline_parallel} VPP{self.virtual_pipeline} "
            f"CP{self.context_parallel}"
            f"{' SP' if self.sequence_parallel else ''}"
            f"{f' EP{self.expert_parallel}' if self.expert_parallel > 1 else ''}"
        )

    @property
    def stages(self) -> int:
        """Model chunks of a pipeline together."""
        return self.pipeline_parallel * self.virtual_pipeline

    def data_parallel(self, ranks: int) -> int:
        """How often `ranks` processes hold the model (0 ranks: this process alone). Raises
        ConfigError for a remainder."""
        processes = max(ranks, 1)
        if processes % self.model_ranks:
            sizes = f"{self.tensor_parallel} x {self.pipeline_parallel} x {self.context_parallel}"
            raise ConfigError(
                "cluster.ranks: expected a multiple of trainer.tensor_parallel x pipeline_parallel "
                f"x context_parallel = {sizes} = {self.model_ranks}, found "
                f"{ranks}{' (one process)' if ranks == 0 else ''}; "
                f"set cluster.ranks={-(-processes // self.model_ranks) * self.model_ranks}, or "
                "make the sizes smaller."
            )
        of_stage = processes // self.pipeline_parallel
        if of_stage % self.expert_parallel:
            raise ConfigError(
                "trainer.expert_parallel: expected a divisor of the ranks of a pipeline stage, "
                f"{of_stage}, found {self.expert_parallel}."
            )
        return processes // self.model_ranks

    def experts_here(self, model: Architecture) -> int:
        """Experts of a layer on each rank."""
        return model.experts.count // self.expert_parallel if model.experts is not None else 0

    def check_frozen(self, model: Architecture) -> None:
        """`check_model` of a model beside the policy: a dense one has no experts to split."""
        parallel = self.expert_parallel if model.experts is not None else 1
        replace(self, expert_parallel=parallel).check_model(model)

    def check_model(self, model: Architecture) -> None:
        """Raises ConfigError unless the model can be split so."""
        experts = model.experts
        parts = [
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
        ]
        if experts is not None:
            parts.append(("expert_parallel", self.expert_parallel, "experts", experts.count))
            if self.tensor_parallel > 1 and not self.sequence_parallel:
                raise ConfigError(
                    "trainer.sequence_parallel: expected true for a model with experts where "
                    f"trainer.tensor_parallel is above 1 (found {self.tensor_parallel}): each rank "
                    "sends tokens of its own to the experts."
                )
        elif self.expert_parallel > 1:
            raise ConfigError(
                f"trainer.expert_parallel={self.expert_parallel}: the model has no experts; set it "
                "to 1."
            )
        for name, count, what, size in parts:
            if size % count or not size:
                divisors = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
                raise ConfigError(
                    f"trainer.{name}={count} does not divide the model's {size} {what}; possible: "
                    f"{divisors}."
                )


def stage_of(
    rule: Rule, layer: int, model: Architecture, layout: ParallelLayout
) -> tuple[int, int]:
    """(pipeline rank, chunk there) that holds a tensor: layers are dealt evenly, and ranks take
    turns with their chunks."""
    stage = layout.stages - 1
    if rule.per_layer:
        stage = layer // (model.layers // layout.stages)
    elif rule.stands_for(EMBEDDING):
        stage = 0
    return stage % layout.pipeline_parallel, stage // layout.pipeline_parallel


def stage_parameters(
    model: Architecture, layout: ParallelLayout, values: bool = False, experts: bool = False
) -> list[int]:
    """Parameters on one rank of each pipeline stage. values: of a critic, whose head is one vector
    and a number. experts: those of experts alone."""
    sizes = [0] * layout.pipeline_parallel
    tensor, most = layout.tensor_parallel, max(layout.experts_here(model), 1)
    for rule, layer in placed_rules(model):
        left_out = (values and rule.stands_for(OUTPUT)) or (experts and not rule.per_expert)
        if not left_out and (rule.expert or 0) < most:
            sizes[stage_of(rule, layer, model, layout)[0]] += _elements(rule, model, tensor)
    if values and not experts:
        sizes[-1] += model.hidden + 1
    elif model.tied and layout.pipeline_parallel > 1 and not experts:
        sizes[-1] += _elements(TIED_OUTPUT, model, tensor)
    return sizes


def _elements(rule: Rule, model: Architecture, tensor: int) -> int:
    if rule.split is Split.VOCAB:
        return padded_vocab(model.vocab, tensor) // tensor * model.hidden
    whole = sum(math.prod(shape) for shape in rule.shapes(model))
    everywhere = rule.split in (Split.REPLICATED, Split.LATENT) or rule.per_expert
    return whole if everywhere else whole // tensor
