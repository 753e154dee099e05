"""journal.sqlite: one row per attempt of an asynchronous run, from its issue to the checkpoint that holds what it taught.

    issued -> running -> done -> claimed(step) -> trained        written by the driver alone
                                 dropped(reason)

A step's rows are claimed, the step is trained, a checkpoint is written, and only then the rows up to its step are `trained`. A
run that is resumed from a checkpoint takes back whatever happened after it (`recover`). Counts are queries: nothing is counted
elsewhere that a restart could count twice. A late or a second result of an attempt is refused (`finish`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import StorageError
from rlflow.run.journal_tables import FORMAT, FROM_1, TABLES
from rlflow.run.pacing import GroupAge

BUSY_TIMEOUT_S = 30.0  # for a reader (`rlflow show`) that is in the way
OPEN = "state IN ('issued', 'running', 'done')"
_BACK_TO_ISSUED = """state = 'issued', attempt = attempt + 1, step = NULL, min_version = NULL,
    max_version = NULL, payload = NULL, begun_s = NULL, ended_s = NULL, worker = NULL"""


@dataclass(frozen=True)
class IssuedAttempt:
    """A row that waits to be played."""

    number: int
    sample: int
    attempt: int
    task: str
    group_id: str


class AttemptJournal:
    """The journal of one run directory, made where there is none. Raises StorageError where it cannot be read or written."""

    def __init__(
        self,
        path: str | Path,
        *,
        read_only: bool = False,
        confirm: Callable[[], object] = lambda: None,
    ) -> None:
        """confirm: called before each commit; what it raises takes the transaction back."""
        self.path = Path(path)
        self._confirm = confirm
        with self._explained():
            where = f"file:{self.path.absolute()}?mode={'ro' if read_only else 'rwc'}"
            self._database = sqlite3.connect(where, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=True)
            found = self._value("PRAGMA user_version")
            if not read_only:
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("PRAGMA synchronous = NORMAL")  # `mark` brings it to disk where that matters
                if found in (0, 1):
                    made = TABLES if found == 0 else FROM_1
                    self._database.executescript(f"BEGIN; {made} PRAGMA user_version = {FORMAT}; COMMIT;")
                    found = FORMAT
        if found != FORMAT:
            raise StorageError(
                f"{self.path}: expected a journal of format {FORMAT}, found {found}; use the rlflow that wrote it."
            )

    def close(self) -> None:
        """Closes the file; rows stay as they are."""
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written within takes effect together, or not at all."""
        with self._explained():
            if self._database.in_transaction:  # within another one
                yield
                return
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._confirm()
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    # --- the way of an attempt ----------------------------------------------------------------------------------------

    def issue(self, task: str, planned: int, group_id: str, samples: int) -> int:
        """Adds a group of `samples` attempts; returns its number."""
        number = self.issued()
        rows = [(number, sample, 1, task, planned, group_id) for sample in range(samples)]
        columns = "number, sample, attempt, task, planned, group_id, state"
        with self.transaction():
            self._database.executemany(f"INSERT INTO attempts ({columns}) VALUES (?, ?, ?, ?, ?, ?, 'issued')", rows)
        return number

    def begin(
        self, number: int, sample: int, attempt: int, version: int, at: float = 0.0, worker: str = ""
    ) -> None:
        """The attempt has started, with weights of `version`. at: when, seconds since 1970. worker: where."""
        self._write(
            "UPDATE attempts SET state = 'running', min_version = ?, begun_s = ?, worker = ? "
            "WHERE number = ? AND sample = ? AND attempt = ? AND state = 'issued'",
            (version, at, worker, number, sample, attempt),
        )

    def lose(self, number: int, sample: int, attempt: int, worker: str, reason: str, at: float) -> None:
        """The attempt is gone with its worker: it waits to be played again, under the same ids and seeds."""
        with self.transaction():
            self._write(
                "INSERT INTO losses SELECT number, sample, attempt, group_id, ?, ?, begun_s, ? FROM attempts WHERE number = ? "
                "AND sample = ? AND attempt = ? AND state IN ('issued', 'running')",
                (worker, reason, at, number, sample, attempt),
            )
            self._write(
                f"UPDATE attempts SET {_BACK_TO_ISSUED}, reason = 'worker lost' WHERE number = ? AND sample = ? AND attempt = ? "
                "AND state IN ('issued', 'running')",
                (number, sample, attempt),
            )

    def finish(
        self, number: int, sample: int, attempt: int, payload: bytes, versions: tuple[int, int] | None, at: float = 0.0
    ) -> bool:
        """The attempt is over. versions: least and greatest of its trained tokens. Returns whether the result was wanted: a
        second one is not, nor that of an attempt which has been issued again in the meantime."""
        least, most = versions or (None, None)
        changed = self._write(
            "UPDATE attempts SET state = 'done', min_version = ?, max_version = ?, payload = ?, "
            "ended_s = ? WHERE number = ? AND sample = ? AND attempt = ? AND state IN ('issued', 'running')",
            (least, most, payload, at, number, sample, attempt),
        )
        return changed == 1

    def claim(self, numbers: Iterable[int], step: int) -> None:
        """The groups are the step's."""
        with self.transaction():
            for number in numbers:
                self._write("UPDATE attempts SET state = 'claimed', step = ? WHERE number = ? AND state = 'done'", (step, number))

    def drop(self, numbers: Iterable[int], reason: str, step: int) -> None:
        """The groups are not trained, for a reason that the step found."""
        with self.transaction():
            for number in numbers:
                self._write(
                    "UPDATE attempts SET state = 'dropped', reason = ?, step = ? WHERE number = ? AND state <> 'trained'",
                    (reason, step, number),
                )

    def close_short(self, number: int, step: int) -> None:
        """The group ends with the attempts that it has; those that it waits for are given up, for the step's sake."""
        self._write(
            "UPDATE attempts SET state = 'dropped', reason = 'late', step = ? WHERE number = ? AND state = 'running'",
            (step, number),
        )

    def issue_again(self, numbers: Iterable[int], reason: str, stale: bool = False) -> None:
        """Every attempt of the groups waits to be played again. stale: because they became too old."""
        with self.transaction():
            for number in numbers:
                self._write(
                    f"UPDATE attempts SET {_BACK_TO_ISSUED}, reason = ?, again = again + ? WHERE number = ?",
                    (reason, int(stale), number),
                )

    def play_again(self, number: int, sample: int) -> None:
        """A finished attempt of which nothing can be trained waits to be played again."""
        self._write(
            f"UPDATE attempts SET {_BACK_TO_ISSUED}, reason = 'restart' "
            "WHERE number = ? AND sample = ? AND state = 'done'",
            (number, sample),
        )

    def replace(self, number: int, task: str, planned: int, group_id: str) -> None:
        """Another task takes the place of the group's, from the beginning."""
        self._write(
            f"UPDATE attempts SET {_BACK_TO_ISSUED}, task = ?, planned = ?, group_id = ?, reason = 'superseded', again = 0 "
            "WHERE number = ?",
            (task, planned, group_id, number),
        )

    def rewrite(self, number: int, sample: int, payload: bytes, versions: tuple[int, int]) -> None:
        """Exchanges a finished attempt's trajectory for one with other versions."""
        self._write(
            "UPDATE attempts SET payload = ?, min_version = ?, max_version = ? WHERE number = ? AND sample = ? "
            "AND state = 'done'",
            (payload, *versions, number, sample),
        )

    def note_phases(self, phases: Iterable[tuple[str, float, float]]) -> None:
        """Adds (name, begin, end), seconds since 1970, of what the trainer did."""
        with self.transaction():
            self._database.executemany("INSERT INTO phases VALUES (?, ?, ?)", list(phases))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def mark(self, step: int) -> None:
        """Notes how many groups have been issued, and brings all to disk: a checkpoint of the step is about to be written, which
        holds the source's position."""
        with self._explained():
            # Not by fsync on a descriptor of one's own: closing that would release the locks of this process on the file.
            self._database.execute("PRAGMA synchronous = FULL")
            self._write("INSERT OR REPLACE INTO marks VALUES (?, ?)", (step, self.issued()))
            self._database.execute("PRAGMA synchronous = NORMAL")

    def settle(self, checkpoint: int) -> None:
        """The checkpoint of that step is on disk: rows that were claimed up to it are trained, and no payload of theirs, or of
        dropped ones, is needed any more."""
        with self.transaction():
            self._write("UPDATE attempts SET state = 'trained' WHERE state = 'claimed' AND step <= ?", (checkpoint,))
            self._write(
                "UPDATE attempts SET payload = NULL WHERE state IN ('trained', 'dropped') AND step <= ? AND payload IS NOT NULL",
                (checkpoint,),
            )

    def recover(self, checkpoint: int) -> bool:
        """Takes everything back to where the checkpoint of that step was written, 0 for a run's beginning: attempts that later
        steps took are `done` again, or issued again where their trajectory is gone; so is what was not finished. Groups
        that were issued later stay, for the source to name their tasks again.

        Returns False where the journal does not know that checkpoint: it is empty then."""
        known = checkpoint == 0 or self._value("SELECT COUNT(*) FROM marks WHERE step = ?", checkpoint) == 1
        with self.transaction():
            if not known:
                self._write("DELETE FROM attempts")
            self.settle(checkpoint)
            later = "state IN ('claimed', 'trained', 'dropped') AND step > ?"
            kept = f"UPDATE attempts SET state = 'done', step = NULL, reason = NULL WHERE {later} AND payload IS NOT NULL"
            self._write(kept, (checkpoint,))
            self._write(f"UPDATE attempts SET {_BACK_TO_ISSUED}, reason = 'restart' WHERE {later}", (checkpoint,))
            self._write(f"UPDATE attempts SET {_BACK_TO_ISSUED}, reason = 'restart' WHERE state = 'running'")
            self._write("DELETE FROM marks WHERE step > ?", (checkpoint,))
        return known

    def forget_from(self, number: int) -> None:
        """Removes the groups from that number on."""
        self._write("DELETE FROM attempts WHERE number >= ?", (number,))

    # --- what there is ------------------------------------------------------------------------------------------------

    def issued(self, checkpoint: int | None = None) -> int:
        """How many groups have been issued; by the time of a checkpoint, where its step is given."""
        if checkpoint is not None:
            return int(self._value("SELECT COALESCE(MAX(issued), 0) FROM marks WHERE step = ?", checkpoint))
        return int(self._value("SELECT COALESCE(MAX(number) + 1, 0) FROM attempts"))

    def open_groups(self) -> list[GroupAge]:
        """The groups that no step has taken, in the order of their numbers."""
        rows = self._rows(
            "SELECT number, MIN(min_version), SUM(state = 'done') = COUNT(*), MAX(again) FROM attempts "
            f"WHERE {OPEN} GROUP BY number ORDER BY number"
        )
        return [GroupAge(number, oldest, bool(ended), again) for number, oldest, ended, again in rows]

    def waiting_for_the_last(self) -> list[int]:
        """The groups with something to train on whose other attempts have all begun and not ended."""
        rows = self._rows(
            f"SELECT number FROM attempts WHERE {OPEN} GROUP BY number HAVING SUM(state = 'issued') = 0 AND "
            "SUM(state = 'done' AND min_version IS NOT NULL) > 0 AND SUM(state = 'running') > 0 "
            "ORDER BY number"
        )
        return [row[0] for row in rows]

    def claimed(self, step: int) -> int:
        """How many groups the step has claimed."""
        return int(self._value("SELECT COUNT(DISTINCT number) FROM attempts WHERE state = 'claimed' AND step = ?", step))

    def waiting(self, number: int) -> list[IssuedAttempt]:
        """The attempts of a group that are issued and not running."""
        columns = "number, sample, attempt, task, group_id"
        rows = self._rows(f"SELECT {columns} FROM attempts WHERE number = ? AND state = 'issued' ORDER BY sample", number)
        return [IssuedAttempt(*row) for row in rows]

    def tasks(self, start: int) -> list[tuple[int, str]]:
        """(number, task's id) of the groups from number `start` on."""
        return self._rows("SELECT number, task FROM attempts WHERE number >= ? GROUP BY number ORDER BY number", start)

    def group(self, number: int) -> tuple[str, int, str]:
        """(task's id, step it was issued for, id) of a group."""
        rows = self._rows("SELECT task, planned, group_id FROM attempts WHERE number = ? LIMIT 1", number)
        return rows[0]

    def repeated(self, planned: int, task: str) -> int:
        """How many groups of that task have been issued for a step."""
        return int(self._value("SELECT COUNT(DISTINCT number) FROM attempts WHERE planned = ? AND task = ?", planned, task))

    def payloads(self, number: int) -> list[bytes]:
        """The trajectories of a group, in the order of its attempts; of one that was closed short, those that it has."""
        wanted = "SELECT payload FROM attempts WHERE number = ? AND payload IS NOT NULL ORDER BY sample"
        return [row[0] for row in self._rows(wanted, number)]

    def finished(self) -> list[tuple[int, int, int | None]]:
        """(number, sample, newest version of its trained tokens) of what is finished and not claimed."""
        columns = "number, sample, max_version"
        return self._rows(f"SELECT {columns} FROM attempts WHERE state = 'done' ORDER BY number, sample")

    def payload(self, number: int, sample: int) -> bytes:
        """The trajectory of a finished attempt."""
        wanted = "SELECT payload FROM attempts WHERE number = ? AND sample = ?"
        return bytes(self._value(wanted, number, sample))

    def counts(self) -> dict[str, int]:
        """Attempts by state, `dropped` by reason; and how often groups became too old, as `again`."""
        rows = self._rows(
            "SELECT CASE state WHEN 'dropped' THEN state || ': ' || reason ELSE state END AS what, COUNT(*) FROM attempts "
            "GROUP BY what"
        )
        again = int(self._value("SELECT COALESCE(SUM(again), 0) FROM attempts WHERE sample = 0"))
        return {**dict(rows), "again": again}

    def staleness(self) -> dict[int, int]:
        """{lag: attempts} of what was trained: versions between the oldest token and the policy in training."""
        rows = self._rows(
            "SELECT step - 1 - min_version AS lag, COUNT(*) FROM attempts WHERE state IN ('claimed', 'trained') "
            "AND min_version IS NOT NULL GROUP BY lag ORDER BY lag"
        )
        return dict(rows)

    def last_steps(self, count: int) -> list[tuple[int, int, int, int, str]]:
        """(step, attempts, oldest version, newest version, state) of the last steps that claimed something."""
        rows = self._rows(
            "SELECT step, COUNT(*), COALESCE(MIN(min_version), -1), COALESCE(MAX(max_version), -1), MIN(state) FROM attempts "
            "WHERE state IN ('claimed', 'trained') GROUP BY step ORDER BY step DESC LIMIT ?",
            count,
        )
        return rows[::-1]

    def phases(self) -> list[tuple[str, float, float]]:
        """What `note_phases` added, in time."""
        return self._rows("SELECT name, begun_s, ended_s FROM phases ORDER BY begun_s")

    def played(self) -> list[tuple[str, int, float, float, int, int, int | None, str]]:
        """(group's id, sample, begin, end, oldest and newest version, step, worker) of the attempts that are over, in time; a
        version of -1 where no token was sampled, no step where none has taken it, "" for the driver itself."""
        return self._rows(
            "SELECT group_id, sample, begun_s, ended_s, COALESCE(min_version, -1), COALESCE(max_version, -1), step, "
            "COALESCE(worker, '') FROM attempts WHERE begun_s IS NOT NULL AND ended_s IS NOT NULL ORDER BY begun_s"
        )

    def losses(self) -> list[tuple[str, int, float, float, str, str]]:
        """(group's id, sample, begin, end, worker, reason) of the attempts that were lost with a worker after they began."""
        columns = "group_id, sample, begun_s, ended_s, worker, reason"
        return self._rows(f"SELECT {columns} FROM losses WHERE begun_s IS NOT NULL ORDER BY begun_s")

    def workers(self) -> list[tuple[str, int, int]]:
        """(worker, attempts that ended there, attempts that were lost with it), without the driver."""
        return self._rows(
            "SELECT worker, SUM(ended), SUM(lost) FROM (SELECT worker, 1 AS ended, 0 AS lost FROM attempts WHERE ended_s NOT "
            "NULL UNION ALL SELECT worker, 0, 1 FROM losses) WHERE worker <> '' GROUP BY worker ORDER BY CAST(worker AS INTEGER)"
        )

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._explained():
            return self._database.execute(query, values).fetchall()

    def _value(self, query: str, *values: Any) -> Any:
        with self._explained():
            return self._database.execute(query, values).fetchone()[0]

    def _write(self, query: str, values: Sequence[Any] = ()) -> int:
        """How many rows changed."""
        with self.transaction():
            return self._database.execute(query, values).rowcount

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(
                f"{self.path}: the journal cannot be read or written ({error}); free some space, or fix what is named, and "
                "continue with --resume."
            ) from error
