"""Bounds how far generation runs ahead of training: groups that may start, be trained, or are too
old.

Arithmetic alone, without a clock, threads or storage: `Groups` says what there is, and does what is
decided here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WhenStale = Literal["wait", "drop"]
ANY_AGE = sys.maxsize
"""A `max_staleness` for callers whose steps are numbered by themselves, not by weight versions."""


@dataclass(frozen=True)
class GroupAge:
    """A group that no step has taken yet. oldest: the least weight version of its trained tokens,
    for attempts under way that at their start; None: no token is known of. ended: every attempt is
    over. again: how often it became too old and was issued again."""

    number: int
    oldest: int | None
    ended: bool
    again: int = 0


@dataclass(frozen=True)
class Choice:
    """claim: the groups that the step takes, in the order of their numbers; none where it has to
    wait. again: those too old for any step, to be issued again."""

    claim: tuple[int, ...]
    again: tuple[int, ...]


@dataclass(frozen=True)
class Pacing:
    """prompts: groups per step. max_staleness: the most that the version in training may be ahead
    of a trained token's. run_ahead: batches that may be finished or under way beyond the current
    one.

    when_stale: `wait`: a step takes first what would be too old for the next one, and waits for it;
    so nothing becomes too old as long as run_ahead <= max_staleness. `drop`: a step takes what is
    finished; what became too old is issued again, and the second time waited for, so that long
    tasks are not lost."""

    prompts: int
    max_staleness: int = 0
    run_ahead: int = 0
    when_stale: WhenStale = "wait"

    def room(self, groups: int) -> int:
        """How many more groups may start beside those that are under way, finished, or taken by the
        current step.

        N_not_dropped < (run_ahead + version + 1) * prompts, with the groups of the steps before the
        current one taken off both sides: steps that filters left short do not widen it."""
        return max(0, (self.run_ahead + 1) * self.prompts - groups)

    def choose(self, version: int, groups: Sequence[GroupAge], wanted: int) -> Choice:
        """What the step that trains weights of `version` does about the groups; `wanted`: how many
        it still needs.

        Under `wait` at most `prompts` groups are ever in their last step: of the (run_ahead + 1) *
        prompts that were open when theirs began, every step since then took `prompts`, the oldest
        first."""
        again = tuple(
            group.number for group in groups if self._age(group, version) > self.max_staleness
        )
        fresh = sorted((group for group in groups if group.number not in again), key=_rank)
        last = [group for group in fresh if self._last_chance(group, version)][:wanted]
        others = [group for group in fresh if group.ended and group not in last]
        chosen = [*last, *others[: wanted - len(last)]]
        short = len(chosen) < wanted and (bool(again) or not all(group.ended for group in fresh))
        if short or not all(group.ended for group in last):
            return Choice((), again)
        return Choice(tuple(sorted(group.number for group in chosen)), again)

    def _last_chance(self, group: GroupAge, version: int) -> bool:
        """Whether it would be too old for the next step, and must not be."""
        waits = self.when_stale == "wait" or group.again > 0
        return waits and self._age(group, version) == self.max_staleness

    def _age(self, group: GroupAge, version: int) -> int:
        return -1 if group.oldest is None else version - group.oldest


def _rank(group: GroupAge) -> tuple[int, int]:
    """The oldest tokens first, then the order of issue; groups without any token before all
    others."""
    return (-1 if group.oldest is None else group.oldest, group.number)
