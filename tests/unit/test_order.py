"""The house stays in order: no import circles, one meaning per class name, docs that list what the code has."""

from __future__ import annotations

import ast
import collections

import pytest

from tests.unit.sources import PACKAGES, ROOT, files, imported_modules, module_name, modules, nodes

SOURCES = (*PACKAGES, "recipes", "benchmarks")


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and for type checkers count: they hide a circle, they do not open it."""
    graph = {name: set(imported_modules(path)) - {name} for name, path in modules().items()}
    free: set[str] = set()
    while True:
        # What imports nothing but free modules is free itself; what never becomes so lies on a circle or leads into one.
        found = {name for name, imports in graph.items() if name not in free and imports <= free}
        if not found:
            break
        free |= found
    stuck = set(graph) - free
    while True:  # peels off what merely leads into a circle
        leading = {
            name for name in stuck if not any(name in graph[other] for other in stuck - {name})
        }
        if not leading:
            break
        stuck -= leading
    assert not stuck, f"circle among {sorted(stuck)}"


def test_a_class_name_means_one_thing() -> None:
    homes = collections.defaultdict(list)
    for path in files(*PACKAGES, "recipes"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    assert not shared, f"one name, one meaning: {shared}"


@pytest.mark.parametrize("folder", PACKAGES)
def test_unit_tests_mirror_the_tree(folder: str) -> None:
    """Every folder of unit tests is named after one of the code, so that a reader finds the tests of a file."""
    tested = {
        "rlflow": "tests/unit",
        "environments": "tests/unit/environments",
        "tools": "tests/unit/tools",
    }[folder]
    others = {"environments", "tools", "recipes", "benchmarks"} if folder == "rlflow" else set()
    names = {
        path.name
        for path in (ROOT / tested).iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert names - others <= {path.name for path in (ROOT / folder).iterdir() if path.is_dir()}


def test_the_architecture_page_draws_every_folder_of_the_core() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = [
        path
        for path in (ROOT / "rlflow").iterdir()
        if path.is_dir() and (path / "__init__.py").exists()
    ]
    missing = [path.name for path in folders if f"{path.name}/" not in page]
    assert not missing, f"docs/architecture.md does not show {missing}"


def test_the_reader_sees_relative_and_lazy_imports() -> None:
    """The circle test is only as good as its reader."""
    lazy = ROOT / "rlflow" / "commands" / "cli.py"
    relative = ROOT / "tools" / "ckpt_convert" / "export_model.py"
    assert any(name.startswith("rlflow.commands.") for name in imported_modules(lazy))
    assert "rlflow_tools.ckpt_convert.stream" in set(imported_modules(relative))
    assert (
        module_name(ROOT / "environments" / "search" / "__init__.py")
        == "rlflow_environments.search"
    )
