"""Names -> objects, and what a misspelled one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.components import (
    ADVANTAGE,
    CURATOR,
    ENGINE,
    ENVIRONMENT,
    FILTER,
    LOSS,
    TRAINER,
    TRANSFORM,
    Kind,
)
from rlflow.errors import ConfigError, DataError

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
    for kind in (ENVIRONMENT, ENGINE, TRAINER, ADVANTAGE, LOSS, TRANSFORM, FILTER, CURATOR):
        assert all(callable(kind.resolve(name)) for name in kind.names())


def test_groups_of_entry_points_are_the_plurals() -> None:
    assert (ENVIRONMENT.group, LOSS.group) == ("rlflow.environments", "rlflow.losses")


def test_the_search_environment_is_found_by_its_entry_point() -> None:
    assert "search" in ENVIRONMENT.names()
    assert ENVIRONMENT.resolve("search").__name__ == "SearchEnvironment"


def test_a_file_and_a_module_can_be_named(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        ENVIRONMENT.resolve("things:Counter").__name__
        == ENVIRONMENT.resolve(reference).__name__
        == "Counter"
    )
    assert ENVIRONMENT.resolve(reference) is ENVIRONMENT.resolve(reference)


def test_tasks_are_train_and_val_in_every_environment() -> None:
    options = {name: set(ENVIRONMENT.options(name)) for name in ENVIRONMENT.names()}
    assert {"bash", "harbor", "mcp", "mathematics", "program", "search"} <= options.keys()
    others = {"data", "val_data", "folder", "val_folder", "train_data", "validation"}
    assert not {name: found & others for name, found in options.items() if found & others}
    files = {"bash", "harbor", "mcp", "mathematics", "program", "search"}
    assert all({"train", "val"} <= options[name] for name in files)


def test_former_names_are_taken_with_one_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}", "check": "true"}}\n' for n in range(3)))
    former = {"name": "bash", "confinement": "none", "data": str(rows), "val_data": str(rows)}
    with caplog.at_level("WARNING", logger="rlflow"):
        for _ in range(3):
            environment = ENVIRONMENT.build(former, f"environment of {tmp_path}")
    assert [len(environment.tasks(split)) for split in ("train", "val")] == [3, 3]
    notes = [record.message for record in caplog.records]
    assert len(notes) == 2 and "'val_data' is called 'val' now" in notes[1]
    with pytest.raises(ConfigError, match="'data' is what 'train' was called: found both"):
        ENVIRONMENT.check({**former, "train": str(rows)})


def test_what_the_user_writes_wins_over_what_is_offered(reference: str) -> None:
    assert ENVIRONMENT.build(
        {"name": reference, "start": 2, "seed": 5}, seed=9, path="unused"
    ).values == (2, 1, 5)
    assert ENVIRONMENT.build({"name": reference}, start=3, seed=9).values == (3, 1, 9)


def test_a_constructor_with_open_keywords_takes_any(reference: str) -> None:
    assert ENVIRONMENT.build({"name": reference.replace("Counter", "factory"), "x": 1}) == {"x": 1}


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (
            {"start": 1, "stpe": 2},
            "unknown keyword 'stpe'. Did you mean 'step'? It takes: start, step, seed.",
        ),
        ({}, "missing keyword start; it takes: start, step, seed"),
    ],
)
def test_keywords_are_checked_against_the_signature(
    reference: str, component: dict, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ENVIRONMENT.check({"name": reference, **component})
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
        ("a\0b.py:Name", "expected a name, found 'a\\x00b.py:Name'"),
    ],
)
def test_unknown_names_say_what_is_known(name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ENVIRONMENT.resolve(name)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_component_without_a_name_lists_the_names() -> None:
    with pytest.raises(ConfigError, match="expected a name or a mapping with 'name'"):
        ENGINE.build({"max_concurrency": 3})


def test_a_package_missing_inside_the_module_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\nclass A: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs the package 'not_installed_anywhere'"):
        ENVIRONMENT.resolve("needs_more:A")


TYPED = """
from __future__ import annotations
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from rlflow.components import takes
from rlflow.values import Range

if TYPE_CHECKING:
    from nowhere import Unknown

class Typed:
    def __init__(self, rate: float = 0.0, *, count: int | None = None, fast: bool = False, how: Literal["sum", "mean"] = "sum",
                 stops: Sequence[str] = (), share: Annotated[float, Range(0, below=1)] = 0.5, options: Mapping | None = None,
                 file: str | Path | None = None, thing: Unknown = None):
        self.given = dict(vars())

def inner(*, depth: int = 1): ...

@takes(inner)
def outer(batch, scale: float = 1.0, **options):
    return batch, scale, options
"""
BOUND = Kind("thing", call=1)


@pytest.fixture
def typed(tmp_path: Path) -> str:
    (tmp_path / "typed.py").write_text(TYPED)
    return str(tmp_path / "typed.py")


@pytest.mark.parametrize(
    ("keyword", "value", "expected"),
    [
        ("rate", "lots", "things[2].rate: expected a number, found 'lots' (text)."),
        ("rate", float("nan"), "things[2].rate: expected a finite number, found nan (number)."),
        ("rate", True, "things[2].rate: expected a number, found true (true/false)."),
        ("count", 2.5, "things[2].count: expected a whole number or null, found 2.5 (number)."),
        ("fast", 1, "things[2].fast: expected true or false, found 1 (whole number)."),
        (
            "how",
            "men",
            "things[2].how: expected one of sum, mean, found 'men' (text). Did you mean 'mean'?",
        ),
        ("stops", "x", "things[2].stops: expected a list ([a, b]) of text, found 'x' (text)."),
        ("stops", ["x", 1], "things[2].stops[1]: expected text, found 1 (whole number)."),
        ("share", 1.0, "things[2].share: expected a number from 0 below 1, found 1.0 (number)."),
        (
            "options",
            3,
            "things[2].options: expected a mapping with keys ({name: ...}) or null, found 3 (whole number).",
        ),
    ],
)
def test_values_are_checked_against_the_annotations(
    typed: str, keyword: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        BOUND.check({"name": f"{typed}:Typed", keyword: value}, where="things[2]")
    assert str(caught.value) == expected


def test_a_whole_number_is_a_number_and_what_cannot_be_known_is_not_checked(typed: str) -> None:
    given = BOUND.build(
        {"name": f"{typed}:Typed", "rate": 1, "thing": 5, "file": "a", "stops": ["b"]}
    ).given
    assert given["rate"] == 1.0 and isinstance(given["rate"], float)
    assert (given["thing"], given["file"], given["stops"]) == (5, "a", ["b"])


def test_a_bare_name_is_a_component_without_keywords(typed: str) -> None:
    bare, spelled = (
        BOUND.build(f"{typed}:Typed").given,
        BOUND.build({"name": f"{typed}:Typed"}).given,
    )
    assert {**bare, "self": None} == {**spelled, "self": None}


def test_a_function_of_a_kind_that_is_called_later_is_bound_to_its_keywords(typed: str) -> None:
    assert BOUND.build({"name": f"{typed}:outer", "scale": 2, "depth": 3})("batch") == (
        "batch",
        2.0,
        {"depth": 3},
    )
    with pytest.raises(ConfigError, match=r"unknown keyword 'batch'. It takes: scale, depth"):
        BOUND.build({"name": f"{typed}:outer", "batch": 2})
    with pytest.raises(ConfigError, match=r"thing.depth: expected a whole number"):
        BOUND.build({"name": f"{typed}:outer", "depth": "deep"})


def test_what_the_caller_fills_is_no_keyword_of_a_configuration(reference: str) -> None:
    kind = Kind("thing", reserved=("start",))
    assert kind.build({"name": reference, "step": 2}, start=1).values == (1, 2, None)
    with pytest.raises(ConfigError, match=r"unknown keyword 'start'. It takes: step, seed"):
        kind.build({"name": reference, "start": 2}, start=1)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("KeyError('size')", "KeyError"),
        ("SystemExit('no')", "SystemExit"),
        ("OSError(2, 'gone')", "gone"),
    ],
)
def test_what_a_constructor_raises_is_one_line_with_its_place(
    raised: str, said: str, tmp_path: Path
) -> None:
    """All but errors of rlflow's own, which say what is wrong already."""
    (tmp_path / "raising.py").write_text(
        f"class Thing:\n    def __init__(self):\n        raise {raised}\n"
    )
    with pytest.raises(ConfigError, match=r"^environment '.*Thing': cannot be made: ") as caught:
        ENVIRONMENT.build(f"{tmp_path}/raising.py:Thing")
    assert (
        said in str(caught.value)
        and "raising.py:3" in str(caught.value)
        and "\n" not in str(caught.value)
    )
    (tmp_path / "own.py").write_text(
        "from rlflow.errors import DataError\ndef make():\n    raise DataError('no rows')\n"
    )
    with pytest.raises(DataError, match=r"^no rows$"):
        ENVIRONMENT.build(f"{tmp_path}/own.py:make")


SHORT = """
class Game:
    shorthand = "world"

    def __init__(self, world, level=1):
        self.values = (world, level)

def plain(world):
    return world

BUILT_IN = {"game": f"{__name__}:Game", "plain": f"{__name__}:plain"}
"""


def test_a_name_with_a_value_gives_the_keyword_that_the_class_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short_games.py").write_text(SHORT)
    monkeypatch.syspath_prepend(tmp_path)
    kind = Kind("game", "short_games")
    assert kind.build("game:http://localhost:8000/a").values == ("http://localhost:8000/a", 1)
    assert kind.build({"name": "game:Some-v0", "level": 3}).values == ("Some-v0", 3)
    assert kind.options("game:Some-v0") == ["world", "level"]
    assert kind.resolve("short_games:plain")(world=2) == 2  # a module of the same form is still one
    with pytest.raises(ConfigError, match="'game:a' gives 'world', which stands there too"):
        kind.build({"name": "game:a", "world": "b"})
    for name in ("plain:a-b", "game:", "nothing:a-b"):
        with pytest.raises(ConfigError, match=r"expected package.module:Name or file.py:Name"):
            kind.build(name)
