"""What changed between two versions, bit for bit: places and new words. The format is that of arXiv
2605.15565.

    u64 count | u16 bytes of a word (2 or 4) | u16 flags (bit 0: places are u64, else u32) | i32 reserved, 0      little-endian
    places[count]   of words, ascending, from the first tensor on
    words[count]    the new ones

Words are compared as bits: minus zero is not zero, and a NaN is equal to itself. Applying a delta
twice is applying it once. A delta may be cut into several such blobs, whose places go on where
those of the one before ended."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlflow.errors import RolloutError

HEADER = struct.Struct("<QHHi")
WIDE = 1  # flag
WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
CHUNK_WORDS = 2**18


def delta_words(
    old: np.ndarray, new: np.ndarray, word: int, chunk: int = CHUNK_WORDS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(places, new words) of each chunk of words that has a change.

    old, new: (N,) uint8, equally long, a whole number of words of `word` bytes."""
    before, after = old.view(WORDS[word]), new.view(WORDS[word])
    for start in range(0, len(after), chunk):
        part = after[start : start + chunk]
        places = np.flatnonzero(before[start : start + chunk] != part)
        if len(places):
            yield places + start, part[places]


def encode_delta(places: np.ndarray, words: np.ndarray, total: int) -> bytes:
    """A blob. places: ascending. words: u2 or u4. total: words of the whole, which decides how wide
    places are."""
    wide = total > 2**32 - 1
    header = HEADER.pack(len(places), words.itemsize, WIDE if wide else 0, 0)
    return b"".join((header, places.astype("<u8" if wide else "<u4").tobytes(), words.tobytes()))


def make_delta(
    old: np.ndarray,
    new: np.ndarray,
    word: int,
    density: float,
    blob_bytes: int,
    chunk: int = CHUNK_WORDS,
) -> list[bytes] | None:
    """The blobs of at most about `blob_bytes` bytes each that turn `old` into `new`; None where
    more than that share of the words has changed, or the two are not equally long. At least one
    blob, which may be empty."""
    total = len(new) // word
    if len(old) != len(new) or len(new) % word:
        return None
    blobs: list[bytes] = []
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    count = waiting = 0
    for places, words in delta_words(old, new, word, chunk):
        count += len(places)
        if count > density * total:
            return None
        kept.append((places, words))
        waiting += len(places)
        if waiting * (8 + word) >= blob_bytes:
            blobs.append(_joined(kept, word, total))
            kept, waiting = [], 0
    if kept or not blobs:
        blobs.append(_joined(kept, word, total))
    return blobs


def apply_delta(blob: bytes | memoryview, content: np.ndarray, where: str) -> int:
    """Writes the new words into `content`, (N,) uint8, and returns how many there were. A blob that
    is none writes nothing.

    Raises RolloutError."""
    if len(blob) < HEADER.size:
        raise _refused(where, f"{HEADER.size} bytes or more", f"{len(blob)}")
    count, word, flags, reserved = HEADER.unpack_from(blob)
    if word not in WORDS or flags not in (0, WIDE) or reserved or len(content) % word:
        raise _refused(
            where,
            "words of 2 or 4 bytes, flags 0 or 1",
            f"words of {word}, flags {flags}, reserved {reserved}",
        )
    place = np.dtype("<u8" if flags & WIDE else "<u4")
    size = HEADER.size + count * (place.itemsize + word)
    if len(blob) != size:
        raise _refused(where, f"{size} bytes for {count} words", f"{len(blob)}")
    places = np.frombuffer(blob, place, count, HEADER.size)
    total = len(content) // word
    if count and (int(places[-1]) >= total or bool(np.any(places[1:] <= places[:-1]))):
        raise _refused(
            where, f"ascending places below {total}", f"others, the last one {places[-1]}"
        )
    content.view(WORDS[word])[places] = np.frombuffer(
        blob, WORDS[word], count, HEADER.size + count * place.itemsize
    )
    return count


def _joined(kept: list[tuple[np.ndarray, np.ndarray]], word: int, total: int) -> bytes:
    places = [one for one, _ in kept] or [np.empty(0, np.int64)]
    words = [one for _, one in kept] or [np.empty(0, WORDS[word])]
    return encode_delta(np.concatenate(places), np.concatenate(words), total)


def _refused(where: str, expected: str, found: str) -> RolloutError:
    return RolloutError(
        f"weight transfer: {where}: this is no delta of these weights: expected {expected}, found {found}."
    )
