"""Weights for other processes: all of a version or none of it, bit for bit, whole or as what changed."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlflow.components import WEIGHT_TRANSFER
from rlflow.config.schema import load_config
from rlflow.errors import ConfigError, RolloutError
from rlflow.models.huggingface import digest
from rlflow.rollout import weights
from rlflow.rollout.weights import Offer, WeightPublisher, WeightReader, apply, bytes_of, change
from tests.unit.rollout.buckets import Held

Pairs = list[tuple[str, Tensor]]


def flip(bucket: Any, number: int) -> None:
    """Changes one bit of a part of a bucket."""
    part = bucket.values[number]
    words = part[1] if isinstance(part, tuple) else part
    words.flags.writeable = True
    words[len(words) // 2] ^= 1


def made(version: int, size: int = 3000) -> Pairs:
    """Tensors of every kind: odd sizes, no elements, no dimensions, not contiguous, NaN and minus zero among the values."""
    generator = torch.Generator().manual_seed(version)
    values = torch.randn(size, 7, generator=generator)
    special = torch.tensor([float("nan"), -0.0, 0.0, float("-inf")])
    return [
        ("wide", values.to(torch.bfloat16)),
        ("turned", values.t()),
        ("special", torch.cat([special, values[0]]).to(torch.float16)),
        ("scalar", torch.tensor(float(version))),
        ("empty", torch.empty(0, 5)),
        ("flags", values[:, 0] > 0),
        ("eight", values[:5].to(torch.float8_e4m3fn)),
        ("whole", torch.arange(size)),
    ]


def trained(
    version: int, share: float = 0.01, size: int = 50_000, dtype: torch.dtype = torch.bfloat16
) -> Pairs:
    """Two tensors; from one version to the next this share of their values changes."""
    values = torch.arange(2 * size, dtype=torch.float32).to(dtype)
    for step in range(1, version + 1):
        places = torch.randperm(2 * size, generator=torch.Generator().manual_seed(step))[
            : int(2 * size * share)
        ]
        values[places] = torch.full_like(values[places], float(step)) / 3
    return [("first", values[:size].view(-1, 10)), ("second", values[size:])]


def assert_same(found: Iterable[tuple[str, Tensor]], expected: Pairs) -> None:
    pairs = list(found)
    assert [name for name, _ in pairs] == [name for name, _ in expected]
    for (name, ours), (_, theirs) in zip(pairs, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        first, second = (one.contiguous().reshape(-1).view(torch.uint8) for one in (ours, theirs))
        assert torch.equal(first, second), name


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 60_000)


def test_every_bit_arrives_in_buckets_and_the_digest_is_that_of_the_content() -> None:
    publisher, reader = WeightPublisher(Held), WeightReader()
    for version, seed in enumerate((1, 2, 2), start=1):
        offer = publisher.publish(iter(made(seed)), version)
        read = reader.read(offer)
        assert_same(read.weights, made(seed))
        assert offer.version == version and offer.digest == digest(made(seed))
        assert (
            read.bytes == offer.bytes == sum(tensor.nbytes for _, tensor in made(seed))
            and not read.delta
        )
        assert len(offer.buckets) == 3  # of the two large ones each is alone
    assert not offer.changes


def test_two_versions_are_kept_and_a_late_reader_gets_the_newest_while_a_slow_one_keeps_its_own() -> (
    None
):
    publisher = WeightPublisher(Held, delta=True)
    offers = [publisher.publish(trained(1), 1)]
    slow = WeightReader().read(offers[0])
    del offers[0]
    for version in range(2, 6):
        offer = publisher.publish(trained(version), version)
        gc.collect()
        held = {id(bucket) for kept in publisher._held for bucket in (*kept.buckets, *kept.changes)}
        assert {id(bucket) for bucket in Held.alive} == held and len(publisher._held) == 2
    assert_same(slow.weights, trained(1))
    assert_same(WeightReader().read(offer).weights, trained(5))
    del offer
    publisher.close()
    gc.collect()
    assert not Held.alive


def test_a_publication_that_breaks_off_leaves_the_version_before() -> None:
    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield from made(3)[:2]
        raise ValueError("the trainer failed")

    publisher, reader = WeightPublisher(Held, delta=True), WeightReader()
    first = publisher.publish(trained(1), 1)
    reader.read(first)
    with pytest.raises(ValueError, match="the trainer failed"):
        publisher.publish(breaks(), 2)
    with pytest.raises(RolloutError, match="weights of version 3: 'first' came twice"):
        publisher.publish([*trained(3), trained(3)[0]], 3)
    offer = publisher.publish(trained(2), 4)
    assert offer.base == first.digest
    read = reader.read(offer)
    assert_same(read.weights, trained(2))
    assert read.delta


@pytest.mark.parametrize("number", range(2))
def test_a_flipped_bit_is_found_before_any_tensor_is_handed_on(number: int) -> None:
    offer = WeightPublisher(Held).publish(trained(1), 7)
    flip(offer.buckets[number], 0)
    name = ("first", "second")[number]
    with pytest.raises(
        RolloutError,
        match=rf"weights of version 7: expected '{name}' as bfloat16.* damaged on its way",
    ):
        WeightReader().read(offer)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"shape": (10, 5000)},
        {"shape": (1, 2)},
        {"name": "other"},
    ],
)
def test_another_name_dtype_or_shape_than_was_published_is_refused(fields: dict[str, Any]) -> None:
    offer = WeightPublisher(Held).publish(trained(1), 1)
    (first,), *rest = offer.tensors
    changed = weights.replace(first, **fields)
    with pytest.raises(RolloutError, match=r"expected '(first|other)' as"):
        WeightReader().read(weights.replace(offer, tensors=((changed,), *rest)))


# --- deltas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deltas_are_exact_and_small_and_every_third_version_comes_whole(
    share: float, dtype: torch.dtype
) -> None:
    publisher, reader = WeightPublisher(Held, delta=True, full_every=3), WeightReader()
    for version in range(1, 8):
        expected = trained(version, share, dtype=dtype)
        read = reader.read(publisher.publish(iter(expected), version))
        assert_same(read.weights, expected)
        assert read.delta == (version not in (1, 3, 6))
        if read.delta:
            assert read.bytes <= 6 * 100_000 * share + (share > 1 / 32) * 100_000 / 8


def test_who_missed_a_version_and_who_has_none_read_it_whole() -> None:
    publisher, behind, here = WeightPublisher(Held, delta=True), WeightReader(), WeightReader()
    for version in range(1, 5):
        offer = publisher.publish(trained(version), version)
        assert_same(here.read(offer).weights, trained(version))
        if version in (1, 3, 4):
            read = behind.read(offer)
            assert_same(read.weights, trained(version))
            assert read.delta == (version == 4)
    assert not WeightReader().read(offer).delta


@pytest.mark.parametrize(
    "other",
    [
        trained(2, share=1.0),  # of bfloat16 whose places would take more than the weights
        [(name, tensor.float() + 0.1) for name, tensor in trained(2)],
        [(name, tensor.view(-1, 5)) for name, tensor in trained(2)],
        [*trained(2), ("third", torch.ones(70_000))],
        trained(2)[:1],
        [],
    ],
)
def test_what_changed_too_much_or_has_other_tensors_comes_whole_and_the_next_one_as_a_delta(
    other: Pairs,
) -> None:
    publisher, reader = WeightPublisher(Held, delta=True), WeightReader()
    reader.read(publisher.publish(trained(1), 1))
    for version, delta in ((2, False), (3, True)):
        offer = publisher.publish(iter(other), version)
        read = reader.read(offer)
        assert_same(read.weights, other)
        assert read.delta == bool(offer.changes) == (delta and bool(other))


def test_float32_that_changes_everywhere_is_put_only_once() -> None:
    publisher = WeightPublisher(Held, delta=True)
    for version in (1, 2, 3):
        offer = publisher.publish([("a", torch.randn(40_000))], version)
    gc.collect()
    assert not offer.changes and len(Held.alive) == 2


def test_a_damaged_copy_or_change_is_noticed_and_the_version_read_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher, reader = WeightPublisher(Held, delta=True), WeightReader()
    reader.read(publisher.publish(trained(1), 1))
    reader._copy[0][0][7] ^= 1
    for version in (2, 3, 4, 5):
        offer = publisher.publish(trained(version), version)
        if version == 4:
            flip(offer.changes[1], 0)
        read = reader.read(offer)
        assert_same(read.weights, trained(version))
        assert read.delta == (version in (3, 5))
    assert caplog.text.count("it is read whole") == 2


def test_a_change_that_does_not_come_leaves_a_reader_that_reads_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(what: str) -> list[Any]:
        raise RolloutError(f"{what}: is gone")

    publisher, reader = WeightPublisher(Held, delta=True), WeightReader()
    reader.read(publisher.publish(trained(1), 1))
    offer = publisher.publish(trained(2), 2)
    monkeypatch.setattr(offer.changes[1], "get", lost)
    with pytest.raises(
        RolloutError, match=r"^what changed in weights of version 2, bucket 2 of 2: is gone"
    ):
        reader.read(offer)
    offer = publisher.publish(trained(3), 3)
    assert_same(reader.read(offer).weights, trained(3))


contents = st.integers(1, 200).flatmap(
    lambda count: st.tuples(
        *(st.lists(st.integers(0, 2), min_size=count, max_size=count) for _ in range(2))
    )
)


@given(contents, st.sampled_from((np.uint8, np.uint16, np.uint32, np.uint64)))
def test_a_change_turns_the_old_into_the_new_twice_as_well_and_takes_no_more_than_it(
    values: tuple[list[int], list[int]], word: type
) -> None:
    old, new = (np.array(value, word) for value in values)
    part, found = change(old, new), old.copy()
    for _ in range(2):
        apply(part, found)
        assert found.tobytes() == new.tobytes()
    assert (part is None) == bool((old == new).all()) and bytes_of(part) <= new.nbytes


def test_bytes_of_a_change_by_hand() -> None:
    old = np.zeros(6400, np.uint16)
    few, many, most = old.copy(), old.copy(), old + 1
    few[::64], many[::4] = 7, 7
    assert bytes_of(change(old, old)) == 0
    assert bytes_of(change(old, few)) == 100 * (4 + 2)  # a place and a word each
    assert bytes_of(change(old, many)) == 6400 / 8 + 1600 * 2  # a bit per word, and the new ones
    assert bytes_of(change(old, most)) == 6400 * 2


def test_signs_of_zero_and_nans_are_words_like_others() -> None:
    old = np.array([0x0000, 0x7FC0, 0x7FC0, 0x8000] * 40, np.uint16)  # 0, NaN, NaN, -0 in bfloat16
    new = old.copy()
    new[:3] = [0x8000, 0x7FC0, 0x7FC1]  # -0, the same NaN, another one
    where, words = change(old, new)
    assert where.tolist() == [0, 2] and words.tolist() == [0x8000, 0x7FC1]


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "delta"),
    [("auto", False), ("tcp", False), ("{name: tcp, delta: true, full_every: 10}", True), ("{delta: true}", True),
     ("{name: shared_memory}", False)],
)  # fmt: skip
def test_all_names_mean_the_one_way(given: str, delta: bool) -> None:
    section = load_config(None, [f"cluster.weight_transfer={given}"]).cluster
    publisher = WEIGHT_TRANSFER.build(section.weight_transfer, "cluster.weight_transfer", put=Held)
    publisher.publish(trained(1), 1)
    offer: Offer = publisher.publish(trained(2), 2)
    assert bool(offer.changes) == delta


def test_options_that_are_gone_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown keyword 'streams'.*delta, full_every"):
        WEIGHT_TRANSFER.check({"name": "tcp", "streams": 4}, ("put",), "cluster.weight_transfer")
