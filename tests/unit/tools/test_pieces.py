"""The rows that a conversion copies are what `models.sharding.shard` computes with tensors."""

from __future__ import annotations

import cProfile
import itertools
import random
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.dtypes import FLOAT32
from rlflow_tools.ckpt_convert.mapping.pieces import boxes_of, cropped, whole_tiles
from rlflow_tools.ckpt_convert.mapping.plan import View
from rlflow_tools.ckpt_convert.readers.source import StoredTensor, covers_once
from torch import Tensor

from rlflow.models.architecture import Architecture, padded_vocab, placed_rules, stored_architecture
from rlflow.models.huggingface import read_config
from rlflow.models.rules import Rule
from rlflow.models.sharding import shard
from rlflow.storage.pickles import Chunk


def assembled(
    rule: Rule, tensors: dict[str, Tensor], model: Architecture, rank: int, ranks: int
) -> Tensor:
    """The part of a rank, put together as the plan says."""
    views = [
        View(StoredTensor(name, tuple(tensor.shape), FLOAT32, ()))
        for name, tensor in tensors.items()
    ]
    whole, tiles = whole_tiles(rule, views, model, padded_vocab(model.vocab, ranks))
    parts = []
    for offsets, sizes in boxes_of(rule.split, whole, rank, ranks):
        part = torch.full((sizes[0], *sizes[1:]), float("nan"))
        for tile in cropped(tiles, offsets, sizes):
            place = part[tile.row : tile.row + tile.rows]
            assert place.isnan().all(), "two tiles overlap"
            if tile.view is None:
                place.zero_()
            else:
                source = tensors[tile.view.stored.name]
                rows = source[tile.source_row : tile.source_row + tile.rows]
                width = slice(tile.source_column, tile.source_column + place.shape[-1])
                place.copy_(rows[:, width] if rows.dim() > 1 else rows)
        parts.append(part)
    return torch.cat(parts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "deepseek_v3"])
def test_pieces_make_what_shard_makes(family: str, ranks: int, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family, tokenizer=False, vocab_size=101)
    model = stored_architecture(read_config(path))
    draw = torch.Generator().manual_seed(0)
    for rule, layer in placed_rules(model):
        sources = zip(rule.names(layer), rule.shapes(model))
        tensors = {name: torch.randn(shape, generator=draw) for name, shape in sources}
        for rank in range(ranks):
            expected = shard(rule, list(tensors.values()), model, rank, ranks)
            found = assembled(rule, tensors, model, rank, ranks)
            assert torch.equal(found, expected), rule.megatron


@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_than_groups_share_what_one_rank_has(ranks: int, tmp_path: Path) -> None:
    """ColumnParallelLinear cuts rows evenly, wherever the groups end."""
    path = tiny_model(tmp_path, "qwen2", tokenizer=False, num_attention_heads=8, head_dim=8)
    model = stored_architecture(read_config(path))
    assert model.groups == 2
    for rule, layer in placed_rules(model):
        if "linear_qkv" in rule.megatron and "norm" not in rule.megatron:
            sources = zip(rule.names(layer), rule.shapes(model))
            tensors = {name: torch.randn(shape) for name, shape in sources}
            parts = [assembled(rule, tensors, model, rank, ranks) for rank in range(ranks)]
            whole = shard(rule, list(tensors.values()), model, 0, 1)
            assert torch.equal(torch.cat(parts), whole)


def stack(layers: int, experts: int) -> StoredTensor:
    """Experts' weights as megatron-core stores them: a chunk per layer, expert, half and rank."""
    places = itertools.product(range(layers), range(experts), range(4))
    chunks = tuple(
        Chunk((layer, expert, 2 * part, 0), (1, 1, 2, 3), "file", 0, 24)
        for layer, expert, part in places
    )
    return StoredTensor("fc1", (layers, experts, 8, 3), FLOAT32, chunks)


def test_planning_a_stack_of_experts_takes_time_in_proportion() -> None:
    def calls(layers: int, experts: int) -> int:
        """Function calls, which unlike seconds are the same on every machine."""
        stored, profile = stack(layers, experts), cProfile.Profile()
        profile.enable()
        boxes = [tuple(zip(chunk.offsets, chunk.sizes)) for chunk in stored.chunks]
        assert covers_once(boxes, stored.shape)
        for index in itertools.product(range(layers), range(experts)):
            assert [found.row for found in View(stored, index).rectangles] == [0, 2, 4, 6]
        profile.disable()
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(4, 32) < 2.2 * calls(4, 16) and calls(8, 16) < 2.2 * calls(4, 16)


@pytest.mark.parametrize("seed", range(40))
def test_boxes_that_overlap_are_found_however_they_lie(seed: int) -> None:
    draw, shape = random.Random(seed), (3, 4, 4)
    boxes = [
        tuple((at, draw.randint(1, full - at)) for full in shape for at in [draw.randrange(full)])
        for _ in range(draw.randint(1, 5))
    ]
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        seen[tuple(slice(at, at + size) for at, size in box)] += 1
    assert covers_once(boxes, shape) == bool((seen == 1).all())


@pytest.mark.parametrize("cuts", [(1, 1, 1), (3, 2, 4), (2, 4, 1)])
def test_boxes_that_tile_are_whole_until_one_is_missing_or_twice(cuts: tuple[int, ...]) -> None:
    shape = tuple(2 * cut for cut in cuts)
    boxes = [tuple((2 * at, 2) for at in place) for place in itertools.product(*map(range, cuts))]
    assert covers_once(boxes, shape)
    assert not covers_once(boxes[1:], shape) and not covers_once([*boxes, boxes[-1]], shape)
