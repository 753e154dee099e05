"""Blocks of the key-value pool: reference counts, and an index by the tokens in them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

BLOCK_SIZE = 32
"""Positions in a block."""
SCRATCH = 0
"""A block that nobody owns: unused entries of block tables point at it, and rows that only pad a
batch write to it."""

SHORTEST_COPY = 4
"""Positions that are worth the copy of a block."""


@dataclass(eq=False)
class Node:
    """A block in the index: `tokens` (a full block's, or the first few of one that is still
    filling) after those of its parents."""

    tokens: tuple[int, ...]
    block: int
    parent: Node | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class BlockManager:
    """`count` blocks for sequences to hold. Full blocks are shared: a block is free again when the
    last holder drops it.

    The index is a tree over the blocks that somebody holds, so what is found never depends on what
    ended earlier."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._unused = SCRATCH + 1  # no block from here on was ever taken
        # A heap: low blocks first, so that the touched memory stays small
        self._returned: list[int] = []
        self._holders: dict[int, int] = {}
        # By the adapter that computed what is below
        self._roots = defaultdict[str, Node](partial(Node, (), SCRATCH))
        self._nodes: dict[int, Node] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.count - len(self._holders)

    @property
    def touched(self) -> int:
        """Blocks up to this one were taken at some time, the scratch block included."""
        return self._unused

    def take(self, count: int) -> list[int]:
        """Free blocks, held once. There must be as many."""
        blocks = []
        for _ in range(count):
            if self._returned:
                blocks.append(heapq.heappop(self._returned))
            else:
                blocks.append(self._unused)
                self._unused += 1
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that have one."""
        for block in blocks:
            self._holders[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Takes a holder from a sequence's blocks, last block first, so that a block leaves the
        index before its parents."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._unlist(block)
                heapq.heappush(self._returned, block)

    def reopen(self, block: int) -> bool:
        """Takes a block out of the index, for its only holder to write it anew; False where others
        hold it too."""
        alone = self._holders[block] == 1
        if alone:
            self._unlist(block)
        return alone

    def publish(self, tokens: Sequence[int], blocks: Sequence[int], adapter: str = "") -> None:
        """Enters the blocks of a sequence, of which `tokens` are computed, into the index. Ends at
        a block whose tokens another sequence has entered: what follows would not be under blocks
        that this one holds."""
        node = self._roots[adapter]
        for index, block in enumerate(blocks):
            content = tuple(tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            known = node.children.get(content)
            if known is None and content:
                self._unlist(block)  # where it was entered when it was still filling
                known = node.children[content] = self._nodes[block] = Node(content, block, node)
            if known is None or known.block != block:
                break
            node = known

    def find(self, tokens: Sequence[int], adapter: str = "") -> tuple[list[int], int, int]:
        """(full blocks that hold the first tokens, a block to copy from that goes on like them, how
        many of its tokens do)."""
        node = self._roots[adapter]
        blocks: list[int] = []
        while len(tokens) >= (len(blocks) + 1) * BLOCK_SIZE:
            child = node.children.get(
                tuple(tokens[len(blocks) * BLOCK_SIZE : (len(blocks) + 1) * BLOCK_SIZE])
            )
            if child is None:
                break
            blocks.append(child.block)
            node = child
        rest = tokens[len(blocks) * BLOCK_SIZE : (len(blocks) + 1) * BLOCK_SIZE]
        best, length = SCRATCH, 0
        for child in node.children.values():
            common = common_prefix(child.tokens, rest)
            if common > length:
                best, length = child.block, common
        return (blocks, best, length) if length >= SHORTEST_COPY else (blocks, SCRATCH, 0)

    def forget(self) -> None:
        """Empties the index: what the blocks hold is not valid any more."""
        self._roots.clear()
        self._nodes.clear()

    def _unlist(self, block: int) -> None:
        node = self._nodes.pop(block, None)
        if node is not None and node.parent is not None:
            del node.parent.children[node.tokens]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens they share."""
    count = min(len(first), len(second))
    return next((at for at in range(count) if first[at] != second[at]), count)


def blocks_for(tokens: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-tokens // BLOCK_SIZE)


def prefix_keys(tokens: Sequence[int], adapter: str = "") -> list[int]:
    """A key for the tokens up to each block's end, and for all of them: equal where the tokens and
    the adapter are."""
    keys = [hash(adapter)]
    for start in range(0, len(tokens), BLOCK_SIZE):
        keys.append(hash((keys[-1], *tokens[start : start + BLOCK_SIZE])))
    return keys[1:]
