"""Builds an index from a corpus.

A build that is killed resumes where it stopped when the same command is given again. Flat indices
are built from corpora of any size in a few hundred megabytes; other faiss kinds are filled in
memory.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError
from rlflow_environments.common.commands import add_option
from rlflow_environments.common.progress import ProgressLine

EXAMPLES = """examples:
  rlflow search build --corpus corpus.jsonl --out index          # flat, the built-in encoder
  rlflow search build --corpus wiki-18.jsonl --out e5 --encoder models/e5-base-v2 --device cuda
  rlflow search build --corpus wiki-18.jsonl --out ivf --encoder models/e5-base-v2 \\
      --index IVF4096,SQ8
  rlflow search build --corpus corpus.jsonl --out words --index bm25
  rlflow search build --corpus corpus.jsonl --out graph --index qdrant
  rlflow search build --corpus corpus.jsonl --index qdrant --url http://localhost:6333 \\
      --collection wiki --encoder models/e5-base-v2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The corpus, the index, the encoder, and where a Qdrant collection is."""
    parser.epilog = EXAMPLES
    corpus = "a corpus.jsonl: contents, or title and text"
    parser.add_argument("--corpus", required=True, metavar="FILE", help=corpus)
    add = partial(add_option, parser)
    add("--out DIR", "the index folder (not for a Qdrant server)")
    add("--index KIND", "Flat, bm25, qdrant, or what faiss' index_factory takes", "Flat")
    recall = "of IVF and HNSW: search as far as recall@10 takes (default 0.95, where affordable)"
    add("--recall R", recall, kind=float)
    encoder = parser.add_argument_group("encoder")
    add = partial(add_option, encoder)
    add("--encoder NAME", "hashed, a model folder or a hub name", "hashed")
    add("--device DEVICE", "cpu (default) or cuda")
    add("--encoder-dtype DTYPE", "of the model's weights: float32 (default), ...")
    add("--batch N", "passages per pass of the model", kind=int)
    add("--max-length N", "tokens of a passage (default 256)", kind=int)
    add("--pooling POOLING", "instead of the family's")
    add("--family FAMILY", "instead of the one that the name says: e5, bge, ...")
    other = {"metavar": "KEY=JSON", "help": "any other option of the encoder"}
    encoder.add_argument("--set", action="append", default=[], **other)
    add = partial(add_option, parser.add_argument_group("a Qdrant server, in place of --out"))
    add("--url URL", "of the server")
    add("--collection NAME", "its name there", "default_collection")
    add("--api-key KEY", "default: QDRANT_API_KEY")


def run(args: argparse.Namespace) -> int:
    """Builds, prints what it took; returns 0."""
    from rlflow_environments.retrieval.building import BuildRequest, build_index
    from rlflow_environments.retrieval.corpus import Corpus
    from rlflow_environments.retrieval.indices.faiss_index import describe_recall
    from rlflow_environments.retrieval.indices.folder import retriever_of

    progress = ProgressLine(sys.stderr)
    progress("reading the corpus", 0, 1)
    corpus, encoder = Corpus(args.corpus), _encoder(args)
    if args.out and args.url:
        raise ConfigError(
            "--url: a collection of a server has no folder; leave out --out, or --url."
        )
    if args.index == "qdrant" and not args.out:
        return _build_collection(args, corpus, encoder, progress)
    if not args.out:
        raise ConfigError("--out: expected the folder that the index is written to.")
    folder, start = Path(args.out).expanduser(), time.monotonic()
    meta = build_index(corpus, folder, BuildRequest(args.index, encoder, args.recall), progress)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder}: {meta.kind}, {meta.count:,} passages, {size / 1e9:.3f} GB on disk, "
        f"{time.monotonic() - start:.0f} s; peak memory {peak / 1e9:.2f} GB"
    )
    if meta.search is not None:
        knobs = ("nprobe", "ef_search")
        searched = {key: meta.search[key] for key in knobs if key in meta.search}
        line, low = describe_recall(meta.search, searched)
        print(f"{'warning: ' if low else ''}{line}")
    _print_use(args, f"name: {retriever_of(meta)}, path: {folder}")
    return 0


def _build_collection(
    args: argparse.Namespace, corpus: Any, component: dict[str, Any], progress: ProgressLine
) -> int:
    from rlflow_environments.retrieval.encoders import make_encoder
    from rlflow_environments.retrieval.indices.qdrant import Collection, fill

    if args.url is None:
        raise ConfigError(
            "--out: expected the folder that the index is written to; or --url, the Qdrant server "
            "that the collection is made on."
        )
    encoder = make_encoder(component, corpus)
    size, key = encoder.dimensions, args.api_key
    collection = Collection(args.url, args.collection, create=size, api_key=key)
    added = fill(collection, encoder, corpus, progress)
    print(
        f"{args.url}: collection {args.collection}, {len(corpus):,} points, {added:,} of them new"
    )
    model = "" if component["name"] == "hashed" else f", encoder: {component['name']}"
    _print_use(args, f"name: qdrant, url: {args.url}, collection: {args.collection}{model}")
    return 0


def _print_use(args: argparse.Namespace, retriever: str) -> None:
    print(
        f"use it with\n  environment.corpus={args.corpus} environment.retriever='{{{retriever}}}'"
    )


def _encoder(args: argparse.Namespace) -> dict[str, Any]:
    import yaml

    given = {
        "name": args.encoder,
        "device": args.device,
        "dtype": args.encoder_dtype,
        "passage_batch": args.batch,
        "max_length": args.max_length,
        "pooling": args.pooling,
        "family": args.family,
    }
    options = {key: value for key, value in given.items() if value is not None}
    for pair in args.set:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--set {pair}: expected KEY=VALUE.")
        try:
            options[key] = yaml.safe_load(value)  # of which JSON is a part
        except yaml.YAMLError:
            options[key] = value
    return options
