"""Names -> objects, and what a misspelled one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.components import BUILTIN, build, check_component, names, resolve
from rlflow.errors import ConfigError

SOURCE = """
class Counter:
    def __init__(self, start, *, step=1, seed=None):
        self.values = (start, step, seed)

def factory(**anything):
    return anything
"""


@pytest.fixture
def reference(tmp_path: Path) -> str:
    (tmp_path / "things.py").write_text(SOURCE)
    return f"{tmp_path / 'things.py'}:Counter"


def test_every_builtin_name_resolves() -> None:
    for kind, table in BUILTIN.items():
        for name in table:
            assert callable(resolve(kind, name))


def test_the_search_environment_is_found_by_its_entry_point() -> None:
    assert "search" in names("environment")
    assert resolve("environment", "search").__name__ == "SearchEnvironment"


def test_a_file_and_a_module_can_be_named(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("environment", "things:Counter").__name__ == resolve("environment", reference).__name__ == "Counter"
    assert resolve("environment", reference) is resolve("environment", reference)


def test_what_the_user_writes_wins_over_what_is_offered(reference: str) -> None:
    assert build("environment", {"name": reference, "start": 2, "seed": 5}, seed=9, path="unused").values == (2, 1, 5)
    assert build("environment", {"name": reference}, start=3, seed=9).values == (3, 1, 9)


def test_a_constructor_with_open_keywords_takes_any(reference: str) -> None:
    assert build("environment", {"name": reference.replace("Counter", "factory"), "x": 1}) == {"x": 1}


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        ({"start": 1, "stpe": 2}, "unknown keyword 'stpe'. Did you mean 'step'? It takes: start, step, seed."),
        ({}, "missing keyword start; it takes: start, step, seed"),
    ],
)
def test_keywords_are_checked_against_the_signature(reference: str, component: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_component("environment", {"name": reference, **component})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("serach", "unknown name 'serach'. Did you mean 'search'?"),
        ("no_such_package.module:Name", "no module 'no_such_package'"),
        ("json:JSONDecodr", "json has no 'JSONDecodr'. Did you mean 'JSONDecoder'?"),
        ("nowhere.py:Name", "no such file"),
        (":Name", "expected package.module:Name"),
        ("", "expected a name"),
    ],
)
def test_unknown_names_say_what_is_known(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("environment", name)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_component_without_a_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match="expected a mapping with 'name'"):
        build("engine", {"max_concurrency": 3})


def test_a_package_missing_inside_the_module_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\nclass A: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs the package 'not_installed_anywhere'"):
        resolve("environment", "needs_more:A")
