"""Weights through shared memory: all of a version or none of it, whoever is killed, slow or short of room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from rlflow.components import WEIGHT_TRANSFER
from rlflow.errors import ConfigError, RolloutError
from rlflow.rollout.transfer import slots
from rlflow.rollout.transfer.readers import open_reader
from rlflow.rollout.transfer.shared_memory import SharedMemoryPublisher
from tests.unit.rollout.transfer.pairs import assert_same, made

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[SharedMemoryPublisher]:
    with SharedMemoryPublisher(str(tmp_path / "memory"), readers_s=0.3) as one:
        yield one


def test_every_bit_arrives_and_tensors_stay_what_they_were_while_later_versions_come(
    publisher: SharedMemoryPublisher,
) -> None:
    reader = open_reader(publisher.address)
    assert reader.newest() is None
    kept = []
    for version in range(1, 4):
        published = publisher.publish(iter(made(version)), version)
        assert published.version == version == reader.newest()
        kept.append(list(reader.read()))
        assert reader.version == version and reader.bytes_read == version * published.bytes
    for version, pairs in enumerate(kept, start=1):
        assert_same(pairs, made(version))
    kept[2][0][1].zero_()  # private to who reads
    assert_same(reader.read(3), made(3))


def test_the_digest_is_of_the_content_not_of_the_version(publisher: SharedMemoryPublisher) -> None:
    one, two, three = (publisher.publish(made(seed), version) for version, seed in enumerate((5, 5, 6)))
    assert one.digest == two.digest != three.digest


def test_two_versions_are_there_an_older_one_is_told_and_a_later_one_is_waited_for(
    publisher: SharedMemoryPublisher,
) -> None:
    for version in (1, 2, 3):
        publisher.publish(made(version), version)
    reader = open_reader(publisher.address)
    assert_same(reader.read(2), made(2))
    with pytest.raises(RolloutError, match=r"version 1 is no longer there, found 2, 3"):
        reader.read(1)
    with pytest.raises(RolloutError, match=r"waited 0\.1 s for version 4"):
        reader.read(4, timeout_s=0.1)


def test_a_slow_reader_keeps_its_version_and_holds_nobody_up(publisher: SharedMemoryPublisher) -> None:
    publisher.publish(made(1), 1)
    slow = open_reader(publisher.address).read()
    first = next(slow)
    for version in range(2, 8):
        assert publisher.publish(made(version), version).seconds < 0.3
    assert_same([first, *slow], made(1))
    assert_same(open_reader(publisher.address).read(), made(7))


def test_memory_is_bounded_where_readers_never_let_go(publisher: SharedMemoryPublisher) -> None:
    kept = []
    with pytest.raises(RolloutError, match="readers have held 3 earlier versions"):
        for version in range(1, 10):
            publisher.publish(made(version), version)
            kept.append(list(open_reader(publisher.address).read()))
    assert len(kept) == 5
    del kept[1:3]
    publisher.publish(made(6), 6)
    assert_same(kept[0], made(1))
    assert_same(open_reader(publisher.address).read(), made(6))


def test_a_publication_that_breaks_off_leaves_the_version_before(publisher: SharedMemoryPublisher) -> None:
    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield from made(3)[:2]
        raise ValueError("the trainer failed")

    for version in (1, 2):
        publisher.publish(made(version), version)
    with pytest.raises(ValueError, match="the trainer failed"):
        publisher.publish(breaks(), 3)
    with pytest.raises(RolloutError, match="'wide' came twice"):
        publisher.publish([*made(3), made(3)[0]], 3)
    reader = open_reader(publisher.address)
    assert_same(reader.read(), made(2))
    publisher.publish(made(4), 4)
    assert_same(reader.read(), made(4))


def test_a_version_may_be_published_again_and_grow_and_shrink(publisher: SharedMemoryPublisher) -> None:
    reader = open_reader(publisher.address)
    for size in (3000, 20, 400_000, 30, 3000):
        publisher.publish(made(1, size), 1)
        assert_same(reader.read(1), made(1, size))


def test_a_flipped_bit_is_found_and_the_tensor_is_not_handed_on(publisher: SharedMemoryPublisher) -> None:
    publisher.publish(made(1), 1)
    (slot,) = Path(publisher.address.removeprefix("shm:")).glob("*.slot")
    with slot.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(RolloutError, match=r"part 0 of 'wide' of version 1 hashes \(\w+\) to"):
        next(open_reader(publisher.address).read())


PUBLISHER = """
import sys, time
sys.path[:0] = [{root!r}]
from pathlib import Path
from rlflow.rollout.transfer import store
from rlflow.rollout.transfer.shared_memory import SharedMemoryPublisher
from rlflow.rollout.vllm.buckets import Buckets
from tests.unit.rollout.transfer.pairs import made
buckets = Buckets(1, Path({directory!r}))
(buckets._folder / "1.safetensors").write_bytes(b"some")
publisher = SharedMemoryPublisher({directory!r}, elsewhere={elsewhere!r})
publisher.publish(made(1), 1)
folder = store.OwnedFolder("published", Path({elsewhere!r}))
publisher._store._slots_in = folder.path  # as where there is no room
publisher.publish(made(2), 2)
def endless():
    yield from made(3)[:3]
    print(publisher.address, flush=True)
    time.sleep(60)
publisher.publish(endless(), 3)
"""


@pytest.mark.timeout(60)
def test_a_publisher_killed_in_the_middle_tears_nothing_and_its_memory_is_found_by_the_next(tmp_path: Path) -> None:
    places = {"directory": str(tmp_path / "memory"), "elsewhere": str(tmp_path / "disk")}
    program = PUBLISHER.format(root=str(ROOT), **places)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGKILL)
    assert len(list((tmp_path / "memory").iterdir())) == 2 and list((tmp_path / "disk").rglob("*.slot"))
    reader = open_reader(address)
    assert_same(reader.read(), made(2))
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"its publisher has ended; versions that are left: 2"):
        reader.read(3, timeout_s=30)
    assert time.monotonic() - began < 5
    held = list(reader.read())
    with SharedMemoryPublisher(**places) as publisher:
        assert [str(path) for path in (tmp_path / "memory").iterdir()] == [publisher.address.removeprefix("shm:")]
        assert not list((tmp_path / "disk").iterdir())
        assert_same(held, made(2))
        with pytest.raises(RolloutError, match="its publisher has ended"):
            reader.read()
    assert not list((tmp_path / "memory").iterdir())


def test_another_publisher_of_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    with SharedMemoryPublisher(str(tmp_path)) as one, SharedMemoryPublisher(str(tmp_path)) as two:
        for number, publisher in enumerate((one, two)):
            publisher.publish(made(number), 1)
        for number, publisher in enumerate((one, two)):
            assert_same(open_reader(publisher.address).read(), made(number))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders called `small` have room for 100 kB a file."""
    allocate = os.posix_fallocate

    def refuse(descriptor: int, start: int, size: int) -> None:
        if "/small/" in os.readlink(f"/proc/self/fd/{descriptor}") and start + size > 100_000:
            raise OSError(28, "No space left on device")
        allocate(descriptor, start, size)

    monkeypatch.setattr(slots.os, "posix_fallocate", refuse)


@pytest.mark.usefixtures("small")
def test_versions_move_elsewhere_where_memory_is_too_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.rollout.transfer.store.GROWTH_BYTES", 50_000)
    with SharedMemoryPublisher(str(tmp_path / "small"), elsewhere=str(tmp_path / "large")) as publisher:
        reader = open_reader(publisher.address)
        publisher.publish(made(1, 100), 1)
        assert not (tmp_path / "large").exists()
        for version in (2, 3, 4):  # the first one moves while it is written
            publisher.publish(made(version), version)
            assert_same(reader.read(), made(version))
        assert caplog.text.count("is kept in") == 1
    assert not list((tmp_path / "large").iterdir()) and not list((tmp_path / "small").iterdir())


@pytest.mark.usefixtures("small")
def test_no_room_anywhere_is_one_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    with SharedMemoryPublisher(str(tmp_path / "small"), elsewhere=str(tmp_path / "small")) as publisher:
        with pytest.raises(
            RolloutError, match=r"no room for version 1: 64 MiB are needed, \d+ MiB are free in .*--shm-size"
        ):
            publisher.publish(made(1), 1)


def test_a_configuration_names_the_way(tmp_path: Path) -> None:
    with WEIGHT_TRANSFER.build({"name": "shared_memory", "directory": str(tmp_path)}) as publisher:
        assert publisher.address.startswith(f"shm:{tmp_path}")
    with pytest.raises(ConfigError, match="unknown keyword 'part_mb'"):
        WEIGHT_TRANSFER.build({"name": "shared_memory", "part_mb": 3})
    with pytest.raises(RolloutError, match="expected an address"):
        open_reader("http://localhost")
