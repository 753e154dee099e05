"""The pool's book-keeping: who holds a page, and what is found by its tokens."""

from __future__ import annotations

import random

from rlflow.rollout.embedded.pages import PAGE, SCRATCH, PagePool, pages_for, prefix_keys

TOKENS = list(range(1000))


def test_pages_are_free_when_the_last_holder_drops_them_and_the_lowest_are_taken_first() -> None:
    pool = PagePool(8)
    first, second = pool.take(3), pool.take(2)
    assert SCRATCH not in first + second and len(set(first + second)) == 5
    pool.hold(first[:2])
    pool.drop(first)
    assert pool.free == 8 - 4
    pool.drop(first[:2])
    assert pool.free == 8 - 2
    assert pool.take(3) == first
    assert pool.touched == 6  # the scratch page and five others


def test_full_pages_are_found_and_the_page_that_goes_on_longest() -> None:
    pool = PagePool(20)
    one, other = pool.take(3), pool.take(3)
    pool.publish(TOKENS[: 2 * PAGE + 10], one)
    pool.publish([*TOKENS[: 2 * PAGE], 5, 6, 7], other)  # others have its first two pages entered: not found under it
    assert pool.find(TOKENS) == (one[:2], one[2], 10)
    assert pool.find(TOKENS[: 2 * PAGE + 4]) == (one[:2], one[2], 4)
    assert pool.find(TOKENS[: PAGE + 4]) == (one[:1], one[1], 4)
    assert pool.find([*TOKENS[:PAGE], 0, 0]) == (one[:1], SCRATCH, 0)
    assert pool.find([7]) == ([], SCRATCH, 0)
    pool.publish(TOKENS[: 3 * PAGE], one)  # the last page has filled up
    assert pool.find(TOKENS) == (one, SCRATCH, 0)


def test_what_nobody_holds_is_not_found() -> None:
    pool = PagePool(20)
    parent = pool.take(2)
    pool.publish(TOKENS[: 2 * PAGE], parent)
    pool.hold(parent)
    child = [*parent, *pool.take(1)]
    pool.publish(TOKENS[: 2 * PAGE + 5], child)
    pool.drop(parent)
    assert pool.find(TOKENS) == (parent, child[2], 5)
    pool.drop(child)
    assert pool.find(TOKENS) == ([], SCRATCH, 0)
    assert pool.free == 20


def test_a_page_is_written_anew_only_by_its_only_holder() -> None:
    pool = PagePool(4)
    pages = pool.take(1)
    pool.publish(TOKENS[:PAGE], pages)
    pool.hold(pages)
    assert not pool.reopen(pages[0])
    pool.drop(pages)
    assert pool.reopen(pages[0])
    assert pool.find(TOKENS) == ([], SCRATCH, 0)


def test_random_use_never_loses_a_page_and_finds_only_what_was_published() -> None:
    choice = random.Random(0)
    pool = PagePool(60)
    holders: list[tuple[list[int], list[int]]] = []
    content: dict[int, list[int]] = {}
    for _ in range(3000):
        if holders and (choice.random() < 0.45 or pool.free < 8):
            pool.drop(holders.pop(choice.randrange(len(holders)))[1])
            continue
        tokens = [choice.randrange(2) for _ in range(choice.randrange(1, 4)) for _ in range(PAGE // 2)]
        tokens = [token for token in tokens for _ in range(2)][: choice.randrange(1, len(tokens) + 1)]
        shared, source, extra = pool.find(tokens)
        for index, page in enumerate(shared):
            assert content[page] == tokens[index * PAGE : (index + 1) * PAGE]
        rest = tokens[len(shared) * PAGE :][:extra]
        assert not extra or content[source][:extra] == rest
        pool.hold(shared)
        pages = shared + pool.take(pages_for(len(tokens)) - len(shared))
        for index, page in enumerate(pages):
            content[page] = tokens[index * PAGE : (index + 1) * PAGE]
        pool.publish(tokens, pages)
        holders.append((tokens, pages))
        assert pool.free == 60 - len({page for _, pages in holders for page in pages})
    for _, pages in holders:
        pool.drop(pages)
    assert pool.free == 60
    assert pool.find([0] * PAGE) == pool.find([1] * PAGE) == ([], SCRATCH, 0)


def test_prefix_keys_are_equal_as_far_as_the_tokens_are() -> None:
    one, other = prefix_keys(TOKENS[:100]), prefix_keys([*TOKENS[: 2 * PAGE], 0, *TOKENS[:35]])
    assert len(one) == pages_for(100)
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
