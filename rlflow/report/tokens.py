"""What a step knew of single tokens: one compressed file of columns per step, written by runs and read by `rlflow view`.

meta       JSON: episodes with their segments' lengths and turns, the text of each id, and of places where it is another
tokens     (T,) int32, all segments one after the other
sampled    (T,) one bit each: what the policy sampled; the columns below are about these N tokens
versions   (N,) int32: weight version that sampled the token
logprobs, trainer_logprobs, entropy, advantages    (N,) float32, NaN where not known: nats, and an advantage
"""

from __future__ import annotations

import json
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
    segment: Segment, columns: Mapping[str, Tensor | None] | None = None, trained: Tensor | None = None
) -> SegmentTokens:
    """The segment's columns; without any (an aborted attempt) those that itself knows. trained: (T,) or longer, bool."""
    import numpy as np

    length, sampled = len(segment), segment.loss_mask.numpy()
    count = int(sampled.sum())
    known = {"logprobs": segment.logprobs} if columns is None else columns
    floats = {}
    for name in FLOATS:
        column = known.get(name)
        floats[name] = (
            np.full(count, np.nan, np.float32)
            if column is None
            else column[:length].float().numpy()[sampled].astype(np.float32)
        )
    if trained is not None:
        untrained = ~trained[:length].numpy()[sampled]
        floats["advantages"] = np.where(untrained, np.float32(np.nan), floats["advantages"])
    versions = segment.versions.numpy()[sampled].astype(np.int32)
    return SegmentTokens(segment.tokens.numpy().astype(np.int32), sampled, versions, **floats)


def mean_advantage(segments: Sequence[SegmentTokens]) -> float | None:
    """The mean over the trained tokens; None where nothing was trained."""
    import numpy as np

    values = np.concatenate([segment.advantages for segment in segments]) if segments else np.zeros(0, np.float32)
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
    path: str | Path, episodes: Sequence[tuple[Trajectory, Sequence[SegmentTokens]]], texts: TokenTexts
) -> None:
    """Writes the columns of some episodes, whole or not at all; what can be made again is not synced to the disk."""
    import numpy as np

    segments = [segment for _, own in episodes for segment in own]
    tokens = _joined([segment.tokens for segment in segments], np.int32)
    ids = tokens.tolist()
    meta = {
        "episodes": [
            {
                "id": trajectory.id,
                "segments": [len(segment.tokens) for segment in own],
                "turns": [[turn.segment, turn.start, turn.stop] for turn in trajectory.turns],
            }
            for trajectory, own in episodes
        ],
        "texts": {token: texts.of(token) for token in sorted(set(ids))},
        "spelled": texts.spelled(ids),
    }
    encoded = json.dumps(meta, ensure_ascii=False).encode(errors="backslashreplace")
    columns: dict[str, Any] = {
        "meta": np.frombuffer(encoded, np.uint8),
        "tokens": tokens,
        "sampled": np.packbits(_joined([segment.sampled for segment in segments], np.bool_)),
        "versions": _joined([segment.versions for segment in segments], np.int32),
        **{name: _joined([getattr(segment, name) for segment in segments], np.float32) for name in FLOATS},
    }
    with replacing(path, durable=False) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **columns)


def read_tokens(path: str | Path) -> dict[str, EpisodeTokens]:
    """{id of the episode: its tokens} of a file that `write_tokens` wrote.

    Raises CheckpointError where it is missing or damaged."""
    import zipfile
    import zlib

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        return {episode.id: episode for episode in _episodes(columns, json.loads(columns["meta"].tobytes()))}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; expected the tokens of a step.") from None
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        EOFError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise CheckpointError(f"{path}: damaged, no columns of tokens ({error}); remove it.") from None


def _episodes(columns: Mapping[str, numpy.ndarray], meta: Mapping[str, Any]) -> Iterator[EpisodeTokens]:
    import numpy as np

    tokens = columns["tokens"]
    sampled = np.unpackbits(columns["sampled"], count=len(tokens)).astype(bool)
    texts = {int(token): text for token, text in meta["texts"].items()}
    spelled = {int(place): text for place, text in meta["spelled"].items()}
    begin = known = 0
    for episode in meta["episodes"]:
        segments, written = [], []
        for length in episode["segments"]:
            mask = sampled[begin : begin + length]
            end = known + int(mask.sum())
            own = {name: columns[name][known:end] for name in ("versions", *FLOATS)}
            ids = tokens[begin : begin + length]
            segments.append(SegmentTokens(ids, mask, **own))
            written.append([spelled.get(begin + at, texts.get(token, "")) for at, token in enumerate(ids.tolist())])
            begin, known = begin + length, end
        turns = [(int(segment), int(start), int(stop)) for segment, start, stop in episode["turns"]]
        yield EpisodeTokens(str(episode["id"]), segments, written, turns)


def _joined(arrays: Sequence[Any], dtype: Any) -> Any:
    import numpy as np

    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
