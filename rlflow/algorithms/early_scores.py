"""Scores of frozen models for groups as they end, while others of the step are still sampled.
(AsyncFlow, arXiv 2507.01663: each consumer gets every row once, as soon as what it needs is
there.)"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlflow.batching import make_batch
from rlflow.types import (
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPROBS,
    Batch,
    Group,
    Task,
    Trajectory,
)

Stage = Callable[[Batch, Sequence[Task]], Batch]
"""(batch, task of each trajectory) -> the batch with the stage's columns."""
Key = tuple[str, int, bytes]
"""Trajectory's id, number of its segment, and its tokens: an attempt that is sampled again has the
id of the first."""
FIELDS = ("reference_logprobs", "teacher_logprobs")
EXTRAS = (TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS)
MOST_ROWS = 65536
MOST_BYTES = 2 * 2**30
"""Of rows that wait for their step, with their tokens; beyond, the oldest are asked about again.
Groups that no step takes count too."""


class EarlyScores:
    """Rows that stages have scored, until a step takes them. A stage sees a row once, in the batch
    of its group: what it says does not depend on who else was ready, so equal groups have equal
    bits whatever the timing.

    stages: by name. Whoever changes a model that is asked says so (`forget`). `rows`: how many each
    stage has seen."""

    def __init__(self, stages: Mapping[str, Stage]) -> None:
        self.rows: Counter[str] = Counter()
        self._stages = dict(stages)
        self._known: dict[Key, dict[str, Tensor]] = {}
        self._bytes = 0

    def take(self, group: Group) -> None:
        """Scores the rows of a group that has ended."""
        self._score(group.usable, [group.task] * len(group.usable))
        while len(self._known) > MOST_ROWS or self._bytes > MOST_BYTES:
            self._drop(next(iter(self._known)))

    def fill(
        self, batch: Batch, trajectories: Sequence[Trajectory], tasks: Sequence[Task]
    ) -> Batch:
        """The batch of these usable trajectories with the stages' columns. Who was not there when a
        group ended (an experience of another run, a row that was rewritten) is scored now."""
        own = [_keys([one]) for one in trajectories]
        late = [
            (one, task)
            for one, task, keys in zip(trajectories, tasks, own, strict=True)
            if not self._known.keys() >= set(keys)
        ]
        self._score([one for one, _ in late], [task for _, task in late])
        keys = list(itertools.chain(*own))
        rows = [self._known[key] for key in keys]
        for key in keys:
            self._drop(key)
        columns = {
            name: _padded([row[name] for row in rows], batch.tokens.shape[1]) for name in rows[0]
        }
        extras = {name: columns.pop(name) for name in EXTRAS if name in columns}
        return batch.replace(**columns, extras=extras)

    def forget(self) -> None:
        """What was said is no longer what would be said."""
        self._known.clear()
        self._bytes = 0

    def _drop(self, key: Key) -> None:
        if (row := self._known.pop(key, None)) is not None:
            self._bytes -= _size(key, row)

    def _score(self, trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> None:
        if not trajectories:
            return
        batch = make_batch(trajectories)
        for name, stage in self._stages.items():
            batch = stage(batch, tasks)
            self.rows[name] += len(batch)
        scored = {name: getattr(batch, name) for name in FIELDS} | batch.extras
        found = {name: scored.get(name) for name in (*FIELDS, *EXTRAS)}
        for row, key in enumerate(_keys(trajectories)):
            length = int(batch.lengths[row])
            self._drop(key)
            self._known[key] = {
                name: values[row, :length].clone()
                for name, values in found.items()
                if values is not None
            }
            self._bytes += _size(key, self._known[key])


def _keys(trajectories: Sequence[Trajectory]) -> list[Key]:
    """Of all their rows, in order."""
    return [
        (
            one.id or f"{one.group_id}/{one.attempt}",
            part,
            segment.tokens.numpy().tobytes(),
        )
        for one in trajectories
        for part, segment in enumerate(one.segments)
    ]


def _size(key: Key, row: Mapping[str, Tensor]) -> int:
    return len(key[2]) + sum(one.nbytes for one in row.values())


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Rows of (tokens, ...), right-padded with zeros to (rows, width, ...)."""
    whole = torch.zeros((len(rows), width, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for place, row in enumerate(rows):
        whole[place, : len(row)] = row
    return whole
