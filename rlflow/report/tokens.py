"""A step's numbers per token: one compressed file, written by runs and read by `rlflow view`.

about      JSON: episodes with their number of segments and their turns, the segments' lengths in
           each array, the text of each id, and of places where it is another
tokens     (T,) int32, all segments one after the other
sampled    (T,) bool: what the policy sampled; the arrays below are of these N tokens
versions   (N,) int32: weight version that sampled the token
logprobs, trainer_logprobs, entropy, advantages
           (N,) float32, NaN where not known: nats, and an advantage
"""

from __future__ import annotations

import itertools
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError
from rlflow.storage.files import replacing

# Files of tokens are read without torch, and numpy is loaded when there is one
if TYPE_CHECKING:
    import numpy

    from rlflow.types import Trajectory

FLOATS = ("logprobs", "trainer_logprobs", "entropy", "advantages")
DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, OSError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass
class SegmentTokens:
    """One training sequence. tokens, sampled: (T,). The others are of its sampled tokens, (N,), in
    the columns of the file; an advantage is NaN where the token was not trained."""

    tokens: numpy.ndarray
    sampled: numpy.ndarray
    versions: numpy.ndarray
    logprobs: numpy.ndarray
    trainer_logprobs: numpy.ndarray
    entropy: numpy.ndarray
    advantages: numpy.ndarray


@dataclass
class EpisodeTokens:
    """An episode's segments, texts of their tokens, and (segment, start, stop) of each turn."""

    id: str
    segments: list[SegmentTokens]
    texts: list[list[str]]
    turns: list[tuple[int, int, int]]


def write_tokens(
    path: str | Path,
    episodes: Sequence[tuple[Trajectory, Sequence[SegmentTokens]]],
    spell: Callable[[list[int]], list[str]],
) -> None:
    """Writes the columns of some episodes, whole or not at all. spell: ids to each one's text."""
    import numpy as np

    from rlflow.storage.columns import join

    segments = [segment for _, own in episodes for segment in own]
    texts: dict[int, str] = {}
    exceptions: dict[int, str] = {}
    places = itertools.count()
    for segment in segments:
        ids = segment.tokens.tolist()
        for token, text, at in zip(ids, spell(ids), places):
            if texts.setdefault(token, text) != text:
                exceptions[at] = text
    arrays, lengths = join([vars(segment) for segment in segments])
    about = {
        "episodes": [
            (one.id, len(own), [(turn.segment, turn.start, turn.stop) for turn in one.turns])
            for one, own in episodes
        ],
        "lengths": lengths,
        "texts": list(texts.items()),
        "exceptions": list(exceptions.items()),
    }
    document = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with replacing(path, durable=False) as aside, aside.open("wb") as file:
        np.savez_compressed(file, about=document, **arrays)  # type: ignore[arg-type]


def read_tokens(path: str | Path) -> dict[str, EpisodeTokens]:
    """{id of the episode: its tokens} of a file that `write_tokens` wrote.

    Raises CheckpointError where it is missing or damaged."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        about = json.loads(arrays.pop("about").tobytes())
        return {episode.id: episode for episode in _episodes(arrays, about)}
    except DAMAGE as error:
        told = f"damaged, no columns of tokens ({error}); remove it"
        raise CheckpointError(f"{path}: {told}.") from None


def _episodes(
    arrays: Mapping[str, numpy.ndarray], about: Mapping[str, Any]
) -> Iterator[EpisodeTokens]:
    from rlflow.storage.columns import split

    texts: dict[int, str] = dict(about["texts"])
    exceptions: dict[int, str] = dict(about["exceptions"])
    segments = (SegmentTokens(**own) for own in split(arrays, about["lengths"]))
    places = itertools.count()
    for name, count, turns in about["episodes"]:
        own = list(itertools.islice(segments, count))
        said = [
            [exceptions.get(next(places), texts[token]) for token in segment.tokens.tolist()]
            for segment in own
        ]
        yield EpisodeTokens(name, own, said, [tuple(turn) for turn in turns])
