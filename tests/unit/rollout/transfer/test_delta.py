"""The format of deltas, by hand arithmetic and by what must hold for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.errors import RolloutError
from rlflow.rollout.transfer.delta import apply_delta, encode_delta, make_delta

LARGE = 2**30


def halves(*words: int) -> np.ndarray:
    return np.array(words, "<u2").view(np.uint8)


OLD = halves(0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0)
NEW = halves(0x3F80, 0x4001, 0x4040, 0x4080, 0x40A3, 0x40C0)
BLOB = bytes.fromhex("0200000000000000020000000000000001000000040000000140a340")


def delta(old: np.ndarray, new: np.ndarray, word: int = 2, **options: int) -> list[bytes]:
    made = make_delta(old, new, word, density=1.0, **{"blob_bytes": LARGE, **options})
    assert made is not None
    return made


def applied(blobs: list[bytes], content: np.ndarray) -> np.ndarray:
    whole = content.copy()
    for blob in blobs:
        apply_delta(blob, whole, "here")
    return whole


def test_the_blob_of_the_worked_example() -> None:
    assert delta(OLD, NEW) == [BLOB] and len(BLOB) == 28
    assert applied([BLOB], OLD).tobytes() == NEW.tobytes()


def test_a_thousand_changes_are_6016_bytes_and_none_are_16() -> None:
    old = np.zeros(40_000, np.uint8)
    new = old.copy()
    new.view("<u2")[::20] = 7
    (blob,) = delta(old, new)
    assert len(blob) == 16 + 1000 * (4 + 2) == 6016
    (empty,) = delta(new, new)
    assert empty.hex() == "00000000000000000200000000000000"
    (wide,) = delta(old, new, word=4)
    assert len(wide) == 16 + 1000 * (4 + 4)


def test_places_are_wide_where_the_weights_are() -> None:
    blob = encode_delta(np.array([2**32 + 5]), np.array([9], "<u2"), 2**33)
    assert len(blob) == 16 + 8 + 2 and blob[:16].hex() == "01000000000000000200010000000000"
    assert blob[16:].hex() == "05000000010000000900"
    assert len(encode_delta(np.array([5]), np.array([9], "<u2"), 2**32 - 1)) == 16 + 4 + 2
    content = np.zeros(64, np.uint8)
    apply_delta(encode_delta(np.array([5]), np.array([9], "<u2"), 2**33), content, "here")
    assert content.view("<u2")[5] == 9


def test_signs_of_zero_and_nans_are_words_like_others() -> None:
    old = halves(0x0000, 0x7FC0, 0x7FC0, 0x8000)  # 0, NaN, NaN, -0 in bfloat16
    new = halves(0x8000, 0x7FC0, 0x7FC1, 0x8000)  # -0, the same NaN, another one, -0
    assert len(delta(old, new)[0]) == 16 + 2 * 6
    assert applied(delta(old, new), old).tobytes() == new.tobytes()


contents = st.integers(1, 60).flatmap(
    lambda words: st.tuples(*(st.lists(st.integers(0, 3), min_size=4 * words, max_size=4 * words) for _ in range(3)))
)


@given(contents, st.sampled_from((2, 4)), st.integers(1, 9), st.integers(1, 100))
def test_a_delta_is_exact_idempotent_and_the_same_in_chunks(
    values: tuple[list[int], ...], word: int, chunk: int, blob_bytes: int
) -> None:
    one, two, three = (np.array(value, np.uint8) for value in values)
    blobs = delta(one, two, word)
    assert delta(one, two, word, chunk=chunk) == blobs
    assert applied(blobs, one).tobytes() == applied(blobs * 2, one).tobytes() == two.tobytes()
    several = delta(one, two, word, chunk=chunk, blob_bytes=blob_bytes)
    assert applied(several, one).tobytes() == two.tobytes()
    assert applied(blobs + delta(two, three, word), one).tobytes() == three.tobytes()


def test_more_than_the_density_or_another_length_makes_no_delta() -> None:
    old = np.zeros(2000, np.uint8)
    new = old.copy()
    new.view("<u2")[:100] = 1
    assert make_delta(old, new, 2, 0.1, LARGE) is not None
    new.view("<u2")[100] = 1
    assert make_delta(old, new, 2, 0.1, LARGE) is None
    assert make_delta(old, new[:1998], 2, 1.0, LARGE) is None


@pytest.mark.parametrize(
    ("blob", "told"),
    [
        (b"", "16 bytes or more, found 0"),
        (BLOB[:-1], "28 bytes for 2 words, found 27"),
        (BLOB + b"\0", "found 29"),
        (b"\xff" * 8 + BLOB[8:], r"bytes for 18446744073709551615 words"),
        (BLOB[:8] + b"\x03" + BLOB[9:], "words of 2 or 4 bytes.*found words of 3"),
        (BLOB[:10] + b"\x02" + BLOB[11:], "flags 2"),
        (BLOB[:12] + b"\x01" + BLOB[13:], "reserved 1"),
        (encode_delta(np.array([1, 6]), np.array([1, 2], "<u2"), 6), "ascending places below 6"),
        (encode_delta(np.array([4, 1]), np.array([1, 2], "<u2"), 6), "ascending places below 6"),
        (encode_delta(np.array([1, 1]), np.array([1, 2], "<u2"), 6), "ascending places below 6"),
    ],
)
def test_what_is_no_delta_is_refused_and_writes_nothing(blob: bytes, told: str) -> None:
    content = OLD.copy()
    with pytest.raises(RolloutError, match=f"there: this is no delta of these weights: expected .*{told}"):
        apply_delta(blob, content, "there")
    assert content.tobytes() == OLD.tobytes()
