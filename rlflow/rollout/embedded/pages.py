"""Which page of the key-value pool holds what: reference counts, and an index of the pages by the tokens in them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

PAGE = 32
"""Positions in a page."""
SCRATCH = 0
"""A page that nobody owns: unused entries of page tables point at it, and rows that only pad a batch write to it."""

SHORTEST_COPY = 4
"""Positions that are worth the copy of a page."""


@dataclass(eq=False)
class Node:
    """A page in the index: `tokens` (a full page's, or the first few of one that is still filling) after those of its
    parents."""

    tokens: tuple[int, ...]
    page: int
    parent: Node | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class PagePool:
    """`count` pages for sequences to hold. Full pages are shared: a page is free again when the last holder drops it.

    The index is a tree over the pages that somebody holds, so what is found never depends on what ended earlier.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._unused = SCRATCH + 1  # no page from here on was ever taken
        self._returned: list[int] = []  # a heap: low pages first, so that the touched memory stays small
        self._holders: dict[int, int] = {}
        self._root = Node((), SCRATCH)
        self._nodes: dict[int, Node] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self.count - len(self._holders)

    @property
    def touched(self) -> int:
        """Pages up to this one were taken at some time, the scratch page included."""
        return self._unused

    def take(self, count: int) -> list[int]:
        """Free pages, held once. There must be as many."""
        pages = []
        for _ in range(count):
            if self._returned:
                pages.append(heapq.heappop(self._returned))
            else:
                pages.append(self._unused)
                self._unused += 1
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Adds a holder to pages that have one."""
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Takes a holder from a sequence's pages, last page first, so that a page leaves the index before its parents."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._unlist(page)
                heapq.heappush(self._returned, page)

    def reopen(self, page: int) -> bool:
        """Takes a page out of the index, for its only holder to write it anew; False where others hold it too."""
        alone = self._holders[page] == 1
        if alone:
            self._unlist(page)
        return alone

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Enters the pages of a sequence, of which `tokens` are computed, into the index. Ends at a page whose tokens
        another sequence has entered: what follows would not be under pages that this one holds."""
        node = self._root
        for index, page in enumerate(pages):
            part = tuple(tokens[index * PAGE : (index + 1) * PAGE])
            known = node.children.get(part)
            if known is None and part:
                self._unlist(page)  # where it was entered when it was still filling
                known = node.children[part] = self._nodes[page] = Node(part, page, node)
            if known is None or known.page != page:
                break
            node = known

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int, int]:
        """(full pages that hold the first tokens, a page to copy from that goes on like them, how many of its tokens do)."""
        node = self._root
        pages: list[int] = []
        while len(tokens) >= (len(pages) + 1) * PAGE:
            child = node.children.get(tuple(tokens[len(pages) * PAGE : (len(pages) + 1) * PAGE]))
            if child is None:
                break
            pages.append(child.page)
            node = child
        rest = tokens[len(pages) * PAGE : (len(pages) + 1) * PAGE]
        best, length = SCRATCH, 0
        for child in node.children.values():
            common = common_prefix(child.tokens, rest)
            if common > length:
                best, length = child.page, common
        return (pages, best, length) if length >= SHORTEST_COPY else (pages, SCRATCH, 0)

    def forget(self) -> None:
        """Empties the index: what the pages hold is not valid any more."""
        self._root = Node((), SCRATCH)
        self._nodes.clear()

    def _unlist(self, page: int) -> None:
        node = self._nodes.pop(page, None)
        if node is not None and node.parent is not None:
            del node.parent.children[node.tokens]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens they share."""
    count = min(len(one), len(other))
    return next((at for at in range(count) if one[at] != other[at]), count)


def pages_for(tokens: int) -> int:
    """How many pages hold that many tokens."""
    return -(-tokens // PAGE)


def prefix_keys(tokens: Sequence[int]) -> list[int]:
    """A key for the tokens up to each page's end, and for all of them: equal where the tokens are."""
    keys = [0]
    for start in range(0, len(tokens), PAGE):
        keys.append(hash((keys[-1], *tokens[start : start + PAGE])))
    return keys[1:]
