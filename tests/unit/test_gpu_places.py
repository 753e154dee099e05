"""docs/gpu.md names every file of the core whose code asks for CUDA: a GPU path is in the table, or it is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
ASKING = re.compile(r"cuda(?!_manual_seed|_rng|_state)")
SAID = {
    "preflight/start.py": "counts GPUs",
    "trainer/megatron/checkpoint.py": "Megatron's name for its generators, which `cpu.py` provides",
}
"""Files that ask and do the same whatever the answer."""


def asks_for_cuda(path: Path) -> bool:
    """Whether code, not a comment or a docstring, has `cuda` in a name or a text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            words = node.value if len(node.value) < 40 else ""  # longer ones are messages
        else:
            words = getattr(node, "attr", "") or getattr(node, "id", "")
        if isinstance(words, str) and ASKING.search(words):
            return True
    return False


def called(path: Path) -> str:
    """A file as the page names it."""
    return f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name


def test_every_file_that_asks_for_cuda_stands_in_the_table() -> None:
    asking = [
        path.relative_to(ROOT / "rlflow")
        for path in sorted((ROOT / "rlflow").rglob("*.py"))
        if asks_for_cuda(path)
    ]
    assert len(asking) > 8, "the reader sees nothing"
    missing = [str(path) for path in asking if called(path) not in PAGE and str(path) not in SAID]
    assert not missing, f"docs/gpu.md: add a row for {missing}"


def test_the_page_says_once_and_first_that_no_gpu_was_there() -> None:
    assert PAGE.splitlines()[2].startswith("**Never run on a GPU by us.**")
