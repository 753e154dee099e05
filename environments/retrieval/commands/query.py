"""Tries an index or a server in the terminal: prints what it finds for one or more queries, or asks
for queries.

rlflow search query "who wrote the sea charts" --index indices/wiki
rlflow search query --url http://localhost:8000
rlflow search query "harbour" --corpus corpus.jsonl --retriever bm25 --top-k 5
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from rlflow.errors import ConfigError, RLFlowError
from rlflow.texts import printable
from rlflow_environments.common.commands import add_option
from rlflow_environments.retrieval.commands.source_arguments import (
    add_source_arguments,
    read_source,
)
from rlflow_environments.retrieval.corpus import Corpus, Passage
from rlflow_environments.retrieval.indices import Retriever, make_retriever

SHOWN_CHARACTERS = 240


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Queries, and what is asked."""
    parser.add_argument(
        "text", nargs="*", metavar="QUERY", help="without one, queries are read from the terminal"
    )
    add = partial(add_option, parser)
    add("--top-k --topk N", "passages per query", 3)
    add("--full", "print whole passages")
    add("--url URL", "a running server, ours or any that speaks the wire format")
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Searches and prints, with the time that it took; returns 0."""
    if args.top_k < 1:
        raise ConfigError(f"--top-k: expected at least 1, found {args.top_k}.")
    start = time.perf_counter()
    retriever = _retriever(args)
    print(f"ready after {time.perf_counter() - start:.2f} s", file=sys.stderr)
    if args.text:
        _show(retriever, args.text, args.top_k, args.full)
        return 0
    for query in _typed():
        try:
            _show(retriever, [query], args.top_k, args.full)
        except RLFlowError as problem:  # the next query may do
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
    return 0


def _retriever(args: argparse.Namespace) -> Retriever:
    if args.url is not None:
        return make_retriever({"name": "http", "url": args.url, "wait_s": 0}, None)
    component, corpus = read_source(args)
    return make_retriever(component, None if corpus is None else Corpus(corpus))


def _typed() -> Iterator[str]:
    """Lines from the terminal until end of input; from a pipe without a prompt."""
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type a query; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("query> " if interactive else "")
        except EOFError:
            return
        if line.strip():
            yield line.rstrip("\n")


def _show(retriever: Retriever, queries: Sequence[str], top_k: int, full: bool) -> None:
    start = time.perf_counter()
    results = retriever.search(queries, top_k)
    seconds = time.perf_counter() - start
    for query, passages in zip(queries, results, strict=True):
        print(f"{query!r}: {len(passages)} passages")
        for rank, passage in enumerate(passages, start=1):
            _print_passage(rank, passage, full)
    print(f"searched in {seconds * 1000:.1f} ms", file=sys.stderr)


def _print_passage(rank: int, passage: Passage, full: bool) -> None:
    place = f"{passage.title}  [{passage.id}]  {passage.url}"
    print(f"  {rank}. {passage.score:.4f}  {printable(place)}")
    body = passage.body if full else " ".join(passage.body.split())[:SHOWN_CHARACTERS]
    print(f"     {printable(body)}")
