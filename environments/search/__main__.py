"""`python -m rlflow_environments.search query --corpus FILE "text"`: try a retriever in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rlflow.errors import RLFlowError
from rlflow_environments.search.formats import Corpus
from rlflow_environments.search.retrievers import make_retriever


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 1 after an error that it prints in one line."""
    parser = argparse.ArgumentParser(prog="python -m rlflow_environments.search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    query = commands.add_parser("query", help="print the passages that a retriever finds")
    query.add_argument("text", nargs="+", help="one or more queries")
    query.add_argument("--corpus", required=True, help="a corpus.jsonl")
    query.add_argument("--top-k", type=int, default=3, help="passages per query (default 3)")
    query.add_argument("--retriever", default="dense", help="bm25, dense (default), hybrid or random")
    chosen = parser.parse_args(arguments)
    try:
        return print_passages(chosen.text, chosen.corpus, chosen.retriever, chosen.top_k)
    except RLFlowError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


def print_passages(queries: Sequence[str], corpus: str, retriever: str, top_k: int) -> int:
    """Searches and prints, with the time that it took; returns 0."""
    start = time.perf_counter()
    index = make_retriever(retriever, Corpus(corpus))
    built = time.perf_counter()
    results = index.search(queries, top_k)
    searched = time.perf_counter()
    for query, passages in zip(queries, results, strict=True):
        print(f"{query!r}: {len(passages)} passages")
        for rank, passage in enumerate(passages, start=1):
            print(f"  {rank}. {passage.score:.4f}  {passage.title}  [{passage.id}]  {passage.url}")
            print(f"     {' '.join(passage.body.split())[:240]}")
    print(f"index built in {built - start:.2f} s, searched in {(searched - built) * 1000:.1f} ms", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
