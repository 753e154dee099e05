"""What a step knew of single tokens: one compressed file per step, written by runs and read by
`rlflow view`.

about      JSON: episodes with their number of segments and their turns, the segments' lengths in
           each array, the text of each id, and of places where it is another
tokens     (T,) int32, all segments one after the other
sampled    (T,) bool: what the policy sampled; the arrays below are of these N tokens
versions   (N,) int32: weight version that sampled the token
logprobs, trainer_logprobs, entropy, advantages
           (N,) float32, NaN where not known: nats, and an advantage
"""

from __future__ import annotations

import io
import itertools
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError
from rlflow.storage.files import replacing

if TYPE_CHECKING:  # files of tokens are read without torch, and numpy is loaded when there is one
    import numpy
    from torch import Tensor

    from rlflow.rollout import Tokenizer
    from rlflow.trainer.base import Trainer
    from rlflow.types import Batch, Segment, Trajectory

FLOATS = ("logprobs", "trainer_logprobs", "entropy", "advantages")
DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, OSError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
UNREADABLE = "\ufffd"
SCORED_SHARE = 1 / 24
"""Of a step's tokens. A forward pass over all of them takes about a fifth of a step, so this takes less than a hundredth."""


@dataclass
class SegmentTokens:
    """One training sequence. tokens, sampled: (T,). The others are of its sampled tokens, (N,), in the columns of the file;
    an advantage is NaN where the token was not trained."""

    tokens: numpy.ndarray
    sampled: numpy.ndarray
    versions: numpy.ndarray
    logprobs: numpy.ndarray
    trainer_logprobs: numpy.ndarray
    entropy: numpy.ndarray
    advantages: numpy.ndarray


@dataclass
class EpisodeTokens:
    """An episode's segments, their tokens' text, and where its responses are: (segment, start, stop) per turn."""

    id: str
    segments: list[SegmentTokens]
    texts: list[list[str]]
    turns: list[tuple[int, int, int]]


def score_tokens(
    batch: Batch, owners: Sequence[Trajectory], kept: Sequence[Trajectory], trainer: Trainer, always: int
) -> dict[int, list[SegmentTokens]]:
    """{place in `kept`: its segments} of all that have rows in the batch, before the step's first update. owners: the
    trajectories that `Batch.trajectory` counts. One forward pass gives the trainer's log-probs and entropy: over the first
    `always` of `kept`, and over further ones as long as all together are at most SCORED_SHARE of the batch's tokens."""
    places = {id(trajectory): place for place, trajectory in enumerate(kept)}
    indices = batch.require("trajectory", "tokens").tolist()
    known, parts = batch.require("logprobs_known", "tokens"), batch.require("segment", "tokens")
    rows = [(places[id(owners[index])], row) for row, index in enumerate(indices) if id(owners[index]) in places]
    scored, room = [], SCORED_SHARE * float(batch.lengths.sum())
    for place, row in rows:
        room -= float(batch.lengths[row])
        if place < always or room >= 0:
            scored.append(row)
    scores = trainer.score(batch.select(scored), want=("logprobs", "entropy")) if scored else {}
    found: dict[int, list[SegmentTokens]] = {}
    for place, row in rows:
        at = scored.index(row) if row in scored else None
        columns: dict[str, Tensor | None] = {
            "logprobs": batch.logprobs[row] if bool(known[row]) else None,
            "trainer_logprobs": None if at is None else scores["logprobs"][at],
            "entropy": None if at is None else scores["entropy"][at],
            "advantages": batch.advantages[row],
        }
        segment = kept[place].segments[int(parts[row])]
        found.setdefault(place, []).append(segment_tokens(segment, columns, batch.loss_mask[row]))
    return found


def segment_tokens(
    segment: Segment,
    columns: Mapping[str, Tensor | None] | None = None,
    trained: Tensor | None = None,
) -> SegmentTokens:
    """The segment's columns; without any (an aborted attempt) those that itself knows. trained:
    (T,) or longer, bool."""
    import numpy as np

    sampled = segment.loss_mask.numpy()
    known = {"logprobs": segment.logprobs} if columns is None else columns
    floats = {name: np.full(sampled.sum(), np.nan, np.float32) for name in FLOATS}
    for name, column in known.items():
        if column is not None:
            floats[name] = column[: len(segment)].float().numpy()[sampled]
    if trained is not None:
        at = trained[: len(segment)].numpy()[sampled]
        floats["advantages"] = np.where(at, floats["advantages"], np.float32(np.nan))
    tokens, versions = (one.numpy().astype(np.int32) for one in (segment.tokens, segment.versions))
    return SegmentTokens(tokens, sampled, versions[sampled], **floats)


def mean_advantage(segments: Sequence[SegmentTokens]) -> float | None:
    """The mean over the trained tokens; None where nothing was trained."""
    import numpy as np

    values = np.concatenate([np.zeros(0), *(segment.advantages for segment in segments)])
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


class TokenTexts:
    """The text of single tokens, remembered by id over the steps of a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The token's own text, special tokens included, a leading blank too where the vocabulary marks it by U+2581."""
        if token not in self._texts:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            named = self._tokenizer.inner.convert_ids_to_tokens(token)
            blank = isinstance(named, str) and named.startswith("\u2581") and not text.startswith(" ")
            self._texts[token] = f" {text}" if blank else text
        return self._texts[token]

    def spelled(self, tokens: Sequence[int]) -> dict[int, str]:
        """{place: text} where a character is spelled by several tokens: it stands at the first of them, the others have none."""
        found: dict[int, str] = {}
        place = 0
        while place < len(tokens):
            stop = place
            while stop < len(tokens) and UNREADABLE in self.of(tokens[stop]):
                stop += 1
            if stop - place > 1:
                found[place] = self._tokenizer.decode(tokens[place:stop], skip_special_tokens=False)
                found |= dict.fromkeys(range(place + 1, stop), "")
            place = max(stop, place + 1)
        return found


def write_tokens(
    path: str | Path,
    episodes: Sequence[tuple[Trajectory, Sequence[SegmentTokens]]],
    texts: TokenTexts,
) -> None:
    """Writes the columns of some episodes, whole or not at all; what can be made again is not
    synced to the disk."""
    import numpy as np

    from rlflow.storage.columns import join

    segments = [segment for _, own in episodes for segment in own]
    ids = [token for segment in segments for token in segment.tokens.tolist()]
    arrays, lengths = join([vars(segment) for segment in segments])
    rows = [
        (one.id, len(own), [(turn.segment, turn.start, turn.stop) for turn in one.turns])
        for one, own in episodes
    ]
    about = {
        "episodes": rows,
        "lengths": lengths,
        "texts": [(token, texts.of(token)) for token in sorted(set(ids))],
        "spelled": list(texts.spelled(ids).items()),
    }
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    with replacing(path, durable=False) as aside, aside.open("wb") as file:
        np.savez_compressed(file, about=text, **arrays)  # type: ignore[arg-type]


def read_tokens(path: str | Path) -> dict[str, EpisodeTokens]:
    """{id of the episode: its tokens} of a file that `write_tokens` wrote.

    Raises CheckpointError where it is missing or damaged."""
    import numpy as np

    try:
        content = io.BytesIO(Path(path).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; expected the tokens of a step.") from None
    try:
        with np.load(content, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").tobytes())
        return {episode.id: episode for episode in _episodes(arrays, about)}
    except DAMAGE as error:
        raise CheckpointError(
            f"{path}: damaged, no columns of tokens ({error}); remove it."
        ) from None


def _episodes(
    arrays: Mapping[str, numpy.ndarray], about: Mapping[str, Any]
) -> Iterator[EpisodeTokens]:
    from rlflow.storage.columns import split

    texts: dict[int, str] = dict(about["texts"])
    spelled: dict[int, str] = dict(about["spelled"])
    segments = (SegmentTokens(**own) for own in split(arrays, about["lengths"]))
    places = itertools.count()
    for name, count, turns in about["episodes"]:
        own = list(itertools.islice(segments, count))
        said = [
            [spelled.get(next(places), texts[token]) for token in segment.tokens.tolist()]
            for segment in own
        ]
        yield EpisodeTokens(name, own, said, [tuple(turn) for turn in turns])
