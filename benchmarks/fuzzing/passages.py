"""A small corpus, indices of several kinds over it, and what is asked of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fuzzing.cases import command, forked

KINDS = ("Flat", "bm25", "IVF8,Flat", "IVF8,SQ8", "SQ8", "HNSW8", "IVF8,PQ8x4")
WORDS = [a + b + c for a in "bdkmnrst" for b in "aeiou" for c in ("lan", "vik", "dor", "mes")]
QUESTIONS = 12


def write_corpus(path: Path, rows: int = 300, seed: int = 0) -> list[str]:
    """Writes passages of random words and returns questions about some of them."""
    draw = random.Random(seed)
    lines, asked = [], []
    for row in range(rows):
        title, words = f"{draw.choice(WORDS)} {row}", draw.choices(WORDS, k=12)
        lines.append(
            json.dumps(
                {
                    "id": str(row),
                    "title": title,
                    "contents": f'"{title}"\n{" ".join(words)}',
                    "url": f"doc://{row}",
                }
            )
        )
        if row % (rows // QUESTIONS) == 0:
            asked.append(" ".join(words[:5]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return asked[:QUESTIONS]


def build(corpus: Path, out: Path, kind: str, folder: Path) -> Path:
    """The folder of an index that `rlflow search build` made."""
    arguments = [
        "search",
        "build",
        "--corpus",
        str(corpus),
        "--out",
        str(out),
        "--index",
        kind,
        "--set",
        "dimensions=64",
    ]
    if kind == "bm25":
        arguments = arguments[:-2]
    ended = forked(command(arguments), folder, deadline_s=60)
    if not ended.check():
        raise SystemExit(f"{kind} cannot be built: {ended.err}")
    return out
