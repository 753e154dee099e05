"""What a developer typically adds touches few files, and works: see tests/changes.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changes import CHANGES, copy_with_all, tried
from tests.unit.sources import ROOT

RULES = (
    "test_core_names.py",
    "test_environment_layering.py",
    "test_layering.py",
    "test_order.py::test_no_file_imports_itself_by_way_of_others",
    "test_order.py::test_a_class_name_means_one_thing",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with all changes made."""
    root = tmp_path_factory.mktemp("changed")
    copy_with_all(root)
    return root


@pytest.fixture(scope="module")
def problems(copy: Path) -> dict[str, str]:
    return tried(copy)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_touches_no_more_files_than_its_aim(name: str) -> None:
    touched = CHANGES[name].touched()
    assert 0 < len(touched) <= CHANGES[name].aim, touched


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_change_adds_works(name: str, problems: dict[str, str]) -> None:
    assert not problems[name], problems[name]


@pytest.mark.slow
def test_the_rules_of_the_house_hold_after_the_changes(copy: Path) -> None:
    """So that no table of the tests has to be edited for them either."""
    (copy / "tests" / "unit").mkdir(parents=True)
    for file in ("sources.py", *{rule.partition("::")[0] for rule in RULES}):
        shutil.copy2(ROOT / "tests" / "unit" / file, copy / "tests" / "unit" / file)
    rules = [f"tests/unit/{rule}" for rule in RULES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    run = subprocess.run(
        [*command, f"--rootdir={copy}", *rules],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
