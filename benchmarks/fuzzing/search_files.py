"""Damaged index folders and corpora: what is opened answers as the whole one does, or is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from fuzzing import nonsense
from fuzzing.cases import Wrong, command, forked
from fuzzing.passages import KINDS, build, write_corpus

DEADLINE_S = 60.0


class Indices:
    """Folders of every kind, the corpus beside them, and the offsets that a server keeps."""

    def prepare(self, folder: Path) -> None:
        self._corpus = folder / "corpus.jsonl"
        self._asked = write_corpus(self._corpus)
        self._folders = {
            kind: build(self._corpus, folder / kind.replace(",", "_"), kind, folder)
            for kind in KINDS
        }
        self._expected = {
            kind: self._answers(path, self._corpus, folder) for kind, path in self._folders.items()
        }
        served = {
            kind: self._answers(path, self._corpus, folder, served=True)
            for kind, path in self._folders.items()
        }
        if None in self._expected.values() or served != self._expected:
            raise SystemExit("a whole index is refused, or server and command line disagree")

    def case(self, draw: random.Random, folder: Path) -> bool:
        kind = draw.choice(KINDS)
        index, corpus, served = (
            folder / "data" / "index",
            folder / "data" / "corpus.jsonl",
            draw.random() < 0.5,
        )
        shutil.copytree(self._folders[kind], index)
        shutil.copy2(self._corpus, corpus)
        if served and draw.random() < 0.5:
            self._answers(
                index, corpus, folder, served=True
            )  # leaves the offsets there, to be damaged like the rest
        what = [
            nonsense.damage_folder(folder / "data", draw) for _ in range(draw.choice([1, 1, 2]))
        ]
        found = self._answers(index, corpus, folder, served=served)
        if found is not None and found != self._expected[kind]:
            raise Wrong(f"{kind}, {what}, served={served}: wrong answers are given: {found[:600]}")
        return found is not None

    def close(self) -> dict[str, float]:
        return {}

    def _answers(
        self, index: Path, corpus: Path, folder: Path, *, served: bool = False
    ) -> str | None:
        """What the questions find, as text; None for an index that is refused."""
        ended = forked(lambda: _search(index, corpus, self._asked, served), folder, DEADLINE_S)
        return ended.out if ended.check() else None


def _search(index: Path, corpus: Path, asked: list[str], served: bool) -> int:
    """Prints what is found: by the command line, or by what the server loads."""
    if not served:
        return command(
            [
                "search",
                "query",
                *asked,
                "--index",
                str(index),
                "--corpus",
                str(corpus),
                "--top-k",
                "3",
                "--full",
            ]
        )()
    import argparse
    import sys

    from rlflow.errors import RLFlowError
    from rlflow_environments.retrieval.commands.query import _print_passage
    from rlflow_environments.retrieval.commands.source_arguments import (
        add_source_arguments,
        read_source,
    )
    from rlflow_environments.retrieval.corpus import Corpus
    from rlflow_environments.retrieval.indices import make_retriever

    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    try:
        component, _ = read_source(parser.parse_args(["--index", str(index)]))
        retriever = make_retriever(component, Corpus(corpus))
        for question, found in zip(asked, retriever.search(asked, 3)):
            print(f"{question!r}: {len(found)} passages")
            for rank, passage in enumerate(found, start=1):
                _print_passage(rank, passage, full=True)
    except RLFlowError as error:
        print(f"rlflow: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


class Corpora:
    """Rows of every sort: a corpus is read as an independent reading of its rows says, or refused."""

    def prepare(self, folder: Path) -> None:
        pass

    def case(self, draw: random.Random, folder: Path) -> bool:
        path = folder / "corpus.jsonl"
        rows = [_row(draw) for _ in range(draw.randint(1, 12))]
        data = b"\n".join(line for line, _, _ in rows) + draw.choice([b"", b"\n", b"\n\n \n"])
        known = draw.random() < 0.7
        path.write_bytes(data if known else nonsense.damaged(data, draw))
        ended = forked(lambda: _read(path), folder, DEADLINE_S)
        accepted = ended.check()
        if accepted:
            first, second = map(json.loads, ended.out.splitlines())
            if first != second:
                raise Wrong(
                    f"{path.read_bytes()!r:.2000}: the two readers disagree: {first} {second}"
                )
            if known:
                self._compare(rows, first, path)
        elif (
            known
            and not any(kind == "bad" for _, kind, _ in rows)
            and any(kind == "good" for _, kind, _ in rows)
        ):
            raise Wrong(f"good rows are refused: {path.read_bytes()!r:.2000}: {ended.err}")
        return accepted

    def close(self) -> dict[str, float]:
        return {}

    @staticmethod
    def _compare(rows: list[tuple[bytes, str, Any]], found: list[list[str]], path: Path) -> None:
        expected = [passage for _, kind, passage in rows if kind != "bad"]
        if any(kind == "bad" for _, kind, _ in rows):
            raise Wrong(f"a bad row is taken: {path.read_bytes()!r:.2000}")
        if [contents for _, contents in found] != [contents for _, contents in expected]:
            raise Wrong(f"read as {found!r:.1500}, expected {expected!r:.1500}")
        names = [
            (ours[0], theirs[0]) for ours, theirs in zip(found, expected) if theirs[0] is not None
        ]
        if any(ours != theirs for ours, theirs in names):
            raise Wrong(f"ids {names}")


def _row(draw: random.Random) -> tuple[bytes, str, Any]:
    """(line, good | empty | bad, (id or None, contents))."""
    contents = draw.choice(
        ["words and more", "“x”\nü漢🙂\u2028 y", '"Title"\ntext', "a" * 5000, "x\ty"]
    )
    row: dict[str, Any] = {"id": draw.choice(["a", 7, "ü", "\u2028"]), "contents": contents}
    name: str | None = str(row["id"])
    if draw.random() < 0.2:
        del row["id"]
        name = None
    kind = draw.random()
    if kind < 0.55:
        row["other"] = draw.choice([1, "x", [1, {}], None, 1.5])
        return json.dumps(row, ensure_ascii=draw.random() < 0.5).encode(), "good", (name, contents)
    if kind < 0.7:
        row["contents"] = draw.choice(["", " ", "\n"])
        return json.dumps(row).encode(), "empty", (name, "")
    bad = draw.choice(
        [b"{", b"[]", b"7", b'"x"', b"null", b"{}", b'{"contents": 7}', b'{"contents": [1]}', b'{"text": "x"}', b"\xff\xfe",
        b'{"contents": "\xff"}',
         b'{"contents": "x", "id": ' + b"9" * 6000 + b"}", b"[" * 100_000, b'{"contents": "x"} y',
         b'{"contents": {}, "title": "t"}']
    )  # fmt: skip
    return bad, "bad", None


def _read(path: Path) -> int:
    """Prints the corpus as it is read for the first time, and from its offsets."""
    import sys

    from rlflow.errors import RLFlowError
    from rlflow_environments.retrieval.corpus import Corpus

    try:
        for _ in range(2):
            corpus = Corpus(path)
            print(
                json.dumps([[corpus[row].id, corpus[row].contents] for row in range(len(corpus))])
            )
    except RLFlowError as error:
        print(f"rlflow: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0
