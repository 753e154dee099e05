"""Claims about the hint to the kernel: it is no more than that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.ckpt_convert import read_ahead


@pytest.mark.parametrize("size", [0, 4096])
def test_it_opens_files_of_any_size_and_leaves_none_open(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "STEP_BYTES", 1024)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 1 << 16)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, start, length, advice: asked.append((start, length))
    )
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(size))
    before = set(os.listdir("/proc/self/fd"))
    read_ahead._ask(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before
    assert asked == [(start, 1024) for start in range(0, size, 1024) for _ in "ab"]


def test_what_cannot_be_read_is_for_the_conversion_to_say(tmp_path: Path) -> None:
    read_ahead._ask(tmp_path / "absent")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    read_ahead._ask(tmp_path)
