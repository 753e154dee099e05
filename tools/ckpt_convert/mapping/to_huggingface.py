"""The plan of an export: from the tables of models/tables.py, the source of every row of every HuggingFace tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.errors import ConversionError, ExitCode
from rlflow.models.architecture import Architecture, placed_rules
from rlflow.models.rules import Rule, Split
from rlflow.models.tables import OUTPUT

from ..dtypes import DType
from ..readers.source import StoredTensor, TensorSource
from .find import find_view, join_gate_up
from .plan import Equal, Plan, Target, Tile, View

NOT_WEIGHTS = ("optimizer.", "chained_", "snapshot.", "rng", "opt_param_scheduler", "rerun_state_machine")
"""Keys of what else a checkpoint holds: optimizer state, rlflow's reference snapshots, generators, schedulers."""
MOST_PADDING = 8192
"""Rows that a padded vocabulary may have more than config.json: Megatron-LM pads to a multiple of 128 * ranks by default
(`make_vocab_size_divisible_by`), so this is 64 tensor-parallel ranks."""


@dataclass(frozen=True)
class Export:
    """The plan, and the Megatron tensors that it uses by (rule, layer), for mapping the result back."""

    model: Architecture
    plan: Plan
    sources: tuple[tuple[Rule, int, View], ...]


def make_export(source: TensorSource, model: Architecture, dtype: DType | None = None) -> Export:
    """The export of a checkpoint as a model of this architecture. dtype: of the output; None keeps each tensor's.

    Raises ConversionError for a checkpoint without weights (10), with tensors that have no mapping (6), or of another
    model than config.json describes (7). Every source tensor is used once and every target made."""
    _check_described(source, model)
    left = join_gate_up({name: stored for name, stored in source.tensors.items() if not name.startswith(NOT_WEIGHTS)})
    if not left:
        raise ConversionError(
            f"{source.path}: holds no weights, only {len(source.tensors)} tensors of optimizer state.",
            ExitCode.UNSUPPORTED,
        )
    used: dict[str, int] = {}
    targets: list[Target] = []
    sources: list[tuple[Rule, int, View]] = []
    for rule, layer in placed_rules(model):
        view = find_view(source, left, rule, layer, model)
        _check_shape(source, rule, view, model)
        used[view.stored.name] = used.get(view.stored.name, 0) + math.prod(view.shape)
        sources.append((rule, layer, view))
        targets += _targets(rule, layer, view, model, dtype)
    tied = _tied_output(source, left, model, sources)
    _check_use(source, left, used, {equal.second.stored.name for equal in tied}, model)
    equal = (*tied, *(_copy(source, first, second) for first, second in source.copies))
    plan = Plan(tuple(targets), equal)
    plan.check()
    return Export(model, plan, tuple(sources))


def _check_described(source: TensorSource, model: Architecture) -> None:
    """What the checkpoint's own descriptions say must be what config.json says; shapes alone do not tell it all."""
    meaningless = {"max_positions"}  # or what a kind of model has no use for, so that anything may stand there
    if model.latent is not None:
        meaningless |= {"head_dim", "groups"}
    if model.experts is not None and all(model.experts.sparse):
        meaningless |= {"ffn"}
    for key, claimed in source.described.items():
        present = vars(model).get(key, claimed)
        if key not in meaningless and claimed != present:
            raise ConversionError(
                f"{source.path}: belongs to another model; its {key} is {claimed}, config.json of the reference "
                f"has {present}.",
                ExitCode.OTHER_MODEL,
            )


def _check_use(
    source: TensorSource,
    tensors: dict[str, StoredTensor],
    used: dict[str, int],
    compared: set[str],
    model: Architecture,
) -> None:
    """Every tensor of the checkpoint is used, and every element of it once."""
    unused = sorted(set(tensors) - set(used) - compared)
    if unused:
        raise ConversionError(
            f"{source.path}: {len(unused)} tensors have no place in a model of family '{model.family}' with "
            f"{model.layers} layers: {', '.join(unused[:4])}{', ...' if len(unused) > 4 else ''}.",
            ExitCode.UNKNOWN_MODEL,
        )
    for name, elements in used.items():
        if elements != math.prod(tensors[name].shape):
            raise ConversionError(
                f"{source.path}: '{name}' has {math.prod(tensors[name].shape):,} elements, a model of family "
                f"'{model.family}' with {model.layers} layers takes {elements:,}.",
                ExitCode.OTHER_MODEL,
            )


def _copy(source: TensorSource, first: StoredTensor, second: StoredTensor) -> Equal:
    problem = f"{source.path}: '{second.name}' is not what another rank has; the files are of two checkpoints."
    return Equal(View(first), View(second), first.shape[0], problem, ExitCode.OTHER_LAYOUT)


def _tied_output(
    source: TensorSource, tensors: dict[str, StoredTensor], model: Architecture, sources: list[tuple[Rule, int, View]]
) -> tuple[Equal, ...]:
    """Where embeddings are tied, an output layer in the checkpoint is dropped, provided that it is the embedding."""
    output = tensors.get(OUTPUT.megatron)
    if not model.tied or output is None:
        return ()
    embedding = next(view for rule, _, view in sources if rule.split is Split.VOCAB)
    problem = (
        f"{source.path}: '{OUTPUT.megatron}' is not the embedding, but config.json says tie_word_embeddings is true; "
        "expected false there, or a checkpoint of a tied model."
    )
    same = output.dtype is embedding.stored.dtype and output.shape[1:] == embedding.shape[1:]
    if not same or output.shape[0] < model.vocab:
        raise ConversionError(problem, ExitCode.OTHER_MODEL)
    return (Equal(embedding, View(output), model.vocab, problem, ExitCode.OTHER_MODEL),)


def _check_shape(source: TensorSource, rule: Rule, view: View, model: Architecture) -> None:
    shapes = rule.shapes(model)
    expected = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    found = view.shape
    padded = rule.split is Split.VOCAB and found[1:] == expected[1:] and 0 <= found[0] - expected[0] <= MOST_PADDING
    if found != expected and not padded:
        raise ConversionError(
            f"{source.path}: '{view.stored.name}' has shape {found}, config.json implies {expected}"
            f"{' and at most ' + str(MOST_PADDING) + ' rows of padding' if rule.split is Split.VOCAB else ''}.",
            ExitCode.OTHER_MODEL,
        )
    if not view.stored.dtype.is_floating_point:
        raise ConversionError(
            f"{source.path}: '{view.stored.name}' holds {view.stored.dtype}, floating point expected.",
            ExitCode.UNKNOWN_MODEL,
        )


def _targets(rule: Rule, layer: int, view: View, model: Architecture, dtype: DType | None) -> Iterator[Target]:
    start = 0
    for part, (name, shape) in enumerate(zip(rule.names(layer), rule.shapes(model))):
        if rule.split is Split.QKV:
            tiles = _group_rows(part, view, model)
        else:
            tiles = (Tile(0, shape[0], view, start),)
        start += shape[0]
        kind = view.stored.dtype if dtype is None or rule.exact else dtype
        yield Target(name, shape, kind, math.prod(shape[1:]), tiles)


def _group_rows(part: int, view: View, model: Architecture) -> tuple[Tile, ...]:
    """Pieces of q (part 0), k (1) or v (2): per query group the source has [queries | key | value] rows."""
    queries = model.heads // model.groups * model.head_dim
    group = queries + 2 * model.head_dim
    rows = queries if part == 0 else model.head_dim
    first = (0, queries, queries + model.head_dim)[part]
    return tuple(Tile(number * rows, rows, view, number * group + first) for number in range(model.groups))
