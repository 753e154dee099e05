"""Which of a step's episodes a run keeps: whole groups, as text and token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rlflow.report.records import trajectory_record
from rlflow.report.tokens import SegmentTokens, TokenTexts, mean_advantage, score_tokens, segment_tokens, write_tokens
from rlflow.rollout import Tokenizer
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import write_json_lines
from rlflow.trainer.base import Trainer
from rlflow.types import Batch, Group, Trajectory


class Recorder:
    """Keeps `episodes` of each step or more, in whole groups; 0 keeps none. `observe` before the step's first update, `write`
    after its last; without the former the episodes are kept as text alone."""

    def __init__(self, directory: RunDirectory, tokenizer: Tokenizer, episodes: int) -> None:
        self._directory = directory
        self._texts = TokenTexts(tokenizer)
        self._episodes = episodes
        self._groups: list[Group] = []
        self._tokens: dict[int, list[SegmentTokens]] = {}

    def observe(self, batch: Batch, groups: Sequence[Group], trainer: Trainer) -> None:
        """Takes down what the step knows of the kept groups' tokens. batch: with advantages, of all usable attempts in order."""
        if not self._episodes:
            return
        self._groups = whole_groups(groups, self._episodes)
        owners = [trajectory for group in groups for trajectory in group.usable]
        self._tokens = score_tokens(batch, owners, _attempts(self._groups), trainer, always=self._episodes)

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
        records = [trajectory_record(group, attempt) for group in kept for attempt in range(len(group.trajectories))]
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
            write_tokens(self._directory.tokens(step), rows, self._texts)


def whole_groups(groups: Sequence[Group], episodes: int) -> list[Group]:
    """As many groups, spread evenly over all, as hold at least that many episodes; all of them where there are not so many."""
    sizes = [len(group.trajectories) for group in groups]
    largest = max(sizes, default=1) or 1
    count = min(len(groups), -(-episodes // largest))
    while count < len(groups) and sum(sizes[place] for place in _spread(len(groups), count)) < episodes:
        count += 1
    return [groups[place] for place in _spread(len(groups), count)]


def _spread(total: int, count: int) -> list[int]:
    edges = [index * total // count for index in range(count + 1)] if count else [0]
    return [low for low, _ in pairwise(edges)]


def _attempts(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]
