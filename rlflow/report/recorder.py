"""Keeps some episodes of each step: whole groups, as text and token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from rlflow.report.records import trajectory_record
from rlflow.report.tokens import FLOATS, SegmentTokens, write_tokens
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import write_json_lines

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.rollout.tokenizer import Tokenizer
    from rlflow.trainer.base import Trainer
    from rlflow.types import Batch, Group, Segment, Trajectory

UNREADABLE = "\ufffd"
SCORED_SHARE = 1 / 24
"""Of a step's tokens: a forward pass over all takes a fifth of a step, this one a hundredth."""


class Recorder:
    """Keeps at least `episodes` of each step, in whole groups; 0 keeps none.

    `observe` comes before the step's first update, `write` after its last; without `observe`
    episodes are kept as text alone."""

    def __init__(self, directory: RunDirectory, tokenizer: Tokenizer, episodes: int) -> None:
        self._directory = directory
        self._texts = TokenTexts(tokenizer)
        self._episodes = episodes
        self._tokens: dict[int, list[SegmentTokens]] = {}

    def observe(self, batch: Batch, groups: Sequence[Group], trainer: Trainer) -> None:
        """Notes the numbers of the kept groups' tokens. batch: all usable attempts in order, with
        advantages."""
        if not self._episodes:
            return
        owners = [one for group in groups for one in group.usable]
        kept = [one for group in whole_groups(groups, self._episodes) for one in group.trajectories]
        self._tokens = score_tokens(batch, owners, kept, trainer, always=self._episodes)

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Writes the kept groups of the step, the same as those of `observe`."""
        if not self._episodes:
            return
        kept, tokens = whole_groups(groups, self._episodes), self._tokens
        self._tokens = {}
        records = []
        rows: list[tuple[Trajectory, list[SegmentTokens]]] = []
        for group in kept:
            for attempt, own in enumerate(group.trajectories):
                segments = tokens.get(len(rows), [])
                advantage = mean_advantage(segments)
                records.append({**trajectory_record(group, attempt), "advantage": advantage})
                rows.append((own, segments or [segment_tokens(one) for one in own.segments]))
        self._directory.confirm()
        write_json_lines(self._directory.trajectories(step), records)
        if tokens:
            self._directory.confirm()
            write_tokens(self._directory.tokens(step), rows, self._texts.of)


def whole_groups(groups: Sequence[Group], episodes: int) -> list[Group]:
    """The fewest groups, spread evenly over all, that hold so many episodes; else all of them."""
    largest = max((len(group.trajectories) for group in groups), default=0) or 1
    for count in range(-(-episodes // largest), len(groups)):
        chosen = [groups[place * len(groups) // count] for place in range(count)]
        if sum(len(group.trajectories) for group in chosen) >= episodes:
            return chosen
    return list(groups)


def score_tokens(
    batch: Batch,
    owners: Sequence[Trajectory],
    kept: Sequence[Trajectory],
    trainer: Trainer,
    always: int,
) -> dict[int, list[SegmentTokens]]:
    """{place in `kept`: its segments} of all that have rows in the batch.

    owners: the trajectories that `Batch.trajectory` counts. One forward pass gives the trainer's
    log-probs and entropy, of the first `always` of `kept`, and of further ones up to SCORED_SHARE
    of the batch's tokens."""
    places = {id(trajectory): place for place, trajectory in enumerate(kept)}
    indices = batch.require("trajectory", "tokens").tolist()
    known = batch.require("logprobs_known", "tokens")
    parts = batch.require("segment", "tokens")
    held = ((places.get(id(owners[index])), row) for row, index in enumerate(indices))
    rows = [(place, row) for place, row in held if place is not None]
    scored, room = [], SCORED_SHARE * float(batch.lengths.sum())
    for place, row in rows:
        room -= float(batch.lengths[row])
        if place < always or room >= 0:
            scored.append(row)
    asked = batch.replace(wanted=batch.loss_mask).select(scored)
    scores = trainer.score(asked, want=("logprobs", "entropy")) if scored else {}
    found: dict[int, list[SegmentTokens]] = {}
    for place, row in rows:
        columns = {"advantages": batch.advantages[row]}
        if known[row]:
            columns["logprobs"] = batch.logprobs[row]
        if row in scored:
            at = scored.index(row)
            columns["trainer_logprobs"] = scores["logprobs"][at]
            columns["entropy"] = scores["entropy"][at]
        segment = kept[place].segments[int(parts[row])]
        own = segment_tokens(segment, columns, batch.loss_mask[row])
        found.setdefault(place, []).append(own)
    return found


def segment_tokens(
    segment: Segment,
    columns: Mapping[str, Tensor] | None = None,
    trained: Tensor | None = None,
) -> SegmentTokens:
    """The segment's columns; without any (an aborted attempt) its own. trained: (T,) bool or
    longer."""
    sampled = segment.loss_mask.numpy()
    if columns is None:
        columns = {} if segment.logprobs is None else {"logprobs": segment.logprobs}
    floats = {name: np.full(sampled.sum(), np.nan, np.float32) for name in FLOATS}
    for name, column in columns.items():
        floats[name] = column[: len(segment)].float().numpy()[sampled]
    if trained is not None:
        at = trained[: len(segment)].numpy()[sampled]
        floats["advantages"] = np.where(at, floats["advantages"], np.float32(np.nan))
    tokens = segment.tokens.numpy().astype(np.int32)
    versions = segment.versions.numpy().astype(np.int32)[sampled]
    return SegmentTokens(tokens, sampled, versions, **floats)


def mean_advantage(segments: Sequence[SegmentTokens]) -> float | None:
    """The mean over the trained tokens; None where nothing was trained."""
    columns = [segment.advantages for segment in segments]
    values = np.concatenate([np.zeros(0), *columns])
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


class TokenTexts:
    """The text of single tokens, remembered by id over the steps of a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Each token's text; a character of several tokens stands at the first of them."""
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
