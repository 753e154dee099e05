"""What an export will write, from tables alone: the source of every row of every HuggingFace tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlflow.errors import ConversionError, ExitCode
from rlflow.weights.families import Architecture, placed_rules
from rlflow.weights.rules import Rule, Split
from rlflow.weights.tables import OUTPUT
from rlflow.weights.torch_dist import Item, Stored, TorchDist

NOT_WEIGHTS = ("optimizer.", "chained_", "snapshot.", "rng", "opt_param_scheduler", "rerun_state_machine")
"""Keys of what else a checkpoint holds: optimizer state, rlflow's reference snapshots, generators, schedulers."""
MOST_PADDING = 8192
"""Rows that a padded vocabulary may have more than config.json: Megatron pads to a multiple of 128 * ranks."""
ARGUMENTS = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "norm_epsilon": "norm_eps",
    "rotary_base": "rope_theta",
}
"""Megatron's arguments in common.pt that must agree with config.json."""


@dataclass(frozen=True)
class Source:
    """A Megatron tensor of one layer: the whole of a stored tensor, or one index of its stacked first axis."""

    stored: Stored
    layer: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape if self.layer is None else self.stored.shape[1:]

    def pieces(self) -> Iterator[tuple[Item, int, tuple[int, ...], tuple[int, ...]]]:
        """(item, elements to skip in it, offsets, sizes) of the chunks that hold parts of this layer."""
        for item in self.stored.items:
            if self.layer is None:
                yield item, 0, item.offsets, item.sizes
            elif item.offsets[0] <= self.layer < item.offsets[0] + item.sizes[0]:
                skipped = (self.layer - item.offsets[0]) * math.prod(item.sizes[1:])
                yield item, skipped, item.offsets[1:], item.sizes[1:]


@dataclass(frozen=True)
class Target:
    """A HuggingFace tensor. `segments`: (first row here, first row in the source, rows), in order and complete."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Source
    segments: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Every target in the order in which it is written, and the Megatron tensors by (rule, layer)."""

    model: Architecture
    targets: tuple[Target, ...]
    sources: tuple[tuple[Rule, int, Source], ...]

    @property
    def parameters(self) -> int:
        return sum(math.prod(target.shape) for target in self.targets)

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)


def make_plan(checkpoint: TorchDist, model: Architecture, dtype: torch.dtype | None = None) -> Plan:
    """The export of a checkpoint as a model of this architecture. dtype: of the output; None keeps each tensor's.

    Raises ConversionError for a checkpoint without weights (10), with tensors that have no mapping (6), or of another
    model than config.json describes (7). Every source tensor is used once and every target made."""
    _check_described(checkpoint, model)
    left = {name: one for name, one in checkpoint.tensors.items() if not name.startswith(NOT_WEIGHTS)}
    if not left:
        raise ConversionError(
            f"{checkpoint.path}: holds no weights, only {len(checkpoint.tensors)} tensors of optimizer state.",
            ExitCode.UNSUPPORTED,
        )
    if model.tied and OUTPUT.megatron in left:
        raise ConversionError(
            f"{checkpoint.path}: has '{OUTPUT.megatron}', but config.json says tie_word_embeddings is true; expected "
            "false there, or a checkpoint of a tied model.",
            ExitCode.OTHER_MODEL,
        )
    used: dict[str, set[int]] = {}
    targets: list[Target] = []
    sources: list[tuple[Rule, int, Source]] = []
    for rule, layer in placed_rules(model):
        source = _find(checkpoint, left, rule, layer, model.layers)
        used.setdefault(source.stored.name, set()).add(layer)
        _check_shape(checkpoint, rule, source, model)
        sources.append((rule, layer, source))
        targets += _targets(rule, layer, source, model, dtype)
    unused = sorted(set(left) - set(used))
    if unused:
        raise ConversionError(
            f"{checkpoint.path}: {len(unused)} tensors have no place in a model of family '{model.family}' with "
            f"{model.layers} layers: {', '.join(unused[:4])}{', ...' if len(unused) > 4 else ''}.",
            ExitCode.UNKNOWN_MODEL,
        )
    return Plan(model, tuple(targets), tuple(sources))


def _check_described(checkpoint: TorchDist, model: Architecture) -> None:
    """What the checkpoint's own descriptions say must be what config.json says; shapes alone do not tell it all."""
    present = vars(model)
    claims = {key: value for key, value in checkpoint.manifest.get("model", {}).items() if key in present}
    args = checkpoint.common.get("args") or {}
    claims |= {ours: args[theirs] for theirs, ours in ARGUMENTS.items() if args.get(theirs) is not None}
    if args.get("group_query_attention"):
        claims["groups"] = args.get("num_query_groups")
    for key, claimed in claims.items():
        if key != "max_positions" and claimed != present[key]:
            raise ConversionError(
                f"{checkpoint.path}: belongs to another model; its {key} is {claimed}, config.json of the reference "
                f"has {present[key]}.",
                ExitCode.OTHER_MODEL,
            )


def _find(checkpoint: TorchDist, tensors: dict[str, Stored], rule: Rule, layer: int, layers: int) -> Source:
    """The stored tensor of a rule: under Transformer Engine's name, which Megatron's checkpoints use, or the local one;
    stacked over layers or one key per layer."""
    names = [rule.fused, rule.megatron] if rule.fused else [rule.megatron]
    for name in names:
        stacked = tensors.get(name.replace("{i}.", ""))
        if not rule.per_layer and stacked is not None:
            return Source(stacked, None)
        if stacked is not None:
            if not stacked.shape or stacked.shape[0] != layers:
                raise ConversionError(
                    f"{checkpoint.path}: '{stacked.name}' has shape {stacked.shape}, config.json implies {layers} layers.",
                    ExitCode.OTHER_MODEL,
                )
            return Source(stacked, layer)
        if name.format(i=layer) in tensors:
            return Source(tensors[name.format(i=layer)], None)
    raise ConversionError(
        f"{checkpoint.path}: '{names[0].format(i=layer)}' is missing, which config.json implies"
        f"{' (the checkpoint is of a tied model?)' if rule is OUTPUT else ''}.",
        ExitCode.OTHER_MODEL,
    )


def _check_shape(checkpoint: TorchDist, rule: Rule, source: Source, model: Architecture) -> None:
    shapes = rule.shapes(model)
    expected = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    found = source.shape
    padded = rule.split is Split.VOCAB and found[1:] == expected[1:] and 0 <= found[0] - expected[0] <= MOST_PADDING
    if found != expected and not padded:
        raise ConversionError(
            f"{checkpoint.path}: '{source.stored.name}' has shape {found}, config.json implies {expected}"
            f"{' and at most ' + str(MOST_PADDING) + ' rows of padding' if rule.split is Split.VOCAB else ''}.",
            ExitCode.OTHER_MODEL,
        )
    if not source.stored.dtype.is_floating_point:
        raise ConversionError(
            f"{checkpoint.path}: '{source.stored.name}' holds {source.stored.dtype}, floating point expected.",
            ExitCode.UNKNOWN_MODEL,
        )


def _targets(
    rule: Rule, layer: int, source: Source, model: Architecture, dtype: torch.dtype | None
) -> Iterator[Target]:
    start = 0
    for part, (name, shape) in enumerate(zip(rule.names(layer), rule.shapes(model))):
        if rule.split is Split.QKV:
            segments = _group_rows(part, model)
        else:
            segments = ((0, start, shape[0]),)
        start += shape[0]
        yield Target(name, shape, dtype or source.stored.dtype, source, segments)


def _group_rows(part: int, model: Architecture) -> tuple[tuple[int, int, int], ...]:
    """Segments of q (part 0), k (1) or v (2): per query group the source has [queries | key | value] rows."""
    queries = model.heads // model.groups * model.head_dim
    group = queries + 2 * model.head_dim
    rows = queries if part == 0 else model.head_dim
    first = (0, queries, queries + model.head_dim)[part]
    return tuple((number * rows, number * group + first, rows) for number in range(model.groups))
