"""Conversions that are killed, or have company: what is under the name OUT is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface

from rlflow.errors import ConversionError
from rlflow.trainer.base import Trainer
from tests.unit.tools import killed_conversion
from tests.unit.tools.spoiled import when_finished
from tools.ckpt_convert.command import main

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference `hf` and a checkpoint `step` of it."""
    root = tmp_path_factory.mktemp("resume")
    model = tiny_model(root / "hf", family="qwen2", tokenizer=True, vocab_size=301)
    trainer = Trainer.from_pretrained(model)
    trainer.save(root / "step" / "trainer", 7)
    trainer.close()
    return root


def contents(directory: Path) -> dict[str, bytes]:
    files = (file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def kill_and_convert(made: Path, place: Path, kills: int, seed: int) -> None:
    program = [sys.executable, killed_conversion.__file__, made, place, str(kills), str(seed)]
    options: Any = {"check": True, "capture_output": True, "text": True}
    done = subprocess.run(program, cwd=ROOT, env=ENVIRONMENT, **options)
    found = json.loads(done.stdout)
    assert found["changes"] > 100
    for number, change in enumerate(found["killed_at"]):
        out = place / f"out{number:02}"
        told = f"killed at change {change}"
        if not out.exists():
            left = [path.name for path in place.glob(f"{out.name}*")]
            assert all(name.endswith(".partial") for name in left), f"{told}: {left}"
            to_huggingface(made / "step", out, made / "hf", Options(shard_bytes=100_000))
        assert contents(out) == contents(place / "whole"), told
        assert list(place.glob(f"{out.name}*")) == [out], told


def test_a_killed_conversion_leaves_nothing_that_looks_whole(made: Path, tmp_path: Path) -> None:
    kill_and_convert(made, tmp_path, 3, seed=0)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(made: Path, tmp_path: Path) -> None:
    kill_and_convert(made, tmp_path, 20, seed=1)


def test_what_a_living_conversion_writes_is_left_alone(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Path] = []

    def meanwhile(place: Path) -> None:
        others.append(place)
        to_huggingface(made / "step", tmp_path / "out", made / "hf")
        assert (place / "config.json").is_file()

    when_finished(monkeypatch, meanwhile)
    with pytest.raises(ConversionError, match="exists") as caught:
        to_huggingface(made / "step", tmp_path / "out", made / "hf")
    assert caught.value.exit_code == 9 and not others[0].exists()
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_a_directory_of_somebody_else_is_left_alone(made: Path, tmp_path: Path) -> None:
    theirs = [tmp_path / "out.partial", tmp_path / "other.17.42.partial"]
    linked = tmp_path / "out.17.43.partial"
    for place in theirs:
        place.mkdir()
        (place / "chapter").write_text("mine")
    linked.symlink_to(theirs[0])
    to_huggingface(made / "step", tmp_path / "out", made / "hf")
    assert (
        all((place / "chapter").read_text() == "mine" for place in theirs) and linked.is_symlink()
    )


def test_another_directory_called_replaced_stays(made: Path, tmp_path: Path) -> None:
    to_huggingface(made / "step", tmp_path / "out", made / "hf")
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "chapter").write_text("mine")
    to_huggingface(made / "step", tmp_path / "out", made / "hf", Options(overwrite=True))
    assert (tmp_path / "out.replaced" / "chapter").read_text() == "mine"


def test_an_output_that_was_finished_meanwhile_is_not_replaced(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another conversion ends, first before this one begins to write, then before this one gets its name."""
    out = tmp_path / "out"

    def other(place: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("theirs")

    when_finished(monkeypatch, other)
    with pytest.raises(ConversionError, match="exists") as caught:
        to_huggingface(made / "step", out, made / "hf")
    assert caught.value.exit_code == 9 and contents(out) == {"config.json": b"theirs"}
    assert list(tmp_path.iterdir()) == [out]


def test_an_output_that_was_moved_aside_comes_back(made: Path, tmp_path: Path) -> None:
    """Killed between the two renames of --overwrite, the old output is `.replaced` and the new one still `.partial`."""
    out = tmp_path / "out"
    to_huggingface(made / "step", out, made / "hf")
    out.rename(tmp_path / "out.17.42.replaced")
    to_huggingface(made / "step", out, made / "hf", Options(overwrite=True))
    assert (out / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_manifest_names_no_path_and_checks_out(made: Path, tmp_path: Path, capsys: Any) -> None:
    call = [
        "to-hf",
        str(made / "step"),
        str(tmp_path / "out"),
        "--hf",
        str(made / "hf"),
        "--json",
        "--verify",
        "full",
    ]
    assert main(call) == 0
    report = json.loads(capsys.readouterr().out)
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(made) not in text and str(tmp_path) not in text
    assert report["source"]["iteration"] == 7 and len(report["source"]["headers"]) == 64
    assert all({"bytes", "xxh3", "sha256"} == set(entry) for entry in report["files"].values())
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
def test_sizes_are_assertions(
    made: Path, tmp_path: Path, capsys: Any, option: str, value: int, code: int
) -> None:
    call = [
        "to-hf",
        str(made / "step"),
        str(tmp_path / "out"),
        "--hf",
        str(made / "hf"),
        "--dry-run",
    ]
    assert main([*call, option, str(value)]) == code
    message = capsys.readouterr().err
    assert message.count("\n") == (1 if code else 0)
