"""What one rank has of a Megatron tensor, as rectangles of HuggingFace tensors: `models.sharding.shard` for tables of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.models.architecture import Architecture
from rlflow.models.rules import Rule, Split

from .plan import Tile, View


@dataclass(frozen=True)
class RankSlice:
    """One rank's tensor. shape: of it. tiles: of its rows, in order."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


def rank_slice(rule: Rule, views: Sequence[View], model: Architecture, rank: int, ranks: int, rows: int) -> RankSlice:
    """The part of tensor-parallel rank `rank` of `ranks`. views: of the rule's sources, in its order. rows: of the whole
    vocabulary with its padding. Latent projections are taken as whole; `Split.COLUMN` in their place cuts them."""
    shape = views[0].shape
    if rule.split in (Split.REPLICATED, Split.LATENT):
        return RankSlice(shape, (Tile(0, shape[0], views[0]),))
    if rule.split is Split.ROW:
        width = shape[1] // ranks
        return RankSlice((shape[0], width), (Tile(0, shape[0], views[0], 0, 0, width, rank * width),))
    if rule.split is Split.VOCAB:
        return _vocabulary(views[0], rank, rows // ranks)
    if rule.split is Split.QKV:
        return _groups(views, model, rank, ranks)
    tiles, at = [], 0
    # COLUMN, and GATE_UP: a rank has its gate rows, then its up rows, as its MLP cuts its own output of fc1 in two
    # (megatron-core, transformer/mlp.py, MLP.forward).
    for view in views:
        height = view.shape[0] // ranks
        tiles.append(Tile(at, height, view, rank * height))
        at += height
    return RankSlice((at, *shape[1:]), tuple(tiles))


def _vocabulary(view: View, rank: int, height: int) -> RankSlice:
    """`height` rows of the padded vocabulary: the last ranks have rows of zeros, or nothing else."""
    first = rank * height
    real = max(0, min(height, view.shape[0] - first))
    tiles = [Tile(0, real, view, first)] if real else []
    tiles += [Tile(real, height - real, None)] if real < height else []
    return RankSlice((height, *view.shape[1:]), tuple(tiles))


def _groups(views: Sequence[View], model: Architecture, rank: int, ranks: int) -> RankSlice:
    """Per query group: its queries, its key, its value, as megatron-core, transformer/attention.py,
    SelfAttention.get_query_key_value_tensors takes them apart. With more ranks than groups a rank has rows of one group,
    wherever they begin, and the ranks gather them there."""
    sizes = (model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim)
    height = model.groups * sum(sizes) // ranks
    first, tiles, at = rank * height, [], 0
    for group in range(model.groups):
        for view, size in zip(views, sizes):
            begin, end = max(at, first), min(at + size, first + height)
            if begin < end:
                tiles.append(Tile(begin - first, end - begin, view, group * size + begin - at))
            at += size
    return RankSlice((height, *views[0].shape[1:]), tuple(tiles))
