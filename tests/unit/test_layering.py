"""The import rules, read from the syntax tree: imports inside functions and under TYPE_CHECKING count too."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sources import ROOT, nodes
from tests.unit.sources import files as sources

# What each part of the core may import from the core. A part is a module or a folder directly under
# rlflow/, or what is named by its whole path.
BASIS = {"types", "errors", "texts"}
ALGORITHMS = {"algorithms", "algorithms/algorithm", "algorithms/early_scores", "algorithms/teachers",
              "algorithms/trial"}  # fmt: skip
ALLOWED: dict[str, set[str]] = {
    "texts": set(),
    "errors": {"texts"},
    "devices": {"errors"},
    "values": {"errors"},
    "types": {"errors"},
    "components": {"values", "errors"},
    "storage": {"values", "errors", "texts"},
    "models": {"storage", "errors"},
    "environment": {"report", "models", *BASIS},
    "batching": BASIS,
    "net": {"storage", "errors"},
    "algorithms": {"rollout", "components", "values", *BASIS},
    "algorithms/teachers": {"rollout", "trainer", "batching", "models", "net", "values", *BASIS},
    "algorithms/early_scores": {"batching", *BASIS},
    "algorithms/trial": {"algorithms", "batching", "components", *BASIS},
    "algorithms/algorithm": {"algorithms", "algorithms/early_scores", "algorithms/teachers", "config", "trainer",
                             "components", "storage", *BASIS},
    "rollout": {"net", "environment", "models", "devices", "storage", "components", "values", *BASIS},
    "trainer": {"batching", "models", "devices", "storage", "components", "values", *BASIS},
    "config": {"trainer", "storage", "components", "values", "errors"},
    "cluster": {"net", "rollout", "trainer", "report", "components", "devices", "storage", *BASIS},
    # What surrounds the loop; the loop itself; the commands.
    "preflight": {"run", "net", "cluster", "config", "rollout", "trainer", *ALGORITHMS, "environment", "models",
                  "storage", "components", "devices", *BASIS},
    "run": {"preflight", "rollout", "net", "batching", "cluster", "config", "trainer", *ALGORITHMS, "environment",
            "models", "report", "storage", "components", "devices", "values", *BASIS},
    "report": {"run", "rollout", "trainer", "components", "storage", *BASIS},
    "loop": {"run", "config", "rollout", "trainer", *ALGORITHMS, "batching", "report", *BASIS},
    "commands": {"__init__", "loop", "run", "preflight", "cluster", "config", "rollout", "environment", *ALGORITHMS,
                 "batching", "models", "report", "storage", "components", "devices", *BASIS},
    "__main__": {"commands"},
    # under TYPE_CHECKING
    "__init__": {"loop", "report", "run", "config", "rollout", "trainer", "environment", "batching", *BASIS},
}  # fmt: skip

# Heavy or optional packages, and the only places that may import them.
PLACES: dict[str, tuple[str, ...]] = {
    "megatron": ("rlflow/trainer/megatron/", "tools/ckpt_convert/oracle/"),
    "transformer_engine": ("rlflow/trainer/megatron/",),
    "vllm": ("rlflow/rollout/vllm/",),
    "ray": ("rlflow/cluster/",),
    "faiss": ("environments/retrieval/",),
    "qdrant_client": ("environments/retrieval/indices/",),
    "qdrant_edge": ("environments/retrieval/indices/",),
    "bm25s": ("environments/retrieval/indices/",),
    "pyarrow": ("environments/common/",),
    "bs4": ("environments/search/own_documents/",),
    "markdown_it": ("environments/search/own_documents/",),
    "huggingface_hub": ("environments/retrieval/", "recipes/searchr1/", "rlflow/models/"),
    "fastapi": (),
    "uvicorn": (
        "environments/retrieval/server/",
        "environments/endpoint/",
        "environments/common/connections.py",
    ),
    "starlette": ("environments/endpoint/",),
    "openai": ("environments/program/",),
    "aiohttp": ("environments/adapters/", "environments/browser/", "rlflow/net/http.py"),
    "httpx": (),
}
# What else parts of the core may know of a room than the table says: modules that know little themselves.
LEAVES: dict[tuple[str, str], set[str]] = {
    ("environment", "report"): {"metrics"},
    ("cluster", "report"): {"timer"},
    ("algorithms", "rollout"): {"codec"},
    ("report", "run"): {"directory"},
    ("report", "rollout"): {"tokenizer"},
    ("report", "trainer"): {"base"},
}
OUTSIDE_THE_CORE = {
    "rlflow_environments",
    "rlflow_tools",
    "environments",
    "recipes",
    "tools",
    "tests",
    "fixtures",
    "benchmarks",
}


@functools.cache  # a file is parsed once, not once for each of the packages that it is searched for
def imported(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, absolute dotted name) of every import; `from a import b` gives `a.b`."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(
            node.func, "attr", getattr(node.func, "id", "")
        ) in (
            "import_module",
            "__import__",
        ):
            constants = [
                argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
            ]
            yield from ((node.lineno, str(value)) for value in constants)


def part_of(path: Path) -> str:
    return named_part(path.relative_to(ROOT / "rlflow").with_suffix("").parts)


def named_part(parts: tuple[str, ...]) -> str:
    whole = "/".join(parts[:2])
    return whole if whole in ALLOWED else parts[0]


def core_part(name: str) -> str | None:
    """The part of the core that a dotted name lies in; `__init__` for names of the facade; None for other packages."""
    head, *rest = name.split(".")
    if head != "rlflow":
        return None
    part = named_part(tuple(rest)) if rest else "__init__"
    return part if part in ALLOWED else "__init__"


def test_core_imports_follow_the_table() -> None:
    parts = {part_of(path) for path in sources("rlflow")}
    assert parts <= set(ALLOWED), (
        "add it to the table of tests/unit/test_layering.py and docs/architecture.md"
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; may import {sorted(ALLOWED[part]) or 'nothing'} from rlflow"
        for path in sources("rlflow")
        for part in (part_of(path),)
        for line, name in imported(path)
        if (target := core_part(name)) is not None
        and target != part
        and target not in ALLOWED[part]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("part", "room"), LEAVES)
def test_of_some_rooms_a_part_knows_the_leaves_only(part: str, room: str) -> None:
    """A room that both sides of the loop use would be a circle of rooms otherwise."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}; may import {sorted(LEAVES[part, room])} of rlflow.{room}"
        for path in sources("rlflow")
        if part_of(path) == part
        for line, name in imported(path)
        if name.startswith(f"rlflow.{room}.") and name.split(".")[2] not in LEAVES[part, room]
    ]
    assert not wrong, "\n".join(wrong)


def test_core_imports_neither_environments_nor_recipes_nor_tools() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("rlflow")
        for line, name in imported(path)
        if name.split(".")[0] in OUTSIDE_THE_CORE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PLACES)
def test_heavy_packages_are_imported_in_their_places_only(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("rlflow", "environments", "recipes", "tools")
        for line, name in imported(path)
        if name.split(".")[0] == package
        and not str(path.relative_to(ROOT)).startswith(PLACES[package])
    ]
    assert not wrong, f"only {PLACES[package]} may import {package}:\n" + "\n".join(wrong)


def test_the_reader_sees_lazy_relative_and_dynamic_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rlflow" / "trainer" / "megatron"
    folder.mkdir(parents=True)
    path = folder / "step.py"
    path.write_text(
        "def f():\n    import ray\n    from ..reference import x\n    from rlflow.rollout import y\n"
        "    import importlib\n    importlib.import_module('vllm')\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    names = {name for _, name in imported(path)}
    assert {"ray", "rlflow.trainer.reference.x", "rlflow.rollout.y", "vllm"} <= names
