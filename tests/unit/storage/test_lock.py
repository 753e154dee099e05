"""One process writes into a run directory: by the kernel's lock, by a lease between machines, by a token before each write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlflow.errors import ConfigError, StorageError
from rlflow.storage import lock
from rlflow.storage.lock import DirectoryLock

ROOT = Path(__file__).resolve().parents[3]
LEASE_S = 0.4


def write_owner(directory: Path, **fields: object) -> Path:
    """A lock file as the process of another machine leaves it."""
    owner = {
        "process": 1,
        "host": "elsewhere",
        "boot": "another kernel",
        "epoch": 4,
        "token": "theirs",
        **fields,
    }
    (directory / "run.lock").write_text(json.dumps(owner))
    return directory / "run.lock"


def test_a_process_of_the_same_number_is_another_one(tmp_path: Path) -> None:
    """Two containers are both process 1; so are two threads here."""
    first = DirectoryLock(tmp_path)
    with pytest.raises(
        ConfigError,
        match=rf"process {os.getpid()} of host .+ is writing to {tmp_path}; wait for it",
    ):
        DirectoryLock(tmp_path)
    first.close()
    second = DirectoryLock(tmp_path)
    assert second.epoch == first.epoch + 1 and second.held()
    second.close()


def test_a_killed_process_of_this_kernel_is_in_nobodys_way(tmp_path: Path) -> None:
    code = (
        "import sys, os; from pathlib import Path; from rlflow.storage.lock import DirectoryLock\n"
    )
    code += "DirectoryLock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert "token" in (tmp_path / "run.lock").read_text()
    start = time.monotonic()
    DirectoryLock(tmp_path).close()
    assert time.monotonic() - start < lock.LEASE_S / 4


def test_the_lease_of_another_machine_is_waited_for_and_a_renewed_one_refused(
    tmp_path: Path,
) -> None:
    path = write_owner(tmp_path)
    start = time.monotonic()
    holder = DirectoryLock(tmp_path, lease_s=LEASE_S)
    assert time.monotonic() - start >= LEASE_S and holder.epoch == 5
    holder.close()
    write_owner(tmp_path)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_S / 8):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="process 1 of host elsewhere is writing to"):
            DirectoryLock(tmp_path, lease_s=LEASE_S)
    finally:
        ended.set()
        thread.join()


def test_a_lease_that_ended_long_ago_is_not_waited_for(tmp_path: Path) -> None:
    os.utime(write_owner(tmp_path), (time.time() - 3600,) * 2)
    start = time.monotonic()
    DirectoryLock(tmp_path).close()
    assert time.monotonic() - start < lock.LEASE_S / 4


def test_a_holder_renews_its_lease(tmp_path: Path) -> None:
    holder = DirectoryLock(tmp_path, lease_s=LEASE_S)
    os.utime(holder.path, (0, 0))
    deadline = time.monotonic() + 20
    while holder.path.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.time() - holder.path.stat().st_mtime < 60
    holder.close()


def test_who_slept_through_its_lease_writes_nothing_more(tmp_path: Path) -> None:
    sleeper = DirectoryLock(tmp_path)
    theirs = write_owner(tmp_path).read_text()
    with pytest.raises(
        StorageError,
        match=r"is written by process 1 of host elsewhere now \(epoch 4, this run has 1\)",
    ):
        sleeper.confirm()
    sleeper.close()
    assert (tmp_path / "run.lock").read_text() == theirs


@pytest.mark.parametrize(
    "content", ["", "4711", "{", "null", '"x"', '{"epoch": []}', "[" * 100_000, "\udcb8\udcff"]
)
def test_what_an_older_version_a_kill_or_a_bad_disk_left_is_nobodys(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "run.lock").write_text(content, encoding="utf-8", errors="surrogateescape")
    holder = DirectoryLock(tmp_path)
    holder.confirm()
    holder.close()


@pytest.mark.parametrize("moved", [True, False])
def test_a_directory_that_is_gone_is_noticed(moved: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    holder = DirectoryLock(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "other") if moved else shutil.rmtree(tmp_path / "run")
    with pytest.raises(
        StorageError, match=r"deleted, moved or unmounted .* Put it back and continue with --resume"
    ):
        holder.confirm()
    holder.close()
    assert not (tmp_path / "run").exists()


def test_a_file_system_without_locks_goes_by_lease_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", without)
    holder = DirectoryLock(tmp_path, lease_s=LEASE_S)
    with pytest.raises(ConfigError, match="is writing to"):
        DirectoryLock(tmp_path, lease_s=LEASE_S)
    holder.confirm()
    holder.close()
