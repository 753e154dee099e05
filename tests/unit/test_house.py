"""Ratchets: how large, dense and entangled the code may be. A figure only falls.

Whoever adds what is worth more than its size raises a figure, with a line in CHANGELOG.md that says
what it earned; whoever deletes lowers it."""

from __future__ import annotations

import collections
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.unit.sources import PACKAGES, files, imported_modules, modules

CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
SLACK = 0.98
"""A figure that lies further above what is measured is to be lowered."""
TOKENS = {
    "rlflow": 267_532,
    "environments": 127_536,
    "tools": 28_829,
    "recipes": 5_883,
}
MOST = {
    "tokens per 100 lines of rlflow/": 689,
    "lines over 100 columns, of 10,000": 0,
    "longest import chain": 15,
    "import chain of rlflow.loop": 12,
    "modules in a folder of rlflow/": 21,
    "names of modules in rlflow/ that stand more than once": 0,
    "files that start processes": 1,
    "files that start threads": 3,
    "files with hmac or struct.Struct": 2,
    "HTTP client libraries": 1,
    "test doubles in public tables": 0,
}
CLIENTS = {
    "httpx": r"(?m)^\s*(import|from) httpx\b",
    "aiohttp": r"ClientSession\(",
    "urllib": r"(?m)^\s*(import|from) urllib\.request\b",
    "requests": r"(?m)^\s*(import|from) requests\b",
}


@functools.cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def code_tokens(path: Path) -> int:
    """Names, operators and numbers: what a formatter does not change."""
    found = tokenize.generate_tokens(io.StringIO(text(path)).readline)
    return sum(token.type in CODE for token in found)


def lines(*folders: str) -> list[str]:
    """Those that are not blank."""
    found = (line for path in files(*folders) for line in text(path).splitlines())
    return [line for line in found if line.strip()]


def holding(pattern: str) -> list[Path]:
    return [path for path in files(*PACKAGES) if re.search(pattern, text(path))]


@functools.cache
def chain(module: str) -> int:
    """Modules on the longest way of imports from one on; there are no circles."""
    below = set(imported_modules(modules()[module])) - {module}
    return 1 + max(map(chain, below), default=0)


def measured() -> dict[str, float]:
    core = files("rlflow")
    folders = collections.Counter(path.parent for path in core if path.stem != "__init__")
    names = collections.Counter(path.stem for path in core)
    repeated = [
        name
        for name, count in names.items()
        if count > 1 and name not in ("__init__", "__main__", "base")
    ]
    long = [line for line in lines(*PACKAGES, "recipes") if len(line) > 100]
    tokens = sum(map(code_tokens, core))
    return {
        "tokens per 100 lines of rlflow/": 100 * tokens / len(lines("rlflow")),
        "lines over 100 columns, of 10,000": 10_000 * len(long) / len(lines(*PACKAGES, "recipes")),
        "longest import chain": max(map(chain, modules())),
        "import chain of rlflow.loop": chain("rlflow.loop"),
        "modules in a folder of rlflow/": max(folders.values()),
        "names of modules in rlflow/ that stand more than once": len(repeated),
        "files that start processes": len(holding(r"\bPopen\(")),
        "files that start threads": len(holding(r"\bThread\(")),
        "files with hmac or struct.Struct": len(holding(r"\bimport hmac\b|struct\.Struct\(")),
        "HTTP client libraries": sum(bool(holding(pattern)) for pattern in CLIENTS.values()),
        "test doubles in public tables": len(holding(r'"(fake|sleep)":\s*"rlflow')),
    }


@pytest.mark.parametrize("folder", TOKENS)
def test_no_folder_has_more_code_than_it_may(folder: str) -> None:
    found = sum(map(code_tokens, files(folder)))
    assert found <= TOKENS[folder], "delete something, or say in CHANGELOG.md what it earned"
    assert found >= SLACK * TOKENS[folder], f"lower the figure to {found}"


def test_figures_of_the_house_only_fall() -> None:
    found = measured()
    risen = {name: figure for name, figure in found.items() if figure > MOST[name]}
    assert not risen and found.keys() == MOST.keys()
    fallen = {name: figure for name, figure in found.items() if figure < SLACK * MOST[name]}
    assert not fallen, "lower these figures"
