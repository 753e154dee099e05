"""Scores of frozen models for groups as they end, while others of the step are still sampled.
(AsyncFlow, arXiv 2507.01663: each consumer gets every row once, as soon as what it needs is
there.)"""

from __future__ import annotations

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
    Segment,
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
        keys = [
            [_key(one, part, segment) for part, segment in enumerate(one.segments)]
            for one in trajectories
        ]
        late = [
            index
            for index, own in enumerate(keys)
            if any(key not in self._known for key in own)
        ]
        self._score(
            [trajectories[index] for index in late], [tasks[index] for index in late]
        )
        rows = [self._known[key] for own in keys for key in own]
        for own in keys:
            for key in own:
                self._drop(key)
        columns = {
            name: _padded([row[name] for row in rows], batch.tokens.shape[1])
            for name in rows[0]
        }
        fields = {name: value for name, value in columns.items() if name in FIELDS}
        return batch.replace(
            **fields,
            extras={name: value for name, value in columns.items() if name in EXTRAS},
        )

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
        found = {
            name: getattr(batch, name)
            for name in FIELDS
            if getattr(batch, name) is not None
        }
        found |= {name: batch.extras[name] for name in EXTRAS if name in batch.extras}
        keys = [
            _key(one, part, segment)
            for one in trajectories
            for part, segment in enumerate(one.segments)
        ]
        for row, key in enumerate(keys):
            length = int(batch.lengths[row])
            self._drop(key)
            self._known[key] = {
                name: values[row, :length].clone() for name, values in found.items()
            }
            self._bytes += _size(key, self._known[key])


def _key(one: Trajectory, part: int, segment: Segment) -> Key:
    return (
        one.id or f"{one.group_id}/{one.attempt}",
        part,
        segment.tokens.numpy().tobytes(),
    )


def _size(key: Key, row: Mapping[str, Tensor]) -> int:
    return len(key[2]) + sum(one.nbytes for one in row.values())


def _padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Rows of (tokens, ...), right-padded with zeros to (rows, width, ...)."""
    whole = torch.zeros((len(rows), width, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for place, row in enumerate(rows):
        whole[place, : len(row)] = row
    return whole
