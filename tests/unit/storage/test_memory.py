"""Folders in memory end with the processes that made them, however those end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlflow.storage import memory_folders
from rlflow.storage.memory_folders import OwnedFolder, owner_lives, remove_leftovers

OWNER = """
import sys, time
from pathlib import Path
from rlflow.storage.memory_folders import OwnedFolder
folders = [OwnedFolder(name, Path(sys.argv[1])) for name in ("search", "weights")]
(folders[0].path / "inner").mkdir()
(folders[0].path / "inner" / "file").touch()
print("made", flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


def owning(parent: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent), how],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    return process


def test_what_a_killed_process_left_goes_with_the_next_folder_and_what_a_live_one_has_stays(
    tmp_path: Path,
) -> None:
    killed, alive = owning(tmp_path, "wait"), owning(tmp_path, "wait")
    try:
        mine = OwnedFolder("published", tmp_path)
        assert len(list(tmp_path.iterdir())) == 5
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
        assert len(list(tmp_path.iterdir())) == 5
        next_one = OwnedFolder("journal", tmp_path)
        assert sorted(path.name.rpartition("-")[0] for path in tmp_path.iterdir()) == [
            "rlflow-journal", "rlflow-published", "rlflow-search", "rlflow-weights",
        ]  # fmt: skip
        assert all(owner_lives(path) for path in tmp_path.iterdir())
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()
    mine.close()
    mine.close()
    next_one.close()
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_removes_its_own(tmp_path: Path) -> None:
    process = owning(tmp_path, "end")
    process.communicate()
    assert process.returncode == 0 and not list(tmp_path.iterdir())


def test_folders_of_others_and_those_being_made_are_left_alone(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "rlflow-of-the-user").mkdir()  # has no owner file
    being_made = tmp_path / ".rlflow-weights-1"
    being_made.mkdir()
    left = tmp_path / "rlflow-weights-2"
    left.mkdir()
    (left / memory_folders.OWNER).touch()
    monkeypatch.setattr(memory_folders.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    remove_leftovers(tmp_path)
    assert left.exists()
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert not left.exists() and being_made.exists()
    os.utime(being_made, (0, time.time() - 2 * memory_folders.YOUNG_S))
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rlflow-of-the-user"]
