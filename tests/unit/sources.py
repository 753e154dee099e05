"""The project's source files as syntax trees, parsed once per test session."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"rlflow": "rlflow", "environments": "rlflow_environments", "tools": "rlflow_tools"}
"""Folder -> the name that it is imported by."""


@functools.cache
def files(*folders: str) -> tuple[Path, ...]:
    """Every Python file below the folders, sorted."""
    return tuple(sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")))


@functools.cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Of the file's tree, all of them."""
    return tuple(ast.walk(tree(path)))


def module_name(path: Path) -> str:
    """rlflow_tools.ckpt_convert.verify of tools/ckpt_convert/verify.py; a package for its __init__.py."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES.get(folder, folder), *(part for part in rest if part != "__init__")])


@functools.cache
def modules() -> dict[str, Path]:
    """Module name -> file, of all packages."""
    return {module_name(path): path for path in files(*PACKAGES)}


def imported_modules(path: Path) -> Iterator[str]:
    """The project's own modules that a file imports, wherever in it, those for type checkers alone included."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
                            if node.level else [node.module or ""])  # fmt: skip
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield from (
                    name for name in (whole if whole in modules() else base,) if name in modules()
                )
