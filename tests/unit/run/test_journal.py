"""The journal: what a row may become, what a restart makes of it, what it refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.errors import DirectoryLostError, StorageError
from rlflow.run.journal import AttemptJournal, IssuedAttempt
from rlflow.run.pacing import GroupAge


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[AttemptJournal]:
    made = AttemptJournal(tmp_path / "journal.sqlite")
    yield made
    made.close()


def finished(journal: AttemptJournal, task: str, versions: tuple[int, int] = (0, 0), samples: int = 1) -> int:
    number = journal.issue(task, 0, f"0:{task}", samples)
    for sample in range(samples):
        journal.begin(number, sample, 1, versions[0])
        assert journal.finish(number, sample, 1, f"{task}/{sample}".encode(), versions)
    return number


def test_an_attempt_goes_from_its_issue_to_the_checkpoint_that_holds_it(journal: AttemptJournal) -> None:
    number = journal.issue("a", 0, "0:a", 2)
    assert journal.waiting(number) == [IssuedAttempt(number, sample, 1, "a", "0:a") for sample in (0, 1)]
    assert journal.open_groups() == [GroupAge(number, None, False)]
    journal.begin(number, 1, 1, 7)
    assert journal.open_groups() == [GroupAge(number, 7, False)]
    assert journal.finish(number, 0, 1, b"first", (7, 8)) and journal.finish(number, 1, 1, b"second", (8, 9))
    assert journal.open_groups() == [GroupAge(number, 7, True)] and journal.payloads(number) == [b"first", b"second"]
    journal.claim([number], 9)
    assert journal.open_groups() == [] and journal.claimed(9) == 1
    journal.settle(8)
    assert journal.counts() == {"claimed": 2, "again": 0}
    journal.settle(9)
    assert journal.counts() == {"trained": 2, "again": 0} and journal.payloads(number) == []
    assert journal.staleness() == {1: 1, 0: 1} and journal.last_steps(3) == [(9, 2, 7, 9, "trained")]


def test_a_second_or_a_late_result_is_refused(journal: AttemptJournal) -> None:
    number = finished(journal, "a")
    assert not journal.finish(number, 0, 1, b"again", (0, 0))
    journal.issue_again([number], "stale", stale=True)
    assert not journal.finish(number, 0, 1, b"late", (0, 0))
    assert journal.finish(number, 0, 2, b"new", (3, 3)) and journal.payloads(number) == [b"new"]
    assert journal.counts()["again"] == 1 and journal.open_groups() == [GroupAge(number, 3, True, again=1)]


def test_a_restart_takes_back_what_came_after_the_checkpoint_and_issues_again_what_was_not_finished(
    journal: AttemptJournal,
) -> None:
    before, after, dropped, done = (finished(journal, task) for task in "abcd")
    running, issued = journal.issue("e", 0, "0:e", 1), journal.issue("f", 0, "0:f", 1)
    journal.begin(running, 0, 1, 0)
    journal.claim([before], 1)
    journal.mark(1)  # a checkpoint of step 1 was written, and the process died before `settle`
    journal.claim([after, dropped], 2)
    journal.drop([dropped], "filtered", 2)
    assert journal.recover(1)
    assert journal.counts() == {"trained": 1, "done": 3, "issued": 2, "again": 0}
    assert journal.payloads(dropped) == [b"c/0"] and journal.payloads(before) == []
    assert [row.attempt for row in journal.waiting(running) + journal.waiting(issued)] == [2, 1]
    assert (
        journal.claimed(2) == 0 and journal.issued(1) == 6 and done in [group.number for group in journal.open_groups()]
    )


def test_taken_back_to_an_older_checkpoint_what_has_no_trajectory_left_is_sampled_again(
    journal: AttemptJournal,
) -> None:
    journal.mark(1)
    number = finished(journal, "a")
    journal.claim([number], 2)
    journal.mark(2)
    journal.settle(2)
    assert journal.recover(1) and journal.waiting(number) == [IssuedAttempt(number, 0, 2, "a", "0:a")]
    assert journal.issued(1) == 0  # the source, taken back as well, names the task once more


def test_a_checkpoint_that_the_journal_does_not_know_leaves_it_empty(journal: AttemptJournal) -> None:
    finished(journal, "a")
    assert not journal.recover(4) and journal.issued() == 0


def test_what_is_written_in_a_transaction_is_there_whole_or_not_at_all(journal: AttemptJournal) -> None:
    with pytest.raises(KeyboardInterrupt), journal.transaction():
        journal.issue("a", 0, "0:a", 1)
        raise KeyboardInterrupt
    assert journal.issued() == 0


def test_nothing_is_committed_once_the_right_to_write_is_lost(tmp_path: Path) -> None:
    lost: list[bool] = []

    def confirm() -> None:
        if lost:
            raise DirectoryLostError("another one has it")

    journal = AttemptJournal(tmp_path / "journal.sqlite", confirm=confirm)
    number = journal.issue("a", 0, "0:a", 1)
    lost.append(True)
    for write in (
        lambda: journal.begin(number, 0, 1, 0),
        lambda: journal.finish(number, 0, 1, b"", (0, 0)),
        lambda: journal.claim([number], 1),
        lambda: journal.issue("b", 0, "0:b", 1),
        lambda: journal.mark(1),
        lambda: journal.settle(1),
        lambda: journal.note_phases([("update", 0.0, 1.0)]),
        lambda: journal.close_short(number, 1),
    ):
        with pytest.raises(DirectoryLostError):
            write()
    assert journal.counts() == {"issued": 1, "again": 0} and journal.phases() == [] and journal.issued(1) == 0
    journal.close()


def test_a_reader_sees_a_run_that_is_being_written(journal: AttemptJournal) -> None:
    finished(journal, "a")
    reader = AttemptJournal(journal.path, read_only=True)
    assert reader.counts() == {"done": 1, "again": 0}
    with pytest.raises(StorageError, match=r"journal\.sqlite"):
        reader.issue("b", 0, "0:b", 1)
    reader.close()


def test_payloads_that_no_step_needs_give_their_space_to_others(tmp_path: Path) -> None:
    journal = AttemptJournal(tmp_path / "journal.sqlite")
    sizes = []
    for step in range(1, 41):
        number = journal.issue(f"t{step}", step, f"{step}:t{step}", 1)
        journal.finish(number, 0, 1, bytes(200_000), (step - 1, step - 1))
        journal.claim([number], step)
        journal.settle(step)
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    journal.close()
    assert max(sizes[20:]) <= max(sizes[:20]) + 100_000  # 8 MB have gone through


def test_a_file_that_is_no_journal_or_of_another_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(b"no database at all" * 100)
    with pytest.raises(StorageError, match="noise: the journal cannot be read"):
        AttemptJournal(tmp_path / "noise")
    with sqlite3.connect(tmp_path / "other") as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    with pytest.raises(StorageError, match="format 2, found 9"):
        AttemptJournal(tmp_path / "other")
