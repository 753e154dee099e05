"""What one rank has of a Megatron tensor, as rectangles of HuggingFace tensors: `split.shard` for tables of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.models.architecture import Architecture
from rlflow.models.rules import Rule, Split

from .plan import Piece, View


@dataclass(frozen=True)
class Cut:
    """One rank's tensor. shape: of it. pieces: of its rows, in order."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def cut(rule: Rule, views: Sequence[View], model: Architecture, rank: int, ranks: int, rows: int) -> Cut:
    """The part of tensor-parallel rank `rank` of `ranks`. views: of the rule's sources, in its order. rows: of the whole
    vocabulary with its padding. Latent projections are taken as whole; `Split.COLUMN` in their place cuts them."""
    shape = views[0].shape
    if rule.split in (Split.REPLICATED, Split.LATENT):
        return Cut(shape, (Piece(0, shape[0], views[0]),))
    if rule.split is Split.ROW:
        width = shape[1] // ranks
        return Cut((shape[0], width), (Piece(0, shape[0], views[0], 0, 0, width, rank * width),))
    if rule.split is Split.VOCAB:
        return _vocabulary(views[0], rank, rows // ranks)
    if rule.split is Split.QKV:
        return _groups(views, model, rank, ranks)
    pieces, at = [], 0
    for view in views:  # COLUMN, GATE_UP
        height = view.shape[0] // ranks
        pieces.append(Piece(at, height, view, rank * height))
        at += height
    return Cut((at, *shape[1:]), tuple(pieces))


def _vocabulary(view: View, rank: int, height: int) -> Cut:
    first = rank * height
    real = max(0, min(height, view.shape[0] - first))
    pieces = [Piece(0, real, view, first)] if real else []
    pieces += [Piece(real, height - real, None)] if real < height else []
    return Cut((height, *view.shape[1:]), tuple(pieces))


def _groups(views: Sequence[View], model: Architecture, rank: int, ranks: int) -> Cut:
    """Per query group: its queries, its key, its value."""
    sizes = (model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim)
    mine = range(rank * model.groups // ranks, (rank + 1) * model.groups // ranks)
    pieces, at = [], 0
    for group in mine:
        for view, size in zip(views, sizes):
            pieces.append(Piece(at, size, view, group * size))
            at += size
    return Cut((at, *views[0].shape[1:]), tuple(pieces))
