"""A shared directory as a transport: bounded, and not led astray by what others put there."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.swarm.shared_folder import DirectoryTransport


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_messages_reach_every_other_peer_once_and_in_order(tmp_path: Path) -> None:
    one, two, three = (
        DirectoryTransport(name, str(tmp_path / "s")) for name in ("one", "two", "three")
    )
    one.publish([b"1", b"2"])
    two.publish([b"3"])
    assert (
        one.receive() == [b"3"]
        and two.receive() == [b"1", b"2"]
        and three.receive() == [b"1", b"2", b"3"]
    )
    assert one.receive() == two.receive() == three.receive() == []
    one.publish([b"4"])
    assert three.receive() == [b"4"]


def test_own_files_are_bounded_and_old_ones_of_anybody_are_dropped(tmp_path: Path) -> None:
    one, two = (
        DirectoryTransport(name, str(tmp_path), keep=3, max_age_s=100.0) for name in ("one", "two")
    )
    one.publish([b"x%d" % number for number in range(9)])
    assert len(names(tmp_path)) == 3 and two.receive() == [b"x6", b"x7", b"x8"]
    for entry in tmp_path.iterdir():
        os.utime(entry, (time.time() - 200, time.time() - 200))
    assert (
        DirectoryTransport("three", str(tmp_path), max_age_s=100.0).receive() == []
        and names(tmp_path) == []
    )


def test_only_the_newest_are_read(tmp_path: Path) -> None:
    DirectoryTransport("one", str(tmp_path)).publish([b"%d" % number for number in range(9)])
    assert DirectoryTransport("two", str(tmp_path), max_files=2).receive() == [b"7", b"8"]


@pytest.mark.timeout(20)
def test_what_is_no_message_is_left_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    place = tmp_path / "swarm"
    two = DirectoryTransport("two", str(place), max_bytes=10)
    stem = "evil." + "0" * 19
    (place / f"{stem}1.json").symlink_to(secret)
    os.mkfifo(place / f"{stem}2.json")
    (place / f"{stem}3.json").mkdir()
    (place / f"{stem}4.json").write_bytes(b"x" * 11)
    (place / "evil.json").write_bytes(b"other name")
    (place / f"{stem}5.json.1.2.partial").write_bytes(b"half")
    (place / f"{stem}6.json").write_bytes(b"x" * 10)
    assert two.receive() == [b"x" * 10]
    assert two.report() == {"swarm_transport_failures": 0}


def test_a_directory_that_is_lost_is_counted_and_costs_nothing_else(tmp_path: Path) -> None:
    one = DirectoryTransport("one", str(tmp_path / "s"))
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").write_text("a file now")
    one.publish([b"1"])
    assert one.receive() == [] and one.report()["swarm_transport_failures"] >= 2
    with pytest.raises(ConfigError, match="cannot be made"):
        DirectoryTransport("two", str(tmp_path / "s" / "t"))
