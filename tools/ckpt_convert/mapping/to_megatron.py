"""The plan of an import: from HuggingFace tensors, every rank's part of every Megatron tensor.

Both formats are made of the same parts. torch_dist (writers/torch_dist.py) keeps them as chunks of whole tensors, legacy files
(writers/legacy.py) as the tensors of one rank's module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.errors import ConversionError, ExitCode
from rlflow.models.architecture import Architecture, placed_rules
from rlflow.models.rules import Rule, Split
from rlflow.models.tables import TIED_OUTPUT

from ..dtypes import BFLOAT16, FLOAT8, DType
from ..readers.source import StoredTensor, TensorSource
from .plan import Equal, View
from .rank_slices import RankSlice, rank_slice

NOT_WEIGHTS = ("rotary_emb.inv_freq",)
"""Endings of buffers that old model directories hold."""
OUTPUT_NAME = "lm_head.weight"


@dataclass(frozen=True)
class CheckpointLayout:
    """How the checkpoint is to be cut: ranks per tensor, pipeline and expert group, model chunks per pipeline rank.

    first_layers, last_layers: layers of the first and of the last pipeline rank where they are not as many as the others'
    (`decoder_first_pipeline_num_layers`, `decoder_last_pipeline_num_layers`).
    vocab_multiple: the vocabulary is padded to a multiple of it times the tensor-parallel ranks
    (`make_vocab_size_divisible_by`). fused: names and cuts of Transformer Engine's layers, else of Megatron's own."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    vocab_multiple: int = 128
    fused: bool = True
    first_layers: int | None = None
    last_layers: int | None = None

    def heights(self, layers: int) -> list[int]:
        """Layers of each pipeline rank's model chunk. Raises ConversionError (5) where they do not come out even."""
        ends = [end for end in (self.first_layers, self.last_layers) if end is not None]
        left, middle = layers - sum(ends), self.pipeline - len(ends)
        if ends and self.pipeline == 1:
            raise ConversionError(
                "--first-stage-layers and --last-stage-layers need several pipeline ranks; raise --pp.", ExitCode.OTHER_LAYOUT
            )
        each = left // middle if middle else 0
        found = [each] * self.pipeline
        found[0] = each if self.first_layers is None else self.first_layers
        found[-1] = found[-1] if self.last_layers is None else self.last_layers
        if sum(found) != layers or min(found) < 1 or any(height % self.virtual for height in found):
            raise ConversionError(
                f"{layers} layers, {sum(ends)} of them by --first-stage-layers and --last-stage-layers, do not come out even "
                f"on --pp {self.pipeline} with --vpp {self.virtual}.",
                ExitCode.OTHER_LAYOUT,
            )
        return [height // self.virtual for height in found]

    def rows(self, vocab: int) -> int:
        """Rows of the embedding, padding included."""
        multiple = self.vocab_multiple * self.tensor
        return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class Import:
    """What there is to cut: the checked source and model, and how. dtype: of the output; None keeps each tensor's."""

    source: TensorSource
    model: Architecture
    layout: CheckpointLayout
    dtype: DType | None
    equal: tuple[Equal, ...]
    left_out: tuple[str, ...]

    def rules(self) -> Iterator[tuple[Rule, int]]:
        """(rule, layer) of the tables, with latent projections cut as the layers of this kind cut them."""
        for rule, layer in placed_rules(self.model):
            local = rule.split is Split.LATENT and not self.layout.fused
            yield (dataclasses.replace(rule, split=Split.COLUMN) if local else rule), layer

    def tied_output(self) -> list[tuple[Rule, int]]:
        """The embedding's copy on the last of several pipeline stages."""
        return [(TIED_OUTPUT, 0)] if self.model.tied and self.layout.pipeline > 1 else []

    def rank_slice(self, rule: Rule, layer: int, rank: int) -> RankSlice:
        """A tensor-parallel rank's part of a tensor."""
        rows = self.layout.rows(self.model.vocab)
        return rank_slice(rule, self._views(rule, layer), self.model, rank, self.layout.tensor, rows)

    def dtype_of(self, rule: Rule, layer: int) -> DType:
        stored = self._views(rule, layer)[0].stored.dtype
        if self.dtype is None or rule.exact:
            return BFLOAT16 if stored is FLOAT8 else stored
        return self.dtype

    def _views(self, rule: Rule, layer: int) -> list[View]:
        return [View(self.source.tensors[name]) for name in rule.names(layer)]


def make_import(
    source: TensorSource,
    model: Architecture,
    layout: CheckpointLayout,
    dtype: DType | None = None,
    predicted: int = 0,
) -> Import:
    """The checked import. predicted: layers for multi-token prediction after the model's own, which are left out.

    Raises ConversionError for tensors that are missing, unknown (6), or of a shape that config.json does not imply (7),
    and for a layout that does not divide the model (5)."""
    check_divides(model, layout)
    later = tuple(f"model.layers.{model.layers + number}." for number in range(predicted))
    left = {name: stored for name, stored in source.tensors.items() if not name.endswith(NOT_WEIGHTS)}
    left_out = tuple(name for name in left if name.startswith(later)) if later else ()
    for name in left_out:
        del left[name]
    for rule, layer in placed_rules(model):
        kinds = {_take(source, left, name, shape).dtype for name, shape in zip(rule.names(layer), rule.shapes(model))}
        if len(kinds) > 1:
            raise ConversionError(
                f"{source.path}: {' and '.join(rule.names(layer))} become one tensor, but are of {len(kinds)} dtypes; "
                "expected one.",
                ExitCode.OTHER_MODEL,
            )
    equal = _repeated_output(source, left, model)
    if left:
        raise ConversionError(
            f"{source.path}: {len(left)} tensors have no place in a model of family '{model.family}' with {model.layers} "
            f"layers: {', '.join(sorted(left)[:4])}{', ...' if len(left) > 4 else ''}.",
            ExitCode.UNKNOWN_MODEL,
        )
    return Import(source, model, layout, dtype, equal, left_out)


def check_divides(model: Architecture, layout: CheckpointLayout) -> None:
    """Raises ConversionError (5) unless the layout divides the model evenly."""
    experts = model.experts
    parts = [
        ("--tp", layout.tensor, "attention heads", model.heads),
        ("--tp", layout.tensor, "intermediate size", model.ffn),
    ]
    if model.latent is None and layout.tensor % model.groups:  # else several ranks share a group
        parts.append(("--tp", layout.tensor, "key-value heads", model.groups))
    if layout.first_layers is None and layout.last_layers is None:
        parts.append(("--pp times --vpp", layout.pipeline * layout.virtual, "layers", model.layers))
    if experts is not None:
        parts += [
            ("--ep", layout.expert, "experts", experts.count),
            ("--tp", layout.tensor, "experts' intermediate size", experts.ffn),
            ("--tp", layout.tensor, "shared experts' intermediate size", experts.shared_ffn),
        ]
    if model.latent is not None and not layout.fused:
        parts += [
            ("--tp", layout.tensor, "compressed queries", model.size("query_rank")),
            ("--tp", layout.tensor, "compressed keys", model.size("latent")),
        ]
    for flag, ranks, what, size in parts:
        if size % ranks:
            divisors = ", ".join(str(number) for number in range(1, min(size, 64) + 1) if size % number == 0)
            raise ConversionError(
                f"{flag} {ranks} does not divide the model's {size} {what}; possible: {divisors}.",
                ExitCode.OTHER_LAYOUT,
            )
    layout.heights(model.layers)
    if layout.expert > 1 and experts is None:
        raise ConversionError(
            f"--ep {layout.expert}: the model of family '{model.family}' has no experts; leave it out.",
            ExitCode.OTHER_LAYOUT,
        )
    if layout.virtual > 1 and layout.pipeline == 1:
        raise ConversionError(
            f"--vpp {layout.virtual} needs several pipeline ranks; raise --pp or leave it out.", ExitCode.OTHER_LAYOUT
        )


def _take(source: TensorSource, left: dict[str, StoredTensor], name: str, shape: tuple[int, ...]) -> StoredTensor:
    stored = left.pop(name, None)
    if stored is None:
        raise ConversionError(
            f"{source.path}: tensor '{name}' is missing, which config.json implies.", ExitCode.UNKNOWN_MODEL
        )
    if stored.shape != shape:
        raise ConversionError(
            f"{source.path}: '{name}' has shape {stored.shape}, config.json implies {shape}.", ExitCode.OTHER_MODEL
        )
    return stored


def _repeated_output(source: TensorSource, left: dict[str, StoredTensor], model: Architecture) -> tuple[Equal, ...]:
    """Files of a tied model may repeat the embedding as output layer, which then must be the embedding."""
    output = left.pop(OUTPUT_NAME, None) if model.tied else None
    if output is None:
        return ()
    embedding = source.tensors[TIED_OUTPUT.names()[0]]
    problem = f"{source.path}: '{OUTPUT_NAME}' is not the embedding, but config.json says tie_word_embeddings is true."
    if (output.shape, output.dtype) != (embedding.shape, embedding.dtype):
        raise ConversionError(problem, ExitCode.OTHER_MODEL)
    return (Equal(View(embedding), View(output), model.vocab, problem, ExitCode.OTHER_MODEL),)


def parameters(model: Architecture) -> int:
    """Of the model, without padding and copies."""
    return sum(math.prod(shape) for rule, _ in placed_rules(model) for shape in rule.shapes(model))
