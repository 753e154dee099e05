"""Which of a step's episodes a run keeps: whole groups, as text and token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np
from torch import Tensor

from rlflow.report.records import trajectory_record
from rlflow.report.tokens import FLOATS, SegmentTokens, write_tokens
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import write_json_lines
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Group, Segment, Trajectory

UNREADABLE = "\ufffd"
SCORED_SHARE = 1 / 24
"""Of a step's tokens. A forward pass over all of them takes about a fifth of a step, so this takes
less than a hundredth."""


class Recorder:
    """Keeps `episodes` of each step or more, in whole groups; 0 keeps none. `observe` before the
    step's first update, `write` after its last; without the former the episodes are kept as text
    alone."""

    def __init__(self, directory: RunDirectory, tokenizer: Tokenizer, episodes: int) -> None:
        self._directory = directory
        self._texts = TokenTexts(tokenizer)
        self._episodes = episodes
        self._groups: list[Group] = []
        self._tokens: dict[int, list[SegmentTokens]] = {}

    def observe(self, batch: Batch, groups: Sequence[Group], trainer: Trainer) -> None:
        """Takes down what the step knows of the kept groups' tokens. batch: with advantages, of all
        usable attempts in order."""
        if not self._episodes:
            return
        self._groups = whole_groups(groups, self._episodes)
        owners = [trajectory for group in groups for trajectory in group.usable]
        self._tokens = score_tokens(
            batch, owners, _attempts(self._groups), trainer, always=self._episodes
        )

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the kept groups of the step."""
        if not self._episodes:
            return
        kept, tokens = whole_groups(groups, self._episodes), self._tokens
        seen = [id(group) for group in self._groups] == [id(group) for group in kept]
        self._groups, self._tokens = [], {}
        attempts = _attempts(kept)
        segments = tokens if seen else {}
        advantages = [mean_advantage(segments.get(place, [])) for place in range(len(attempts))]
        records = [
            trajectory_record(group, attempt)
            for group in kept
            for attempt in range(len(group.trajectories))
        ]
        for record, advantage in zip(records, advantages, strict=True):
            record["advantage"] = advantage
        self._directory.confirm()
        write_json_lines(self._directory.trajectories(step), records)
        if segments:
            rows = [
                (own, segments.get(place) or [segment_tokens(one) for one in own.segments])
                for place, own in enumerate(attempts)
            ]
            self._directory.confirm()
            write_tokens(self._directory.tokens(step), rows, self._texts.of)


def whole_groups(groups: Sequence[Group], episodes: int) -> list[Group]:
    """As many groups, spread evenly over all, as hold at least that many episodes; all of them
    where there are not so many."""
    sizes = [len(group.trajectories) for group in groups]
    largest = max(sizes, default=1) or 1
    count = min(len(groups), -(-episodes // largest))
    while (
        count < len(groups)
        and sum(sizes[place] for place in _spread(len(groups), count)) < episodes
    ):
        count += 1
    return [groups[place] for place in _spread(len(groups), count)]


def _spread(total: int, count: int) -> list[int]:
    edges = [index * total // count for index in range(count + 1)] if count else [0]
    return [low for low, _ in pairwise(edges)]


def _attempts(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def score_tokens(
    batch: Batch,
    owners: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    trainer: Trainer,
    always: int,
) -> dict[int, list[SegmentTokens]]:
    """{place in `kept`: its segments} of all that have rows in the batch, before the step's first
    update. owners: the trajectories that `Batch.trajectory` counts. One forward pass gives the
    trainer's log-probs and entropy: over the first `always` of `kept`, and over further ones as
    long as all together are at most SCORED_SHARE of the batch's tokens."""
    places = {id(trajectory): place for place, trajectory in enumerate(kept)}
    indices = batch.require("trajectory", "tokens").tolist()
    known, parts = batch.require("logprobs_known", "tokens"), batch.require("segment", "tokens")
    rows = [
        (places[id(owners[index])], row)
        for row, index in enumerate(indices)
        if id(owners[index]) in places
    ]
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
    values = np.concatenate([np.zeros(0), *(segment.advantages for segment in segments)])
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


class TokenTexts:
    """The text of single tokens, remembered by id over the steps of a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Each token's text. A character that several tokens spell stands at the first of them;
        the others have none."""
        texts: list[str] = []
        for unreadable, run in groupby(tokens, lambda token: UNREADABLE in self._own(token)):
            found = list(run)
            if unreadable and len(found) > 1:
                whole = self._tokenizer.decode(found, skip_special_tokens=False)
                texts += [whole, *[""] * (len(found) - 1)]
            else:
                texts += map(self._own, found)
        return texts

    def _own(self, token: int) -> str:
        """Special tokens too; with a leading blank where the vocabulary marks it by U+2581."""
        if token not in self._texts:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            named = self._tokenizer.inner.convert_ids_to_tokens(token)
            marked = isinstance(named, str) and named.startswith("\u2581")
            self._texts[token] = f" {text}" if marked and not text.startswith(" ") else text
        return self._texts[token]
