"""Weights over TCP: whole and as deltas, to many readers, past peers that are slow, cut off, hostile or damaged."""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlflow.components import WEIGHT_TRANSFER
from rlflow.errors import ConfigError, RolloutError
from rlflow.rollout.frames import FrameError
from rlflow.rollout.transfer import tcp_reader
from rlflow.rollout.transfer.base import WeightReader
from rlflow.rollout.transfer.connection import Connection, host_and_port
from rlflow.rollout.transfer.readers import open_reader
from rlflow.rollout.transfer.signed_tcp import MOST_CONNECTIONS, MOST_REQUEST_BYTES, MOST_UNPROVEN, TcpPublisher
from tests.unit.rollout.transfer.pairs import Pairs, assert_same, made, trained

Make = Callable[..., TcpPublisher]
MIB = 2**20


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    publishers: list[TcpPublisher] = []

    def publish_at(**options: object) -> TcpPublisher:
        values = {"directory": str(tmp_path / "memory"), "timeout_s": 5.0, "part_mib": 1, **options}
        publishers.append(WEIGHT_TRANSFER.build({"name": "tcp", **values}))
        return publishers[-1]

    yield publish_at
    for publisher in publishers:
        publisher.close()


def reader_of(publisher: TcpPublisher, **options: float) -> WeightReader:
    return open_reader(publisher.address, publisher.key, **options)


def test_every_bit_arrives_whatever_the_streams_and_the_sizes(make: Make) -> None:
    for streams in (1, 3):
        publisher = make(streams=streams)
        reader = reader_of(publisher)
        assert reader.newest() is None
        for version, size in ((1, 3000), (2, 300_000), (3, 1)):
            published = publisher.publish(made(version, size), version)
            before = reader.bytes_read
            assert_same(reader.read(), made(version, size))
            assert reader.version == reader.newest() == version and reader.bytes_read - before == published.bytes


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of memory that readers have taken; a bucket is 3 MiB."""
    sizes: list[int] = []
    taking = mmap.mmap

    def take(descriptor: int, size: int, *options: int, **flags: int) -> mmap.mmap:
        if descriptor == -1:
            sizes.append(size)
        return taking(descriptor, size, *options, **flags)

    monkeypatch.setattr(tcp_reader.mmap, "mmap", take)
    monkeypatch.setattr(tcp_reader, "BUCKET_BYTES", 3 * MIB)
    return sizes


@pytest.mark.parametrize("delta", [False, True])
def test_a_reader_takes_a_bucket_and_a_tensor_and_uses_them_again(make: Make, mapped: list[int], delta: bool) -> None:
    publisher = make(delta=delta)
    reader = reader_of(publisher)
    for version in (1, 2, 3):
        tensors: Pairs = [(str(number), torch.full((2**18,), float(number))) for number in range(10)]
        tensors[version][1][5] = -1.0
        publisher.publish(tensors, version)
        for (_, found), (_, expected) in zip(reader.read(), tensors, strict=True):
            assert torch.equal(found, expected)
            found.zero_()  # it is the reader's own
    assert 1 <= len(mapped) <= 5


def test_tensors_that_are_kept_keep_their_memory(make: Make, mapped: list[int]) -> None:
    publisher = make()
    reader = reader_of(publisher)
    kept = {}
    for version in (1, 2):
        tensors: Pairs = [(str(number), torch.full((2**18,), 10.0 * version + number)) for number in range(6)]
        publisher.publish(tensors, version)
        kept[version] = [tensor.view(2, -1)[1] for _, tensor in reader.read()]  # parts of them hold them too
    reader.close()
    for version, halves in kept.items():
        for number, half in enumerate(halves):
            assert torch.equal(half, torch.full((2**17,), 10.0 * version + number))


def test_spare_memory_is_bounded_where_all_sizes_differ(make: Make, mapped: list[int]) -> None:
    publisher = make()
    tensors: Pairs = [(str(number), torch.zeros(2**16 + 1000 * number)) for number in range(40)]
    largest = max(tensor.nbytes for _, tensor in tensors)
    publisher.publish(tensors, 1)
    reader = reader_of(publisher)
    for _ in reader.read():
        spare = reader._memory._spare  # type: ignore[attr-defined]
        assert sum(size * len(free) for size, free in spare.items()) <= 3 * MIB + 3 * largest
    assert sum(mapped) == sum(tensor.nbytes for _, tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deltas_are_exact_and_small_and_every_third_version_comes_whole(make: Make, dtype: torch.dtype) -> None:
    publisher = make(delta=True, full_every=3)
    reader = reader_of(publisher)
    modes = []
    for version in range(1, 8):
        published = publisher.publish(trained(version, dtype=dtype), version)
        before = reader.bytes_read
        assert_same(reader.read(), trained(version, dtype=dtype))
        taken = reader.bytes_read - before
        assert taken == published.bytes or taken * 20 < published.bytes
        modes.append(taken == published.bytes)
        assert reader.delta is not modes[-1]
    assert modes == [True, False, True, False, False, True, False]


def test_a_reader_that_missed_versions_catches_up_by_several_deltas_and_a_stranger_comes_whole(make: Make) -> None:
    publisher = make(delta=True)
    ahead, behind = reader_of(publisher), reader_of(publisher)
    for version in (1, 2, 3, 4):
        published = publisher.publish(trained(version), version)
        assert_same(ahead.read(), trained(version))
        if version == 1:
            assert_same(behind.read(), trained(1))
    before = behind.bytes_read
    assert_same(behind.read(), trained(4))
    assert 0 < behind.bytes_read - before < published.bytes / 5
    assert_same(reader_of(publisher).read(), trained(4))


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_too_many_changes_come_whole_and_none_cost_sixteen_bytes(make: Make, share: float) -> None:
    publisher = make(delta=True)
    reader = reader_of(publisher)
    for version in (1, 2):
        published = publisher.publish(trained(version, share), version)
        before = reader.bytes_read
        assert_same(reader.read(), trained(version, share))
    assert reader.bytes_read - before == (published.bytes if share else 0)


def test_other_shapes_come_whole(make: Make) -> None:
    publisher = make(delta=True)
    reader = reader_of(publisher)
    for version, size in ((1, 100), (2, 100), (3, 200)):
        publisher.publish(made(version, size), version)
        assert_same(reader.read(), made(version, size))


def test_a_damaged_or_given_up_copy_is_noticed_and_read_whole(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    publisher = make(delta=True)
    reader = reader_of(publisher)
    publisher.publish(trained(1), 1)
    for _, tensor in reader.read():
        tensor.zero_()  # what is handed on is not the copy
    publisher.publish(trained(2), 2)
    before = reader.bytes_read
    reader._copy[-1] ^= 1  # type: ignore[attr-defined]
    assert_same(reader.read(), trained(2))
    assert "the version is read whole" in caplog.text and reader.bytes_read - before > 200_000
    next(publisher_reading := reader.read())
    publisher_reading.close()  # type: ignore[attr-defined]
    publisher.publish(trained(3), 3)
    assert_same(reader.read(), trained(3))


def test_several_readers_at_once_each_on_a_version_of_its_own(make: Make) -> None:
    publisher = make(delta=True)
    publisher.publish(trained(1), 1)
    publisher.publish(trained(2), 2)
    readers = [reader_of(publisher) for _ in range(6)]

    def take(number: int) -> None:
        assert_same(readers[number].read(1 + number % 2), trained(1 + number % 2))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(take, range(6)))
        publisher.publish(trained(3), 3)
        list(pool.map(lambda reader: assert_same(reader.read(), trained(3)), readers))


def test_slow_readers_hold_nobody_up_and_who_is_far_behind_is_cut_off(make: Make) -> None:
    publisher = make(readers_s=5.0)
    large: Pairs = [
        (str(number), torch.full((2**22,), float(number))) for number in range(8)
    ]  # more than the sockets hold
    publisher.publish(large, 0)
    slow = [reader_of(publisher).read()]
    first = next(slow[0])
    publisher.publish(made(1), 1)
    publisher.publish(made(2), 2)
    publisher.publish(made(3), 3)
    assert_same([first, *slow.pop()], large)  # a version behind those that are offered
    publisher.publish(large, 4)
    slow = [reader_of(publisher).read()]
    next(slow[0])
    for version in range(5, 12):
        publisher.publish(made(version), version)
        slow.append(reader_of(publisher).read())
        next(slow[-1])
        assert len(publisher._store._left) <= 3
    with pytest.raises(RolloutError, match=r"closed the connection|reset|no longer held"):
        list(slow[0])
    assert_same(reader_of(publisher).read(), made(11))


def test_another_key_gets_nothing(make: Make) -> None:
    publisher = make()
    publisher.publish(made(1), 1)
    with pytest.raises(RolloutError, match="with the same key, found: "):
        open_reader(publisher.address, "another key of 16 bytes").read()
    with pytest.raises(RolloutError, match="with the same key, found: "):
        open_reader(publisher.address).newest()


def test_versions_that_are_not_there_are_told_apart(make: Make) -> None:
    publisher = make()
    reader = reader_of(publisher)
    with pytest.raises(RolloutError, match=r"waited .* s for any version to be published"):
        reader.read(timeout_s=0.1)
    for version in (1, 2, 3):
        publisher.publish(made(version), version)
    with pytest.raises(RolloutError, match="version 1 is no longer there, found 2, 3"):
        reader.read(1)
    thread = threading.Timer(0.2, publisher.publish, (made(4), 4))
    thread.start()
    assert_same(reader.read(4, timeout_s=10), made(4))
    thread.join()


class Between:
    """A network between reader and publisher, which changes or stops what comes after some bytes from the publisher."""

    def __init__(self, publisher: TcpPublisher, change: Callable[[bytes, int], bytes | None]) -> None:
        self._to = host_and_port(publisher.address.removeprefix("tcp://"), "")
        self._change = change
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = "tcp://{}:{}".format(*self._server.getsockname())
        self._sockets: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._to)
                self._sockets += [near, far]
                threading.Thread(target=self._carry, args=(near, far, None), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, self._change), daemon=True).start()
        except OSError:
            pass

    @staticmethod
    def _carry(
        source: socket.socket, target: socket.socket, change: Callable[[bytes, int], bytes | None] | None
    ) -> None:
        place = 0
        try:
            while content := source.recv(2**16):
                sent = content if change is None else change(content, place)
                if sent is None:
                    break
                target.sendall(sent)
                place += len(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def flip(content: bytes, place: int) -> bytes:
    """Flips a bit of byte 150,000 of a connection: of a tensor."""
    at = 150_000 - place
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] if 0 <= at < len(content) else content


def test_a_bit_that_flips_on_the_way_is_found_in_a_tensor_and_in_a_delta(make: Make) -> None:
    publisher = make(streams=1, delta=True)
    publisher.publish(trained(1, size=500_000), 1)
    between = Between(publisher, flip)
    with pytest.raises(RolloutError, match=r"part 0 of 'first' of version 1 hashes \(\w+\) to \w+, \w+ was published"):
        list(open_reader(between.address, publisher.key).read())
    reader = reader_of(publisher)
    list(reader.read())
    publisher.publish(trained(2, share=0.05, size=500_000), 2)
    reader._place = host_and_port(between.address.removeprefix("tcp://"), "")  # type: ignore[attr-defined]
    with pytest.raises(RolloutError, match="a delta that hashes to"):
        list(reader.read())
    reader._place = host_and_port(publisher.address.removeprefix("tcp://"), "")  # type: ignore[attr-defined]
    assert_same(reader.read(), trained(2, share=0.05, size=500_000))
    between.close()


@pytest.mark.parametrize("after", [10, 1_000, 150_000])
def test_a_connection_that_is_cut_is_an_error_and_the_next_read_succeeds(make: Make, after: int) -> None:
    publisher = make(delta=True)
    publisher.publish(trained(1), 1)
    between = Between(publisher, lambda content, place: None if place + len(content) > after else content)
    reader = open_reader(between.address, publisher.key)
    with pytest.raises(RolloutError, match=r"weight transfer: tcp://.*(closed the connection|reset)"):
        list(reader.read())
    reader._place = host_and_port(publisher.address.removeprefix("tcp://"), "")  # type: ignore[attr-defined]
    assert_same(reader.read(), trained(1))
    between.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("after", [10, 150_000])
def test_a_publisher_that_falls_silent_is_over_at_the_deadline(make: Make, after: int) -> None:
    publisher = make()
    publisher.publish(trained(1), 1)
    between = Between(publisher, lambda content, place: b"" if place + len(content) > after else content)
    began = time.monotonic()
    with pytest.raises(RolloutError, match=r"it has not answered for 0\.5 s"):
        list(open_reader(between.address, publisher.key, timeout_s=0.5).read())
    assert time.monotonic() - began < 10
    between.close()


@pytest.mark.timeout(60)
def test_garbage_silence_and_hostile_requests_end_their_connection_and_others_are_served(make: Make) -> None:
    publisher = make(timeout_s=0.5)
    publisher.publish(made(1), 1)
    place = host_and_port(publisher.address.removeprefix("tcp://"), "")
    silent = [socket.create_connection(place, 5) for _ in range(3)]
    loud = socket.create_connection(place, 5)
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    for request in (
        {"op": "shutdown"}, {}, {"op": "find"}, {"op": "find", "version": "x" * 10, "timeout_s": "soon"},
        {"op": "parts", "token": "x", "first": -1, "stream": 0, "of": 0}, [], b"[" * 50_000, b"x" * (MOST_REQUEST_BYTES + 1),
    ):  # fmt: skip
        connection = Connection(socket.create_connection(place, 5), 5)
        connection.call(publisher.key.encode())
        with contextlib.suppress(OSError, FrameError):
            connection.send(request)  # type: ignore[arg-type]
            assert "error" in connection.receive()
        connection.close()
    assert_same(reader_of(publisher).read(), made(1))
    end = time.monotonic() + 10
    while publisher._connections and time.monotonic() < end:
        time.sleep(0.02)
    assert not publisher._connections
    for one in (*silent, loud):
        one.close()


@pytest.mark.timeout(60)
def test_peers_that_are_silent_hold_no_place_that_a_reader_needs(make: Make) -> None:
    """All places of the publisher were theirs for the time of a handshake, again and again."""
    publisher = make(timeout_s=30.0)
    publisher.publish(made(1), 1)
    place = host_and_port(publisher.address.removeprefix("tcp://"), "")
    silent = [socket.create_connection(place, 5) for _ in range(MOST_CONNECTIONS + MOST_UNPROVEN)]
    began = time.monotonic()
    assert_same(reader_of(publisher).read(), made(1))
    assert time.monotonic() - began < 15
    for one in silent:
        one.close()


@pytest.mark.timeout(60)
def test_a_handshake_that_trickles_is_over_at_its_deadline(make: Make) -> None:
    """Each byte came in time, and the deadline of the whole was never read."""
    publisher = make(timeout_s=1.0)
    slow = socket.create_connection(host_and_port(publisher.address.removeprefix("tcp://"), ""), 5)
    slow.recv(32, socket.MSG_WAITALL)
    began = time.monotonic()
    with pytest.raises(OSError):
        for _ in range(50):
            slow.sendall(b"x")
            time.sleep(0.25)
    assert time.monotonic() - began < 10


def test_a_publisher_that_has_ended_is_an_error_at_once(make: Make) -> None:
    publisher = make()
    publisher.publish(made(1), 1)
    reader = reader_of(publisher)
    publisher.close()
    publisher.close()
    with pytest.raises(RolloutError, match=f"weight transfer: {publisher.address}"):
        reader.read()


def test_a_key_file_and_an_address_for_others(make: Make, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sixteen bytes or more\n")
    publisher = make(listen="0.0.0.0:0", host="127.0.0.1", key_file=str(tmp_path / "key"))
    publisher.publish(made(1), 1)
    assert_same(open_reader(publisher.address, "sixteen bytes or more").read(), made(1))


def test_readers_on_other_machines_get_an_address_that_reaches_this_one_and_those_here_shared_memory() -> None:
    with WEIGHT_TRANSFER.build({"name": "auto"}) as publisher:
        assert publisher.address.startswith("shm:")
    for component in ({"name": "auto"}, {"name": "tcp", "delta": True}):
        with WEIGHT_TRANSFER.build(component, host="127.0.0.2") as publisher:
            assert publisher.address.startswith("tcp://127.0.0.2:")
            publisher.publish(made(1), 1)
            assert_same(open_reader(publisher.address, publisher.key).read(), made(1))


@pytest.mark.parametrize(
    ("options", "told"),
    [({"listen": "nowhere"}, "host:port"), ({"listen": "192.0.2.1:9"}, "cannot listen"),
     ({"key_file": "/nowhere"}, "cannot be read"), ({"delta": 3}, "delta"), ({"hash": "md5"}, "hash")],
)  # fmt: skip
def test_mistakes_in_the_options_are_named(make: Make, options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(**options)
