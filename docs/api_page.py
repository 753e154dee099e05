"""Writes docs/api.md from the docstrings of the public names: python docs/api_page.py"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rlflow
from rlflow import algorithms

PAGE = Path(__file__).parent / "api.md"
PARTS = {
    "Environments": (
        *("Environment", "Task", "Episode", "Step", "Metric", "PolicyError", "check_environment"),
    ),
    "Attempts": ("Rollout", "Group", "Trajectory", "Segment", "StopReason"),
    "Training": ("Trainer", "make_batch", "Batch", "PolicyOutput"),
    "A run of your own": ("RunFolder", "evaluate", "export_policy"),
    "Configured runs": ("load_config", "RunConfig", "train"),
}
HEAD = """# The public API

`from rlflow import NAME`; this page is written from the docstrings (`make docs`). B rows, T tokens;
log-probs in nats. A script that uses most of it: `rlflow env new NAME --script`
([quick start](quick_start.md#a-training-script-of-your-own)); words: [glossary](glossary.md).

"""
COMMENT = re.compile(r"^    (\w+): [^#\n]*#\s*(.+)$", re.MULTILINE)
_ADDRESS = re.compile(r"functools\.partial\(.*?\)|<[\w.]+ object at 0x[0-9a-f]+>|<factory>")


def page() -> str:
    """The whole page."""
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(rlflow.__all__), set(named) ^ set(rlflow.__all__)
    text = HEAD
    for title, names in PARTS.items():
        text += f"## {title}\n\n"
        text += "\n".join("\n".join(entry(name, getattr(rlflow, name))) for name in names) + "\n"
    rows = [(name, first_line(getattr(algorithms, name))) for name in algorithms.__all__]
    text += "## rlflow.algorithms\n\n" + "\n".join(table("name", rows))
    return text.rstrip("\n") + "\n"


def entry(name: str, item: Any) -> Iterator[str]:
    """The lines about one public name."""
    yield f"### {name}\n"
    signature = shown_signature(item)
    if signature:
        yield f"```python\n{name}{signature}\n```\n"
    yield plain(documented(item)) + "\n"
    if isinstance(item, type) and issubclass(item, enum.Enum):
        yield from table("value", [(one.name, f"`{one.value}`") for one in item])
        yield ""
    elif dataclasses.is_dataclass(item):
        yield from table("field", fields(item))
        yield ""
    if isinstance(item, type) and (rows := methods(item)):
        yield from table("method", rows)
        yield ""


def shown_signature(item: Any) -> str:
    """Parameters and their defaults; nothing where fields or the base class say it."""
    if isinstance(item, type) and (
        dataclasses.is_dataclass(item) or issubclass(item, enum.Enum) or inspect.isabstract(item)
    ):
        return ""
    signature = inspect.signature(item)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return _ADDRESS.sub("...", text)


def documented(item: Any) -> str:
    text = inspect.getdoc(item) or ""
    made = f"{getattr(item, '__name__', '')}("
    return "" if text.startswith(made) else text  # the one that a dataclass makes itself


def fields(item: type) -> list[tuple[str, str]]:
    """(name and type, the comment behind them) of a dataclass's fields."""
    comments = dict(COMMENT.findall(inspect.getsource(item)))
    return [
        (f"{one.name}: {one.type}", comments.get(one.name, "")) for one in dataclasses.fields(item)
    ]


def methods(item: type) -> list[tuple[str, str]]:
    """(name with its parameters, first sentence) of what a class adds to its bases."""
    found = []
    for name, member in vars(item).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found.append((name, first_line(member)))
            continue
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if not inspect.isfunction(function) or not first_line(function):
            continue
        names = [
            one for one in inspect.signature(function).parameters if one not in ("self", "cls")
        ]
        found.append((f"{name}({', '.join(names)})", first_line(function)))
    return found


def first_line(item: Any) -> str:
    """The first sentence of a docstring, in one line."""
    text = " ".join((inspect.getdoc(item) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?\.(?=\s|$)", text)
    return (sentence[0] if sentence else text).rstrip(".")


def plain(text: str) -> str:
    """A docstring as Markdown: nothing of it is markup but its code."""
    return text.replace("*", "\\*").replace("<", "&lt;")


def table(head: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head} | meaning |"
    yield "|---|---|"
    for name, meaning in rows:
        told = meaning.replace("|", "\\|").replace("<", "&lt;")
        shown = name.replace("|", "\\|")
        yield f"| `{shown}` | {told} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
