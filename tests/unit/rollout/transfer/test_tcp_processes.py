"""Deltas between processes: each reason to send a version whole, and the way back to deltas after it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlflow.rollout.transfer.readers import open_reader
from tests.unit.rollout.transfer.pairs import assert_same, trained

ROOT = Path(__file__).resolve().parents[4]
KEY = "a key of more than 16 bytes"

PUBLISHER = """
import sys
from rlflow.rollout.transfer.signed_tcp import TcpPublisher
from tests.unit.rollout.transfer.pairs import trained
listen, key_file, directory = sys.argv[1:]
with TcpPublisher(listen, key_file=key_file, delta=True, full_every=5, directory=directory, part_mib=1) as publisher:
    print(publisher.address, flush=True)
    for line in sys.stdin:
        print(publisher.publish(trained(int(line)), int(line)).bytes, flush=True)
"""


class PublishingProcess:
    """Publishes `trained(version)` for each version that it is told."""

    def __init__(self, listen: str, folder: Path) -> None:
        (folder / "key").write_text(KEY)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, listen, str(folder / "key"), str(folder / "memory")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.address = self._line()

    def publish(self, version: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def publishing(listen: str, folder: Path) -> Iterator[PublishingProcess]:
    one = PublishingProcess(listen, folder)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


@pytest.mark.timeout(120)
def test_a_version_comes_whole_for_each_of_the_reasons_and_the_next_one_as_a_delta(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with publishing("127.0.0.1:0", tmp_path) as publisher:
        reader = open_reader(publisher.address, KEY)

        def read(version: int) -> str:
            """How the version came, every bit of it compared."""
            size, before = publisher.publish(version), reader.bytes_read
            assert_same(reader.read(version), trained(version))
            taken = reader.bytes_read - before
            if taken == size:
                return "whole"
            return "delta" if taken * 20 < size else "a delta, then the rest"

        ways = [read(version) for version in (1, 2, 3, 4, 5, 6)]
        assert ways == ["whole", "delta", "delta", "delta", "whole", "delta"]  # the first one; every fifth one

        reader._copy[0] ^= 1  # type: ignore[attr-defined]
        with caplog.at_level(logging.WARNING):
            assert read(7) == "a delta, then the rest"
        assert "part 0 of 'first' of version 7 hashes" in caplog.text and "the version is read whole" in caplog.text
        assert read(8) == "delta"

        abandoned = reader.read(8)
        next(abandoned)
        abandoned.close()  # type: ignore[attr-defined]
        assert read(9) == "whole"  # the reader has no base
        for version in range(11, 21):
            publisher.publish(version)
        assert read(21) == "whole"  # its base is older than the deltas that are kept
        assert read(22) == "delta"

        publisher.process.kill()
        publisher.process.wait(10)
        listen = publisher.address.removeprefix("tcp://")
        with publishing(listen, tmp_path) as publisher:
            assert read(23) == "whole"  # a publisher that knows nothing of the base
            assert read(24) == "delta"
            assert len(list((tmp_path / "memory").iterdir())) == 1  # what the killed one left is gone
