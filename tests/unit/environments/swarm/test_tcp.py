"""TCP between peers: the key, the frames, and those who have neither."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow_environments.swarm.tcp import MOST_UNPROVEN, TcpTransport

KEY = b"sixteen bytes or more"
Join = Callable[..., TcpTransport]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    made: list[TcpTransport] = []

    def joined(*peers: TcpTransport | str, key: bytes = KEY, **options: object) -> TcpTransport:
        file = tmp_path / f"key{len(made)}"
        file.write_bytes(key)
        addresses = [
            peer if isinstance(peer, str) else "{}:{}".format(*peer.address) for peer in peers
        ]
        values = {"listen": "127.0.0.1:0", "timeout_s": 1.0, "max_bytes": 1000, **options}
        made.append(TcpTransport("me", key_file=str(file), peers=addresses, **values))
        return made[-1]

    yield joined
    for transport in made:
        transport.close()


def waited(transport: TcpTransport, count: int = 1) -> list[bytes]:
    """What comes within five seconds, as soon as there are so many."""
    found, end = transport.receive(), time.monotonic() + 5
    while len(found) < count and time.monotonic() < end:
        time.sleep(0.005)
        found += transport.receive()
    return found


def refused(transport: TcpTransport, count: int = 1) -> float:
    """Connections that were refused, waited for."""
    found, end = 0.0, time.monotonic() + 5
    while found < count and time.monotonic() < end:
        time.sleep(0.005)
        found += transport.report()["swarm_connections_refused"]
    return found


def call(transport: TcpTransport, key: bytes = KEY) -> tuple[socket.socket, bytes]:
    """A connection by hand past the handshake; its session key."""
    connection = socket.create_connection(transport.address, 5)
    first, second = connection.recv(32, socket.MSG_WAITALL), b"b" * 32
    connection.sendall(second + hmac.digest(key, b"calling" + first + second, "sha256"))
    return connection, hmac.digest(key, b"session" + first + second, "sha256")


def frame(session: bytes, message: bytes, number: int = 0) -> bytes:
    mac = hmac.digest(session, number.to_bytes(8, "big") + message, "sha256")
    return len(message).to_bytes(4, "big") + mac + message


def test_messages_reach_every_peer_in_order(join: Join) -> None:
    one, two = join(), join()
    three = join(one, two)
    three.publish([b"1", b"2", b"", b"x" * 1000, b"y" * 1001])  # the last one is over the limit
    assert waited(one, 4) == waited(two, 4) == [b"1", b"2", b"", b"x" * 1000]
    three.publish([b"3"])
    assert waited(one) == [b"3"] and three.report()["swarm_transport_failures"] == 0


def test_a_peer_with_another_key_gets_nothing_through_in_either_direction(join: Join) -> None:
    one = join()
    other = join(one, key=b"another key of 16 bytes")
    other.publish([b"1"])
    assert refused(one) == 1 and one.receive() == []


def test_a_caller_sends_nothing_to_who_does_not_have_the_key(join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(5)
        one = join("{}:{}".format(*impostor.getsockname()))
        one.publish([b"private"])
        connection, _ = impostor.accept()
        with connection:
            connection.settimeout(5)
            connection.sendall(b"a" * 32)
            assert len(connection.recv(64, socket.MSG_WAITALL)) == 64
            connection.sendall(b"m" * 32)
            assert connection.recv(1) == b""


def test_frames_that_are_forged_changed_repeated_or_too_large_end_the_connection(
    join: Join,
) -> None:
    one = join()
    for hostile in (
        lambda session: frame(session, b"x", 1)[:-1] + b"y",
        lambda session: frame(b"k" * 32, b"x", 1),
        lambda session: frame(session, b"good"),  # again
        lambda session: frame(session, b"x", 2),
        lambda session: (2**32 - 1).to_bytes(4, "big"),
        lambda session: (1001).to_bytes(4, "big") + b"x" * 2000,
        lambda session: b"\0\0",  # and the end
    ):
        connection, session = call(one)
        with connection:
            connection.sendall(frame(session, b"good"))  # number 0
            assert waited(one) == [b"good"]
            connection.sendall(hostile(session))
            connection.shutdown(socket.SHUT_WR)
            assert refused(one) == 1
    recorded = frame(call(one)[1], b"recorded")
    connection, _ = call(one)
    with connection:
        connection.sendall(recorded)  # of another connection
        assert refused(one) >= 1
    assert one.receive() == []


@pytest.mark.timeout(30)
def test_garbage_and_silence_are_over_at_the_deadline_and_others_are_served_meanwhile(
    join: Join,
) -> None:
    one = join(timeout_s=0.3)
    silent = [socket.create_connection(one.address, 5) for _ in range(3)]
    loud = socket.create_connection(one.address, 5)
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    friend = join(one)
    friend.publish([b"1"])
    assert waited(one) == [b"1"]
    assert refused(one, 4) == 4
    for connection in (*silent, loud):
        connection.close()


@pytest.mark.timeout(60)
def test_peers_that_are_silent_hold_no_place_that_another_one_needs(join: Join) -> None:
    one = join(timeout_s=30.0)
    held = [socket.create_connection(one.address, 5) for _ in range(MOST_UNPROVEN + 3)]
    assert refused(one, 3) == 3  # the oldest
    friend = join(one)
    friend.publish([b"1"])
    assert waited(one) == [b"1"]
    for connection in held:
        connection.close()


def test_an_end_beside_silent_peers_is_nothing_to_speak_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    one = TcpTransport("me", "127.0.0.1:0", str(tmp_path / "key"))
    with socket.create_connection(one.address, 5) as silent:
        assert len(silent.recv(32, socket.MSG_WAITALL)) == 32
        one.close()
    assert not caplog.records


def test_a_peer_that_is_gone_costs_no_time_and_gets_the_newest_when_it_is_back(join: Join) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alive = join()
    one = join(alive, f"127.0.0.1:{port}", queue=3)
    began = time.monotonic()
    one.publish([b"1", b"2", b"3", b"4"])
    assert time.monotonic() - began < 0.5
    assert waited(alive, 3) == [b"2", b"3", b"4"]
    end, failures = time.monotonic() + 5, 0.0
    while not failures and time.monotonic() < end:
        failures += one.report()["swarm_transport_failures"]
    assert failures == 1
    back = join(listen=f"127.0.0.1:{port}")
    one.publish([b"5"])
    assert waited(back, 3) == [b"3", b"4", b"5"]


def test_what_is_received_is_bounded(join: Join) -> None:
    one = join(queue=2)
    two = join(one)
    two.publish([b"%d" % number for number in range(9)])
    end = time.monotonic() + 5
    while len(one._inbox) < 2 or one._inbox[-1] != b"8":
        assert time.monotonic() < end
        time.sleep(0.005)
    assert one.receive() == [b"7", b"8"]


@pytest.mark.parametrize(
    "options, words",
    [({"listen": "nowhere"}, "host:port"), ({"peers": ["x:y"]}, "host:port"), ({"key_file": "/nowhere"}, "cannot be read"),
     ({"listen": "192.0.2.1:9"}, "cannot listen")],
)  # fmt: skip
def test_mistakes_in_the_options_are_named(
    options: dict[str, object], words: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    with pytest.raises(ConfigError, match=words):
        TcpTransport(
            "me", **{"listen": "127.0.0.1:0", "key_file": str(tmp_path / "key"), **options}
        )
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="16 bytes or more, found 5"):
        TcpTransport("me", "127.0.0.1:0", str(tmp_path / "key"))
