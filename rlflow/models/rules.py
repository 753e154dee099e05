"""The vocabulary of the model families' tables: one rule says which HuggingFace tensors make one
Megatron tensor."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Sizes(Protocol):
    """What gives the symbols of shapes their numbers: an `Architecture`."""

    def size(self, symbol: str) -> int: ...


class Split(enum.Enum):
    """How a Megatron tensor is cut over tensor-parallel ranks."""

    REPLICATED = "replicated"
    COLUMN = "column"  # dimension 0
    ROW = "row"  # dimension 1
    QKV = "qkv"  # dimension 0 by query group: [queries of the group | key | value] per group
    GATE_UP = "gate_up"  # each rank holds [its gate rows | its up rows]
    VOCAB = "vocab"  # dimension 0, padded with zero rows to a multiple of the ranks
    LATENT = "latent"  # whole on every rank of Transformer Engine, dimension 0 in local layers


class Where(enum.Enum):
    """Which layers, or which models, have a rule's tensor."""

    ALWAYS = "always"
    DENSE = "layers without experts"
    SPARSE = "layers with experts"
    SHARED = "layers with experts that have shared experts beside them"
    UNTIED = "models whose output layer is not the embedding"
    QUERY_RANK = "models whose queries are projected down and up again"
    NO_QUERY_RANK = "models whose queries are projected directly"
    BIASES = "models with a bias on every projection of attention and MLP"
    QKV_BIAS = "models with a bias on queries, keys and values alone"
    QK_NORM = "models that normalize queries and keys of each head"


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor. `sources`: (HuggingFace name, shape in symbols). `{i}` is the layer,
    `{e}` the expert.

    megatron: the name in Megatron's own ("local") layers. fused: the name in Transformer Engine's
    layers where it is another (they fuse a norm with the matmul that follows, and keep a layer's
    experts in one module). A rule with `{e}` stands for one rule per expert; `of_expert` makes
    them."""

    megatron: str
    split: Split
    sources: tuple[tuple[str, str], ...]
    where: Where = Where.ALWAYS
    fused: str = ""
    local_key: str = ""  # a third name: the one that local layers give a torch_dist checkpoint
    expert: int | None = None
    # Keeps its dtype when the model is cast: a router's bias orders experts by tiny differences.
    exact: bool = False

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.megatron

    @property
    def keys(self) -> tuple[str, ...]:
        """The names that a torch_dist checkpoint may keep it under; the first is that of
        Transformer Engine's layers."""
        if self.per_expert:
            return (self.megatron,)
        return tuple(filter(None, (self.fused, self.megatron, self.local_key)))

    def stands_for(self, other: Rule) -> bool:
        """Whether both make the same Megatron tensor of the same layers, from whatever sources."""
        return (self.megatron, self.where) == (other.megatron, other.where)

    def of_expert(self, expert: int) -> Rule:
        """This rule for one expert: its sources are that expert's."""
        sources = tuple((name.replace("{e}", str(expert)), shape) for name, shape in self.sources)
        return dataclasses.replace(self, sources=sources, expert=expert)

    def names(self, layer: int = 0) -> list[str]:
        """The HuggingFace names of the sources in a layer, in the order that `shard` takes and
        `merge` returns."""
        return [name.format(i=layer) for name, _ in self.sources]

    def shapes(self, model: Sizes) -> list[tuple[int, ...]]:
        """The HuggingFace shapes of the sources."""
        return [tuple(model.size(symbol) for symbol in shape.split()) for _, shape in self.sources]

    def megatron_name(self, layer: int = 0, expert: int = 0, fused: bool = False) -> str:
        """The parameter's name in a module, of local or of Transformer Engine's layers. layer,
        expert: as that module counts them; a pipeline stage and an expert-parallel rank start at
        0."""
        return ((self.fused if fused else "") or self.megatron).format(i=layer, e=expert)


def makes(rules: Iterable[Rule], wanted: Rule) -> bool:
    """Whether some of the rules makes the wanted one's Megatron tensor, from whatever sources."""
    return any(rule.stands_for(wanted) for rule in rules)
