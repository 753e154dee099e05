"""A conversion that is killed, or whose disk lost what it wrote, continues to the same bytes, or is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.writers.directory import WriteOptions, write_directory
from rlflow_tools.ckpt_convert.writers.journal import Journal

from rlflow.errors import ConversionError
from rlflow.storage.files import replace_directory
from rlflow.trainer.base import Trainer
from tests.unit.tools import killed_conversion
from tests.unit.tools.killed_conversion import BLOCK_BYTES
from tools.ckpt_convert.command import main

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
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


@pytest.fixture(scope="module")
def halfway(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`: a conversion that was not interrupted; `out00.partial`: what one left that was killed halfway."""
    place = tmp_path_factory.mktemp("halfway")
    kill(made, place, 0, seed=0)
    return place


@pytest.fixture
def killed(halfway: Path, tmp_path: Path) -> Path:
    """The output of a conversion that was killed halfway: beside it lie `out.partial` and `whole`."""
    shutil.copytree(halfway / "out00.partial", tmp_path / "out.partial")
    shutil.copytree(halfway / "whole", tmp_path / "whole")
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflow_tools.ckpt_convert.writers.output_files.BLOCK_BYTES", BLOCK_BYTES)


def kill(made: Path, place: Path, kills: int, seed: int) -> dict[str, Any]:
    program = [sys.executable, killed_conversion.__file__, made, place, str(kills), str(seed)]
    found = json.loads(
        subprocess.run(program, check=True, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT).stdout
    )
    assert found["calls"] > 100
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {
        file.relative_to(directory).as_posix(): file.read_bytes() for file in directory.rglob("*") if file.is_file()
    }


def kill_and_resume(made: Path, place: Path, kills: int, seed: int) -> None:
    for number, call in enumerate(kill(made, place, kills, seed)["killed_at"]):
        out = place / f"out{number:02}"
        left = {path.name for path in place.glob(f"out{number:02}*")}
        assert left <= {f"out{number:02}.partial"} or left == {out.name}, f"killed in call {call}: {left}"
        if out.exists():
            (out / "conversion.journal").unlink(missing_ok=True)  # killed just before it would have removed it
        else:
            to_huggingface(made / "step", out, made / "hf", RESUME)
        assert contents(out) == contents(place / "whole"), f"killed in call {call}"
        assert not out.with_name(out.name + ".partial").exists()


def test_killed_conversion_continues_to_the_same_bytes(made: Path, tmp_path: Path) -> None:
    kill_and_resume(made, tmp_path, 3, seed=0)


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_continues_to_the_same_bytes(made: Path, tmp_path: Path) -> None:
    kill_and_resume(made, tmp_path, 20, seed=1)


def test_resuming_copies_only_what_is_not_there(made: Path, killed: Path) -> None:
    noted = (killed.with_name("out.partial") / "conversion.journal").read_text().count("\n") - 1
    calls: list[int] = []
    to_huggingface(made / "step", killed, made / "hf", RESUME, lambda count, total: calls.append(count))
    weights = sum(file.stat().st_size for file in killed.glob("*.safetensors")) - headers(killed)
    assert noted > 20 and sum(calls) == weights
    assert calls[0] > weights // 4, "what was there is reported first"


def headers(out: Path) -> int:
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in out.glob("*.safetensors"))


def test_blocks_that_the_disk_lost_are_copied_again(made: Path, killed: Path) -> None:
    """After a power cut the journal may know of blocks whose bytes never reached the disk."""
    first = sorted(killed.with_name("out.partial").glob("*.safetensors"))[0]
    first.write_bytes(bytes(first.stat().st_size))
    to_huggingface(made / "step", killed, made / "hf", RESUME)
    assert contents(killed) == contents(killed.with_name("whole"))


def test_a_manifest_of_the_killed_conversion_is_not_taken_for_an_output(made: Path, killed: Path) -> None:
    for name in ("manifest.json", "manifest.json.17.42.partial"):
        (killed.with_name("out.partial") / name).write_text("{")
    to_huggingface(made / "step", killed, made / "hf", RESUME)
    assert contents(killed) == contents(killed.with_name("whole"))


def test_another_conversion_is_not_continued(made: Path, killed: Path, tmp_path: Path) -> None:
    partial = killed.with_name("out.partial")
    there = contents(partial)
    with pytest.raises(ConversionError, match=r"is of another conversion \(plan, files differs\)") as caught:
        to_huggingface(made / "step", killed, made / "hf", Options(resume=True, dtype="bf16"))
    assert caught.value.exit_code == 9
    shutil.copytree(made / "step", tmp_path / "step")
    os.utime(next((tmp_path / "step" / "trainer").glob("*.distcp")), ns=(1, 1))
    with pytest.raises(ConversionError, match=r"is of another conversion \(source differs\)"):
        to_huggingface(tmp_path / "step", killed, made / "hf", RESUME)
    assert contents(partial) == there and not killed.exists()
    to_huggingface(tmp_path / "step", killed, made / "hf", Options(shard_bytes=100_000))
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


@pytest.mark.parametrize("options", [Options(), Options(resume=True)])
@pytest.mark.parametrize("linked", [False, True])
def test_a_directory_that_no_conversion_made_is_left_alone(
    made: Path, tmp_path: Path, options: Options, linked: bool
) -> None:
    theirs = tmp_path / ("thesis" if linked else "out.partial")
    theirs.mkdir()
    (theirs / "chapter").write_text("mine")
    if linked:
        (theirs / "conversion.journal").write_text('{"source": 1, "plan": 2, "files": 3}\n')
        (tmp_path / "out.partial").symlink_to(theirs)
    before = contents(theirs)
    with pytest.raises(ConversionError, match="is left alone") as caught:
        to_huggingface(made / "step", tmp_path / "out", made / "hf", options)
    assert caught.value.exit_code == 9 and contents(theirs) == before and not (tmp_path / "out").exists()


def test_another_directory_called_replaced_stays(made: Path, tmp_path: Path) -> None:
    to_huggingface(made / "step", tmp_path / "out", made / "hf")
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "chapter").write_text("mine")
    to_huggingface(made / "step", tmp_path / "out", made / "hf", Options(overwrite=True))
    assert (tmp_path / "out.replaced" / "chapter").read_text() == "mine"


def test_an_output_that_was_finished_meanwhile_is_not_replaced(made: Path, tmp_path: Path) -> None:
    """Another conversion ends, first before this one begins to write, then before this one gets its name."""
    out = tmp_path / "out"

    def other(place: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("theirs")

    with pytest.raises(ConversionError, match="exists") as caught:
        to_huggingface(made / "step", out, made / "hf", Options(check=other))
    assert caught.value.exit_code == 9 and contents(out) == {"config.json": b"theirs"}
    with pytest.raises(ConversionError, match="exists"):
        write_directory(
            out, [], WriteOptions(), key={}, fill=lambda _: None, complete=lambda _: None, unchanged=list, record={}
        )
    assert contents(out) == {"config.json": b"theirs"} and not (tmp_path / "out.partial").exists()


def test_the_lock_lasts_until_the_output_has_its_name(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlflow_tools.ckpt_convert.writers import directory

    refused = []

    def rename(partial: Path, out: Path, **options: Any) -> None:
        with pytest.raises(ConversionError, match="another conversion is writing there") as caught:
            to_huggingface(made / "step", tmp_path / "out", made / "hf", Options(resume=True))
        refused.append(caught.value.exit_code)
        replace_directory(partial, out, **options)

    monkeypatch.setattr(directory, "replace_directory", rename)
    to_huggingface(made / "step", tmp_path / "out", made / "hf")
    assert refused == [9] and "conversion.journal" not in contents(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_an_output_that_was_moved_aside_comes_back(made: Path, tmp_path: Path) -> None:
    """Killed between the two renames of --overwrite, the old output is `.replaced` and the new one still `.partial`."""
    out = tmp_path / "out"
    to_huggingface(made / "step", out, made / "hf")
    out.rename(tmp_path / "out.17.42.replaced")
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
    assert all({"bytes", "crc32", "sha256"} == set(entry) for entry in report["files"].values())
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
