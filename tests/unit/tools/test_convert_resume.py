"""A conversion that is killed, or whose disk lost what it wrote, continues to the same bytes, or is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_model

from rlflow.errors import ConversionError
from rlflow.trainer import Trainer
from rlflow.weights.convert import Options, to_huggingface
from rlflow.weights.journal import Journal
from tools.ckpt_convert.command import main

RESUME = Options(resume=True, shard_bytes=100_000)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference `hf` and a checkpoint `step` of it."""
    root = tmp_path_factory.mktemp("resume")
    model = tiny_model(root / "hf", family="qwen2", tokenizer=True, vocab_size=301)
    trainer = Trainer.from_pretrained(model)
    trainer.save(root / "step" / "trainer", 7)
    trainer.close()
    return root


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow.weights.sink.BLOCK_BYTES", 4000)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        file.relative_to(directory).as_posix(): file.read_bytes() for file in directory.rglob("*") if file.is_file()
    }


def fail_at(event: int, fatal: bool) -> Callable[[], int]:
    """Counts calls that change the disk; at the one with number `event` half of it is done and the process is killed."""
    seen = 0

    def counting(name: str) -> None:
        real = getattr(os, name)

        def called(*arguments: Any) -> Any:
            nonlocal seen
            seen += 1
            if fatal and seen == event:
                if name in ("write", "pwrite"):
                    half = memoryview(arguments[1]).cast("B")[: len(arguments[1]) // 2]
                    real(arguments[0], half, *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(os, name, called)

    for name in ("write", "pwrite", "fsync", "rename", "posix_fallocate", "unlink", "mkdir"):
        counting(name)
    return lambda: seen


def convert_in_child(made: Path, out: Path, event: int, fatal: bool = True) -> tuple[int, int]:
    """(exit status, calls that change the disk) of a conversion in a forked process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            count = fail_at(event, fatal)
            to_huggingface(made / "step", out, made / "hf", RESUME)
            os.writev(write, [str(count()).encode()])
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as stream:
        return status, int(stream.read() or 0)


def kill_and_resume(made: Path, tmp_path: Path, kills: int, seed: int) -> None:
    truth = tmp_path / "uninterrupted"
    status, events = convert_in_child(made, truth, 0, fatal=False)
    assert status == 0 and events > 100
    draw = random.Random(seed)
    for number in range(kills):
        out = tmp_path / f"out{number}"
        event = draw.randint(1, events)
        status, _ = convert_in_child(made, out, event)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        left = {path.name for path in tmp_path.glob(f"out{number}*")}
        assert left <= {f"out{number}.partial"} or left == {out.name}, f"event {event} of {events}: {left}"
        if not out.exists():
            to_huggingface(made / "step", out, made / "hf", RESUME)
        assert contents(out) == contents(truth), f"event {event} of {events}"
        assert not out.with_name(out.name + ".partial").exists()


def test_killed_conversion_continues_to_the_same_bytes(made: Path, tmp_path: Path) -> None:
    kill_and_resume(made, tmp_path, 3, seed=0)


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_continues_to_the_same_bytes(made: Path, tmp_path: Path) -> None:
    kill_and_resume(made, tmp_path, 20, seed=1)


def half_done(made: Path, out: Path) -> Path:
    """The partial directory of a conversion that was killed halfway."""
    _, events = convert_in_child(made, out.with_name("whole"), 0, fatal=False)
    convert_in_child(made, out, events // 2)
    return out.with_name(out.name + ".partial")


def test_resuming_copies_only_what_is_not_there(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    partial = half_done(made, out)
    lines = (partial / "conversion.journal").read_text().count("\n")
    calls: list[int] = []
    to_huggingface(made / "step", out, made / "hf", RESUME, lambda count, total: calls.append(count))
    assert lines > 20 and calls[0] > 0, "what was there is reported first"
    assert sum(calls) == sum(file.stat().st_size for file in out.glob("*.safetensors")) - headers(out)


def headers(out: Path) -> int:
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in out.glob("*.safetensors"))


def test_blocks_that_the_disk_lost_are_copied_again(made: Path, tmp_path: Path) -> None:
    """After a power cut the journal may know of blocks whose bytes never reached the disk."""
    out = tmp_path / "out"
    partial = half_done(made, out)
    first = sorted(partial.glob("*.safetensors"))[0]
    size = first.stat().st_size
    first.write_bytes(bytes(size))
    to_huggingface(made / "step", out, made / "hf", RESUME)
    assert contents(out) == contents(tmp_path / "whole")


def test_another_conversion_is_not_continued(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made, tmp_path / "made")
    partial = half_done(tmp_path / "made", out)
    there = contents(partial)
    with pytest.raises(ConversionError, match=r"is of another conversion \(plan, files differs\)") as caught:
        to_huggingface(tmp_path / "made" / "step", out, made / "hf", Options(resume=True, dtype="bf16"))
    assert caught.value.exit_code == 9
    shard = next((tmp_path / "made" / "step" / "trainer").glob("*.distcp"))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(ConversionError, match=r"is of another conversion \(source differs\)"):
        to_huggingface(tmp_path / "made" / "step", out, made / "hf", RESUME)
    assert contents(partial) == there and not out.exists()
    to_huggingface(tmp_path / "made" / "step", out, made / "hf", Options(shard_bytes=100_000))
    assert not partial.exists(), "without --resume it begins again"


def test_two_conversions_cannot_write_the_same_output(made: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    other = Journal.open(partial)
    with pytest.raises(ConversionError, match="another conversion is writing there"):
        to_huggingface(made / "step", tmp_path / "out", made / "hf")
    assert partial.is_dir()
    other.close()
    to_huggingface(made / "step", tmp_path / "out", made / "hf")


def test_an_output_that_was_moved_aside_comes_back(made: Path, tmp_path: Path) -> None:
    """Killed between the two renames of --overwrite, the old output is `.replaced` and the new one still `.partial`."""
    out = tmp_path / "out"
    to_huggingface(made / "step", out, made / "hf")
    out.rename(tmp_path / "out.replaced")
    to_huggingface(made / "step", out, made / "hf", Options(resume=True, overwrite=True))
    assert (out / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_manifest_names_no_path_and_checks_out(made: Path, tmp_path: Path, capsys: Any) -> None:
    call = ["to-hf", str(made / "step"), str(tmp_path / "out"), "--hf", str(made / "hf"), "--json", "--verify", "full"]
    assert main(call) == 0
    report = json.loads(capsys.readouterr().out)
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(made) not in text and str(tmp_path) not in text
    assert report["source"]["iteration"] == 7 and len(report["source"]["headers"]) == 64
    assert all({"bytes", "crc32", "sha256"} == set(one) for one in report["files"].values())
    assert main(["verify", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("--tp", 2, 5),
        ("--tp", 1, 0),
        ("--num-layers", 3, 5),
        ("--ep", 2, 5),
        ("--iteration", 8, 5),
        ("--iteration", 7, 0),
    ],
)
def test_sizes_are_assertions(made: Path, tmp_path: Path, capsys: Any, option: str, value: int, code: int) -> None:
    call = ["to-hf", str(made / "step"), str(tmp_path / "out"), "--hf", str(made / "hf"), "--dry-run"]
    assert main([*call, option, str(value)]) == code
    message = capsys.readouterr().err
    assert message.count("\n") == (1 if code else 0)
