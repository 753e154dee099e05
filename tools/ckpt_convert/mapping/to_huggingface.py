"""The plan of an export: from the tables of models/tables.py, the source of every row of every
HuggingFace tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlflow.models.architecture import Architecture, placed_rules
from rlflow.models.layer_rules import OUTPUT
from rlflow.models.rules import Rule, Split

from ..dtypes import DType
from ..problems import other_layout, other_model, unknown_model, unsupported
from ..readers.folders import weights_elsewhere
from ..readers.source import StoredTensor, TensorSource
from .find import find_view, join_gate_up
from .pieces import pieces, whole_shape
from .plan import Equal, Plan, Target, Tile, View

OTHER_STATE = (
    "optimizer.",
    "chained_",
    "snapshot.",
    "rng",
    "opt_param_scheduler",
    "rerun_state_machine",
)
"""Beginnings of keys of optimizer state, rlflow's reference snapshots, generators, schedulers."""
MOST_PADDING = 8192
"""Rows that a padded vocabulary may have more than config.json: Megatron-LM pads to a multiple of
128 * ranks by default (`make_vocab_size_divisible_by`), so this is 64 tensor-parallel ranks."""


@dataclass(frozen=True)
class Export:
    """The plan, and the Megatron tensors that it uses by (rule, layer), for mapping the result
    back."""

    model: Architecture
    plan: Plan
    sources: tuple[tuple[Rule, int, View], ...]


def weights_of(source: TensorSource) -> dict[str, StoredTensor]:
    """The tensors that are not optimizer state and the like."""
    stored = source.tensors
    return {name: stored[name] for name in stored if not name.startswith(OTHER_STATE)}


def make_export(source: TensorSource, model: Architecture, dtype: DType | None = None) -> Export:
    """The export of a checkpoint as a model of this architecture. dtype: of the output; None keeps
    each tensor's.

    Raises ConversionError for a checkpoint without weights (10), with tensors that have no mapping
    (6), or of another model than config.json describes (7). Every source tensor is used once and
    every target made."""
    _check_described(source, model)
    left = join_gate_up(weights_of(source))
    _check_whole(source, left)
    sources = []
    targets: list[Target] = []
    for rule, layer in placed_rules(model):
        view = find_view(source, left, rule, layer, model)
        _check_shape(source, rule, view, model)
        sources.append((rule, layer, view))
        targets += _targets(rule, layer, view, model, dtype)
    equal = [_copy(source, *pair) for pair in source.copies]
    output = left.pop(OUTPUT.megatron, None) if model.tied else None
    if output is not None:  # dropped, provided that it is the embedding
        hint = "; expected false there, or a checkpoint of a tied model"
        equal.append(same_as_embedding(source, sources[0][2], output, model, hint))
    _check_use(source, left, [view for _, _, view in sources], model)
    plan = Plan(tuple(targets), tuple(equal))
    plan.check()
    return Export(model, plan, tuple(sources))


def _check_whole(source: TensorSource, weights: Mapping[str, StoredTensor]) -> None:
    """Raises ConversionError (10) for a checkpoint without weights, or with adapters."""
    if not weights:
        raise unsupported(
            f"{source.path}: holds no weights, only {len(source.tensors)} tensors of optimizer "
            f"state. {weights_elsewhere(source.path)}".rstrip()
        )
    adapters = sorted(name for name in weights if ".adapter." in name)
    if adapters:
        alone = "alone" if len(adapters) == len(weights) else "beside its weights"
        raise unsupported(
            f"{source.path}: holds LoRA adapters of Megatron-Bridge {alone} ({len(adapters)} "
            f"tensors: {some_of(adapters)}); its examples/peft/merge_lora.py, or NeMo-RL's "
            "examples/converters/convert_lora_to_hf.py, makes a HuggingFace directory of them and "
            "their base."
        )


def _check_described(source: TensorSource, model: Architecture) -> None:
    """The checkpoint's own descriptions must be what config.json says; shapes alone do not tell it
    all."""
    # What a kind of model has no use for may be anything.
    meaningless = {"max_positions"}
    if model.latent is not None:
        meaningless |= {"head_dim", "groups"}
    if model.experts is not None and all(model.experts.sparse):
        meaningless |= {"ffn"}
    for key, claimed in source.described.items():
        present = vars(model).get(key, claimed)
        if key not in meaningless and claimed != present:
            raise other_model(
                f"{source.path}: belongs to another model; its {key} is {claimed}, config.json of "
                f"the reference has {present}."
            )


def _check_use(
    source: TensorSource,
    tensors: Mapping[str, StoredTensor],
    views: list[View],
    model: Architecture,
) -> None:
    """Every tensor of the checkpoint is used, and every element of it once."""
    used: dict[str, int] = {}
    for view in views:
        name = view.stored.name
        used[name] = used.get(name, 0) + math.prod(view.shape)
    kind = f"a model of family '{model.family}' with {model.layers} layers"
    unused = sorted(set(tensors) - set(used))
    if unused:
        raise unknown_model(
            f"{source.path}: {len(unused)} tensors have no place in {kind}: {some_of(unused)}."
        )
    for name, elements in used.items():
        found = math.prod(tensors[name].shape)
        if elements != found:
            raise other_model(
                f"{source.path}: '{name}' has {found:,} elements, {kind} takes {elements:,}."
            )


def some_of(names: list[str]) -> str:
    """The first of many names."""
    return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"


def _copy(source: TensorSource, first: StoredTensor, second: StoredTensor) -> Equal:
    problem = other_layout(
        f"{source.path}: '{second.name}' is not what another rank has; the files are of two "
        "checkpoints."
    )
    return Equal(View(first), View(second), first.shape[0], problem)


def same_as_embedding(
    source: TensorSource, embedding: View, output: StoredTensor, model: Architecture, hint: str = ""
) -> Equal:
    """The comparison of a tied model's output layer. Raises ConversionError (7) where the two
    differ in shape or dtype."""
    problem = other_model(
        f"{source.path}: '{output.name}' is not the embedding, but config.json says "
        f"tie_word_embeddings is true{hint}."
    )
    alike = output.dtype is embedding.stored.dtype and output.shape[1:] == embedding.shape[1:]
    if not alike or output.shape[0] < model.vocab:
        raise problem
    return Equal(embedding, View(output), model.vocab, problem)


def _check_shape(source: TensorSource, rule: Rule, view: View, model: Architecture) -> None:
    expected, found = whole_shape(rule, model), view.shape
    padding = found[0] - expected[0] if found[1:] == expected[1:] else -1
    allowed = MOST_PADDING if rule.split is Split.VOCAB else 0
    if not 0 <= padding <= allowed:
        more = f" and at most {MOST_PADDING} rows of padding" if allowed else ""
        raise other_model(
            f"{source.path}: '{view.stored.name}' has shape {found}, config.json implies "
            f"{expected}{more}."
        )
    if not view.stored.dtype.is_floating_point:
        raise unknown_model(
            f"{source.path}: '{view.stored.name}' holds {view.stored.dtype}, floating point "
            "expected."
        )


def _targets(
    rule: Rule, layer: int, view: View, model: Architecture, dtype: DType | None
) -> Iterator[Target]:
    tiles: list[list[Tile]] = [[] for _ in rule.sources]
    for row, source, first, rows in pieces(rule, model):
        tiles[source].append(Tile(first, rows, view, row))
    kind = view.stored.dtype if dtype is None or rule.exact else dtype
    for name, shape, made_of in zip(rule.names(layer), rule.shapes(model), tiles):
        yield Target(name, shape, kind, tuple(made_of))
