"""Builds an index from a corpus.

A build that is killed resumes where it stopped when the same command is given again. Before it starts it prints the memory and
the disk that it will need; flat and torch indices are built from corpora of any size in a few hundred megabytes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from rlflow_environments.common.progress import ProgressLine

EXAMPLES = """examples:
  rlflow search build --corpus corpus.jsonl --out index                                  # flat, the built-in encoder
  rlflow search build --corpus wiki-18.jsonl --out e5 --encoder models/e5-base-v2 --device cuda --dtype float16 --index torch
  rlflow search build --corpus wiki-18.jsonl --out ivf --encoder models/e5-base-v2 --index IVF4096,SQ8
  rlflow search build --corpus corpus.jsonl --out words --index bm25
  rlflow search build --corpus corpus.jsonl --index qdrant --url http://localhost:6333 --collection wiki \\
      --encoder models/e5-base-v2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The corpus, the index, the encoder, and where a Qdrant collection is."""
    parser.epilog = EXAMPLES
    parser.add_argument("--corpus", required=True, metavar="FILE", help="a corpus.jsonl: contents, or title and text")
    parser.add_argument("--out", metavar="DIR", help="the index folder (not for a Qdrant server)")
    parser.add_argument(
        "--index",
        default="Flat",
        metavar="KIND",
        help="Flat (default), torch, bm25, qdrant, or what faiss' index_factory takes",
    )
    encoder = parser.add_argument_group("encoder")
    encoder.add_argument(
        "--encoder", default="hashed", metavar="NAME", help="hashed (default), a model folder or a hub name"
    )
    encoder.add_argument("--device", default=None, help="cpu (default) or cuda")
    encoder.add_argument(
        "--encoder-dtype", default=None, metavar="DTYPE", help="of the model's weights: float32 (default), ..."
    )
    encoder.add_argument("--backend", default=None, help="torch (default) or onnx")
    encoder.add_argument("--batch", type=int, default=None, metavar="N", help="passages per pass of the model")
    encoder.add_argument("--max-length", type=int, default=None, metavar="N", help="tokens of a passage (default 256)")
    encoder.add_argument("--pooling", default=None, help="instead of the family's")
    encoder.add_argument("--family", default=None, help="instead of the one that the name says: e5, bge, ...")
    encoder.add_argument(
        "--set", action="append", default=[], metavar="KEY=JSON", help="any other option of the encoder"
    )
    stored = parser.add_argument_group("what is stored")
    stored.add_argument("--dtype", default="float32", help="of the embeddings: float32 (default) or float16")
    stored.add_argument("--keep-embeddings", action="store_true", help="beside a faiss index, for re-scoring (refine)")
    stored.add_argument(
        "--checkpoint-s", type=float, default=600.0, metavar="S", help="seconds between copies of a growing index"
    )
    stored.add_argument(
        "--recall",
        type=float,
        default=None,
        metavar="R",
        help="of IVF and HNSW: search as far as recall@10 takes (default 0.95, where that is affordable)",
    )
    stored.add_argument("--plan", action="store_true", help="print what it will need, and stop")
    qdrant = parser.add_argument_group("qdrant")
    qdrant.add_argument("--url", help="of a server; without one the collection is embedded in --out")
    qdrant.add_argument("--collection", default="default_collection")
    qdrant.add_argument("--api-key", default=None, help="default: QDRANT_API_KEY")
    qdrant.add_argument("--grpc-port", type=int, default=None, metavar="PORT", help="gRPC there (6334) instead of REST")
    qdrant.add_argument("--engine", default="edge", help="of an embedded collection: edge (default) or local")


def run(args: argparse.Namespace) -> int:
    """Prints the plan, builds, prints what it took; returns 0."""
    from rlflow_environments.retrieval.building import BuildRequest, build_index
    from rlflow_environments.retrieval.corpus import Corpus
    from rlflow_environments.retrieval.indices.recall import describe_recall

    progress = ProgressLine(sys.stderr)
    progress("reading the corpus", 0, 1)
    corpus = Corpus(args.corpus)
    encoder = _encoder(args)
    if args.index == "qdrant":
        return _build_collection(args, corpus, encoder, progress)
    folder = _folder(args)
    expected = print_plan(args.index, corpus, encoder)
    if args.plan:
        return 0
    start = time.monotonic()
    request = BuildRequest(
        args.index, encoder, args.dtype, args.keep_embeddings, checkpoint_s=args.checkpoint_s, recall=args.recall
    )
    meta = build_index(corpus, folder, request, progress)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder}: {meta.kind}, {meta.count:,} passages, {size / 1e9:.3f} GB on disk, {time.monotonic() - start:.0f} s; "
        f"peak memory {peak / 1e9:.2f} GB (predicted {expected / 1e9:.2f} GB)"
    )
    if meta.search is not None:
        searched = {key: meta.search[key] for key in ("nprobe", "ef_search") if key in meta.search}
        told, low = describe_recall(meta.search, searched)
        print(f"{'warning: ' if low else ''}{told}")
    name = {"torch": "torch", "bm25": "bm25"}.get(meta.kind, "faiss")
    print(f"use it with\n  environment.corpus={args.corpus} environment.retriever='{{name: {name}, path: {folder}}}'")
    return 0


def _build_collection(args: argparse.Namespace, corpus: Any, component: dict[str, Any], progress: ProgressLine) -> int:
    from rlflow.errors import ConfigError
    from rlflow_environments.retrieval.encoders import make_encoder
    from rlflow_environments.retrieval.indices.qdrant import ENGINES
    from rlflow_environments.retrieval.indices.qdrant_build import build_folder, fill
    from rlflow_environments.retrieval.indices.qdrant_collections import SearchOptions, connect

    if args.engine not in ENGINES:
        raise ConfigError(f"--engine: expected {' or '.join(ENGINES)}, found '{args.engine}'.")
    encoder = make_encoder(component, corpus)
    if args.url is None:
        folder = _folder(args)
        build_folder(corpus, folder, encoder, args.engine, progress)
        where = f"path: {folder}"
    else:
        options: dict[str, Any] = {"api_key": args.api_key, "grpc_port": args.grpc_port, "timeout_s": 60.0, "tries": 5}
        collection = connect(args.url, args.collection, options=SearchOptions(), create=encoder.dimensions, **options)
        added = fill(collection, encoder, corpus, progress)
        print(f"{args.url}: collection {args.collection}, {len(corpus):,} points, {added:,} of them new")
        where = f"url: {args.url}, collection: {args.collection}"
        where += "" if component["name"] == "hashed" else f", encoder: {component['name']}"
    print(f"use it with\n  environment.corpus={args.corpus} environment.retriever='{{name: qdrant, {where}}}'")
    return 0


def print_plan(kind: str, corpus: Any, encoder: dict[str, Any]) -> float:
    """Prints the memory and disk that a build will take; returns the predicted peak memory in bytes."""
    import psutil

    from rlflow_environments.retrieval.indices import cost as index_plan
    from rlflow_environments.retrieval.indices.dense import BLOCK

    process = psutil.Process().memory_info().rss
    if kind == "bm25":
        extra, disk = (
            index_plan.bm25_bytes(corpus.path.stat().st_size),
            index_plan.bm25_bytes(corpus.path.stat().st_size) / 4,
        )
    else:
        dimensions, weights = encoder_size(encoder)
        parsed = index_plan.parse_kind(kind, dimensions)
        extra = weights + index_plan.building_bytes(parsed, len(corpus), dimensions, block=BLOCK)
        disk = len(corpus) * dimensions * 4.0 + index_plan.stored_bytes(parsed, len(corpus), dimensions)
    total, free = process + extra, psutil.virtual_memory().available
    print(
        f"{len(corpus):,} passages, index {kind}: will need about {index_plan.readable(total)} of memory "
        f"({index_plan.readable(free)} are free) and {index_plan.readable(disk)} of disk while it builds",
        file=sys.stderr,
    )
    if extra > free:
        told = "warning: that is more than is free. SQ8 takes a quarter of Flat, Flat and torch are"
        print(f"{told} built in a few hundred megabytes.", file=sys.stderr)
    return total


def encoder_size(encoder: dict[str, Any]) -> tuple[int, float]:
    """(dimensions, bytes that the encoder will take), without loading it."""
    from rlflow_environments.retrieval.encoders.size import encoder_cost

    return encoder_cost(encoder)


def _encoder(args: argparse.Namespace) -> dict[str, Any]:
    from rlflow.errors import ConfigError

    options: dict[str, Any] = {"name": args.encoder}
    given = {
        "device": args.device,
        "dtype": args.encoder_dtype,
        "backend": args.backend,
        "passage_batch": args.batch,
        "max_length": args.max_length,
        "pooling": args.pooling,
        "family": args.family,
    }
    options.update({key: value for key, value in given.items() if value is not None})
    for pair in args.set:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--set {pair}: expected KEY=VALUE.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def _folder(args: argparse.Namespace) -> Path:
    from rlflow.errors import ConfigError

    if not args.out:
        raise ConfigError("--out: expected the folder that the index is written to.")
    return Path(args.out).expanduser()
