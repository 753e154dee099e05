"""Blocks that are written and read past the page cache are the bytes that the file then has, wherever they begin."""

from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from rlflow_tools.ckpt_convert.writers.checksum import FAR, crc32
from rlflow_tools.ckpt_convert.writers.direct import LEAST_BYTES, PAGE, DirectFile, PageBuffer

SIZES = (1, PAGE, LEAST_BYTES - 1, LEAST_BYTES, 3 * LEAST_BYTES + 17, 50 * PAGE + 5)


@pytest.mark.parametrize("without", [False, True], ids=["direct", "cached"])
def test_blocks_that_share_pages_are_written_and_read_back(
    without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without:  # as on a file system that knows no such flag
        plain = os.open

        def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no such flag here")
            return plain(path, flags, mode)

        monkeypatch.setattr(os, "open", refusing)
    draw = random.Random(0)
    content = draw.randbytes(sum(SIZES))
    buffer, file = PageBuffer(max(SIZES)), DirectFile(tmp_path / "file")
    os.posix_fallocate(file.descriptor, 0, len(content))
    starts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    for start, size in draw.sample(list(zip(starts, SIZES)), len(SIZES)):
        data = buffer.at(start, size)
        data[:] = np.frombuffer(content[start : start + size], np.uint8)
        file.write(data.data, start)
    assert (tmp_path / "file").read_bytes() == content
    for start, size in zip(starts, SIZES):
        data = buffer.at(start, size)
        assert file.read(data.data, start) == size and bytes(data) == content[start : start + size]
    assert file.read(buffer.at(len(content) - 5, LEAST_BYTES).data, len(content) - 5) == 5, "the file ends there"
    file.close()


@pytest.mark.parametrize("size", [0, 1, 1000, 2 * FAR - 1, 2 * FAR, 2 * FAR + 1, 500_009])
def test_folded_checksum_is_that_of_zlib(size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert crc32(np.frombuffer(bytearray(content), np.uint8)) == zlib.crc32(content)
