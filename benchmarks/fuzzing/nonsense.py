"""Random values, and random damage to bytes, files and JSON."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, -7, 0.5, -0.5, 1.5, 1e-30, 1e30, 1e308, math.inf, -math.inf, math.nan, 2**31,
    2**63, -(2**63),
    10**30, "", " ", "a", "0", "-1", "1e400", "null", ".nan", "none", "adamw", "../../x", "/", "/dev/null", "a" * 3000,
    "\x00", "\n",
    "ü漢🙂", "\ud83d", "\ude00 x", "<answer>", "${run.name}", "{name}", "{0}", "%s", "$(id)", [], {}, [None], [[]], {"": None},
    {"name": None},
    {"name": ""}, {"name": "adamw", "name2": 1}, {"name": []}, [1, 2, 3], ["a"], {"a": {"b": []}},
)  # fmt: skip


def value(draw: random.Random, depth: int = 0) -> Any:
    """Anything that JSON or YAML can hold, and Python's JSON: lone surrogates, NaN."""
    kind = draw.random()
    if kind < 0.75 or depth > 3:
        return draw.choice(SCALARS)
    if kind < 0.85:
        return [value(draw, depth + 1) for _ in range(draw.randint(0, 4))]
    if kind < 0.95:
        return {text(draw): value(draw, depth + 1) for _ in range(draw.randint(0, 4))}
    return nested(draw.choice([5, 100, 600]))


def nested(depth: int) -> list[Any]:
    """Brackets within brackets."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def text(draw: random.Random) -> str:
    """A text of a few characters from all planes, halves of pairs included."""
    return "".join(
        chr(draw.choice([draw.randrange(32, 127), draw.randrange(0x20000), 0xD83D]))
        for _ in range(draw.randint(0, 12))
    )


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one kind of damage: bits, a cut, a range lost, zeroed, moved, doubled, or other bytes altogether."""
    if not data:
        return draw.randbytes(draw.randint(0, 64))
    start, stop = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
    kind = draw.randrange(10)
    if kind == 0:
        changed = bytearray(data)
        for _ in range(draw.choice([1, 1, 1, 8, 64])):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == 1:
        head = bytearray(
            data
        )  # headers are at the beginning, and every bit of them means something
        head[draw.randrange(min(len(data), 256))] = draw.randrange(256)
        return bytes(head)
    if kind == 2:
        return data[:start]
    if kind == 3:
        return data[:start] + data[stop:]
    if kind == 4:
        return data[:start] + bytes(stop - start) + data[stop:]
    if kind == 5:
        return data[stop:] + data[:stop]
    if kind == 6:
        return data[:stop] + data[start:]
    if kind == 7:
        size = draw.randint(
            1, max(1, (stop - start) // 2)
        )  # two ranges of a size, exchanged: what rows of a table look like
        between = data[start + size : stop - size]
        return (
            data[:start]
            + data[stop - size : stop]
            + between
            + data[start : start + size]
            + data[stop:]
        )
    if kind == 8:
        return data[:start] + draw.randbytes(draw.randint(1, 64)) + data[start:]
    return draw.randbytes(len(data))


def damaged_json(content: Any, draw: random.Random) -> Any:
    """A copy of a JSON value in which one place holds something else, is gone, or is joined by another."""
    content = json.loads(json.dumps(content))
    places = list(_places(content))
    if not places:
        return value(draw)
    holder, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.7:
        holder[key] = value(draw)
    elif kind < 0.85:
        del holder[key]
    else:
        other, from_key = draw.choice(places)
        holder[key] = (
            json.loads(json.dumps(other[from_key])) if not isinstance(other, type(None)) else None
        )
    return content


def _places(content: Any) -> Any:
    keys = (
        content
        if isinstance(content, dict)
        else range(len(content))
        if isinstance(content, list)
        else ()
    )
    for key in keys:
        yield content, key
        yield from _places(content[key])


def damage_folder(folder: Path, draw: random.Random) -> str:
    """Damages something in a folder, in place; returns what. Times of files stay as they were in half of the cases."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw.choice(files)
    state = path.stat()
    kind = draw.random()
    if kind < 0.06:
        path.unlink()
        return f"{path.name} deleted"
    if kind < 0.09:
        path.unlink()
        path.mkdir()
        return f"{path.name} is a directory"
    if kind < 0.12:
        path.unlink()
        path.symlink_to("nowhere")
        return f"{path.name} leads nowhere"
    if kind < 0.2 and len(files) > 1:
        other = draw.choice([other for other in files if other != path])
        ours, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        if draw.random() < 0.5:
            other.write_bytes(ours)
        return f"{path.name} and {other.name} exchanged"
    what = "damaged"
    data = path.read_bytes()
    if path.suffix == ".json" and draw.random() < 0.7:
        try:
            data = json.dumps(damaged_json(json.loads(data), draw)).encode()
            what = "another value"
        except (ValueError, RecursionError):
            data = damaged(data, draw)
    else:
        data = damaged(data, draw)
    path.write_bytes(data)
    if draw.random() < 0.5:
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    return f"{path.name}: {what}"
