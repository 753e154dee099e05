"""The pool's book-keeping: who holds a block, and what is found by its tokens."""

from __future__ import annotations

import random

from rlflow.rollout.embedded.block_manager import (
    BLOCK_SIZE,
    SCRATCH,
    BlockManager,
    blocks_for,
    prefix_keys,
)

TOKENS = list(range(1000))


def test_pages_are_free_when_the_last_holder_drops_them_and_the_lowest_are_taken_first() -> None:
    pool = BlockManager(8)
    first, second = pool.take(3), pool.take(2)
    assert SCRATCH not in first + second and len(set(first + second)) == 5
    pool.hold(first[:2])
    pool.drop(first)
    assert pool.free == 8 - 4
    pool.drop(first[:2])
    assert pool.free == 8 - 2
    assert pool.take(3) == first
    assert pool.touched == 6  # the scratch block and five others


def test_full_pages_are_found_and_the_page_that_goes_on_longest() -> None:
    pool = BlockManager(20)
    first, second = pool.take(3), pool.take(3)
    pool.publish(TOKENS[: 2 * BLOCK_SIZE + 10], first)
    pool.publish(
        [*TOKENS[: 2 * BLOCK_SIZE], 5, 6, 7], second
    )  # others have its first two blocks entered: not found under it
    assert pool.find(TOKENS) == (first[:2], first[2], 10)
    assert pool.find(TOKENS[: 2 * BLOCK_SIZE + 4]) == (first[:2], first[2], 4)
    assert pool.find(TOKENS[: BLOCK_SIZE + 4]) == (first[:1], first[1], 4)
    assert pool.find([*TOKENS[:BLOCK_SIZE], 0, 0]) == (first[:1], SCRATCH, 0)
    assert pool.find([7]) == ([], SCRATCH, 0)
    pool.publish(TOKENS[: 3 * BLOCK_SIZE], first)  # the last block has filled up
    assert pool.find(TOKENS) == (first, SCRATCH, 0)


def test_what_nobody_holds_is_not_found() -> None:
    pool = BlockManager(20)
    parent = pool.take(2)
    pool.publish(TOKENS[: 2 * BLOCK_SIZE], parent)
    pool.hold(parent)
    child = [*parent, *pool.take(1)]
    pool.publish(TOKENS[: 2 * BLOCK_SIZE + 5], child)
    pool.drop(parent)
    assert pool.find(TOKENS) == (parent, child[2], 5)
    pool.drop(child)
    assert pool.find(TOKENS) == ([], SCRATCH, 0)
    assert pool.free == 20


def test_a_block_is_written_anew_only_by_its_only_holder() -> None:
    pool = BlockManager(4)
    blocks = pool.take(1)
    pool.publish(TOKENS[:BLOCK_SIZE], blocks)
    pool.hold(blocks)
    assert not pool.reopen(blocks[0])
    pool.drop(blocks)
    assert pool.reopen(blocks[0])
    assert pool.find(TOKENS) == ([], SCRATCH, 0)


def test_random_use_never_loses_a_block_and_finds_only_what_was_published() -> None:
    choice = random.Random(0)
    pool = BlockManager(60)
    holders: list[tuple[list[int], list[int]]] = []
    content: dict[int, list[int]] = {}
    for _ in range(3000):
        if holders and (choice.random() < 0.45 or pool.free < 8):
            pool.drop(holders.pop(choice.randrange(len(holders)))[1])
            continue
        tokens = [
            choice.randrange(2)
            for _ in range(choice.randrange(1, 4))
            for _ in range(BLOCK_SIZE // 2)
        ]
        tokens = [token for token in tokens for _ in range(2)][
            : choice.randrange(1, len(tokens) + 1)
        ]
        shared, source, extra = pool.find(tokens)
        for index, block in enumerate(shared):
            assert content[block] == tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        rest = tokens[len(shared) * BLOCK_SIZE :][:extra]
        assert not extra or content[source][:extra] == rest
        pool.hold(shared)
        blocks = shared + pool.take(blocks_for(len(tokens)) - len(shared))
        for index, block in enumerate(blocks):
            content[block] = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        pool.publish(tokens, blocks)
        holders.append((tokens, blocks))
        assert pool.free == 60 - len({block for _, blocks in holders for block in blocks})
    for _, blocks in holders:
        pool.drop(blocks)
    assert pool.free == 60
    assert pool.find([0] * BLOCK_SIZE) == pool.find([1] * BLOCK_SIZE) == ([], SCRATCH, 0)


def test_prefix_keys_are_equal_as_far_as_the_tokens_are() -> None:
    first, second = (
        prefix_keys(TOKENS[:100]),
        prefix_keys([*TOKENS[: 2 * BLOCK_SIZE], 0, *TOKENS[:35]]),
    )
    assert len(first) == blocks_for(100)
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
