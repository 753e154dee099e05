"""Files and directories appear whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlflow.errors import CheckpointError
from rlflow.storage.files import (
    clear_partials,
    partial_path,
    read_json,
    remove_directory,
    replacing,
    replacing_directory,
    restore_replaced,
    write_json,
    write_text,
)

KILLED = """
import os, signal, sys
from pathlib import Path
from rlflow.storage.files import replacing, replacing_directory
with globals()[sys.argv[2]](Path(sys.argv[1])) as aside:
    (aside / "half" if aside.is_dir() else aside).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("durable", [True, False])
def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "file"
    write_text(path, "old\r\n", durable=durable)
    with pytest.raises(RuntimeError, match="disk"), replacing(path, durable=durable) as aside:
        aside.write_text("half")
        assert path.read_bytes() == b"old\r\n"
        raise RuntimeError("disk")
    assert path.read_bytes() == b"old\r\n" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("function", ["replacing", "replacing_directory"])
def test_a_kill_while_writing_leaves_the_old_content_and_what_can_be_cleared(
    tmp_path: Path, function: str
) -> None:
    path = tmp_path / "content"
    with globals()[function](path) as aside:
        (aside / "old" if aside.is_dir() else aside).write_text("old")
    process = subprocess.run([sys.executable, "-c", KILLED, str(path), function], check=False)
    assert process.returncode == -signal.SIGKILL
    assert (path / "old" if path.is_dir() else path).read_text() == "old" and len(
        names(tmp_path)
    ) == 2
    for name in ("resumed", "v1.5.index.3fa1"):  # of someone who continues it: stays
        partial_path(tmp_path / name).mkdir()
    clear_partials(tmp_path)
    assert names(tmp_path) == ["content", "resumed.partial", "v1.5.index.3fa1.partial"]


def test_what_a_living_process_fills_is_not_cleared(tmp_path: Path) -> None:
    """As a run's next save does beside an evaluation that converts one of its checkpoints."""
    with replacing_directory(tmp_path / "content") as aside:
        (aside / "new").write_text("")
        clear_partials(tmp_path)
    assert names(tmp_path / "content") == ["new"]


def test_threads_that_write_one_file_never_mix(tmp_path: Path) -> None:
    contents = [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda text: write_text(tmp_path / "file", text, durable=False), contents * 4)
        )
    assert (tmp_path / "file").read_text() in contents and names(tmp_path) == ["file"]


def test_the_current_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with replacing_directory(".") as aside:
        (aside / "new").write_text("new")
    assert names(tmp_path) == ["here"] and names(tmp_path / "here") == ["new"]


def test_a_directory_takes_the_place_of_another_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for name in ("old", "new"):
        with replacing_directory(path) as aside:
            (aside / name).write_text(name)
    assert names(path) == ["new"] and names(tmp_path) == ["folder"]
    with pytest.raises(RuntimeError), replacing_directory(path) as aside:
        raise RuntimeError
    assert names(path) == ["new"] and names(tmp_path) == ["folder"]


def test_of_two_processes_that_make_the_same_directory_the_first_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "world"
    with replacing_directory(path, keep_existing=True) as aside:
        (aside / "mine").write_text("")
        path.mkdir()
        (path / "theirs").write_text("")
    assert names(path) == ["theirs"] and names(tmp_path) == ["world"]


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_while_replacing_a_directory_loses_nothing(tmp_path: Path, renames: int) -> None:
    path, new = tmp_path / "folder", tmp_path / "folder.1.2.partial"
    path.mkdir()
    (path / "old").write_text("")
    new.mkdir()
    os.replace(path, tmp_path / "folder.1.2.replaced")
    if renames == 2:
        os.replace(new, path)
    restore_replaced(path)
    assert names(path) == (["old"] if renames == 1 else [])
    clear_partials(tmp_path)
    assert names(tmp_path) == ["folder"]


def test_removing_begins_with_a_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        remove_directory(tmp_path / "folder")
    assert len(names(tmp_path)) == 1 and names(tmp_path) != ["folder"]
    clear_partials(tmp_path)
    assert names(tmp_path) == []


def test_what_somebody_else_named_so_and_what_links_lead_to_stay(tmp_path: Path) -> None:
    path, theirs = tmp_path / "folder", tmp_path / "theirs"
    for place in (theirs, tmp_path / "folder.replaced", tmp_path / "folder.partial"):
        place.mkdir()
        (place / "thesis").write_text("mine")
    (tmp_path / "folder.3.4.replaced").symlink_to(theirs)
    for link in (path, tmp_path / "folder.3.4.partial"):
        link.symlink_to(theirs)
    for name in ("old", "new"):
        with replacing_directory(path) as aside:
            (aside / name).write_text(name)
    assert names(path) == ["new"] and not path.is_symlink()
    remove_directory(path)
    clear_partials(tmp_path)
    for place in (theirs, tmp_path / "folder.replaced", tmp_path / "folder.partial"):
        assert (place / "thesis").read_text() == "mine"


def test_a_rename_that_fails_puts_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "folder", os.replace
    with replacing_directory(path) as aside:
        (aside / "old").write_text("")

    def refuse(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError), replacing_directory(path):
        pass
    assert names(path) == ["old"] and names(tmp_path) == ["folder"]


def test_json_has_null_for_what_is_not_finite_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.json"
    write_json(path, {"loss": float("nan"), "steps": (1, 2)})
    assert read_json(path) == {"loss": None, "steps": [1, 2]}
    path.write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        read_json(path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_json(tmp_path / "none")
