"""Prints the passages that a retriever finds in a corpus."""

from __future__ import annotations

import argparse
import sys
import time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Queries, the corpus and the retriever."""
    parser.add_argument("text", nargs="+", help="one or more queries")
    parser.add_argument("--corpus", required=True, help="a corpus.jsonl")
    parser.add_argument("--top-k", type=int, default=3, help="passages per query (default 3)")
    parser.add_argument("--retriever", default="dense", help="bm25, dense (default), hybrid or random")


def run(args: argparse.Namespace) -> int:
    """Searches and prints, with the time that it took; returns 0."""
    from rlflow_environments.search.formats import Corpus
    from rlflow_environments.search.retrievers import make_retriever

    start = time.perf_counter()
    index = make_retriever(args.retriever, Corpus(args.corpus))
    built = time.perf_counter()
    results = index.search(args.text, args.top_k)
    searched = time.perf_counter()
    for query, passages in zip(args.text, results, strict=True):
        print(f"{query!r}: {len(passages)} passages")
        for rank, passage in enumerate(passages, start=1):
            print(f"  {rank}. {passage.score:.4f}  {passage.title}  [{passage.id}]  {passage.url}")
            print(f"     {' '.join(passage.body.split())[:240]}")
    print(f"index built in {built - start:.2f} s, searched in {(searched - built) * 1000:.1f} ms", file=sys.stderr)
    return 0
