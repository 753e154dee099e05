"""Builds an index from a corpus.

A build that is killed resumes where it stopped when the same command is given again. Before it
starts it prints the memory and the disk that it will need; flat and torch indices are built from
corpora of any size in a few hundred megabytes.
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
    parser.add_argument(
        "--corpus",
        required=True,
        metavar="FILE",
        help="a corpus.jsonl: contents, or title and text",
    )
    add = partial(add_option, parser)
    add("--out DIR", "the index folder (not for a Qdrant server)")
    add("--index KIND", "Flat, torch, bm25, qdrant, or what faiss' index_factory takes", "Flat")
    encoder = parser.add_argument_group("encoder")
    add = partial(add_option, encoder)
    add("--encoder NAME", "hashed, a model folder or a hub name", "hashed")
    add("--device DEVICE", "cpu (default) or cuda")
    add("--encoder-dtype DTYPE", "of the model's weights: float32 (default), ...")
    add("--backend BACKEND", "torch (default) or onnx")
    add("--batch N", "passages per pass of the model", kind=int)
    add("--max-length N", "tokens of a passage (default 256)", kind=int)
    add("--pooling POOLING", "instead of the family's")
    add("--family FAMILY", "instead of the one that the name says: e5, bge, ...")
    encoder.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="any other option of the encoder",
    )
    add = partial(add_option, parser.add_argument_group("what is stored"))
    add("--dtype DTYPE", "of the embeddings: float32 or float16", "float32")
    add("--keep-embeddings", "beside a faiss index, for re-scoring (refine)")
    add("--checkpoint-s S", "seconds between copies of a growing index", 600.0)
    recall = "of IVF and HNSW: search as far as recall@10 takes (default 0.95, where affordable)"
    add("--recall R", recall, kind=float)
    add("--plan", "print what it will need, and stop")
    add = partial(add_option, parser.add_argument_group("qdrant"))
    add("--url URL", "of a server; without one the collection is embedded in --out")
    add("--collection NAME", "of a server", "default_collection")
    add("--api-key KEY", "default: QDRANT_API_KEY")
    add("--grpc-port PORT", "gRPC there (6334) instead of REST", kind=int)
    add("--engine ENGINE", "of an embedded collection: edge or local", "edge")


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
    _print_plan(args.index, corpus, encoder)
    if args.plan:
        return 0
    start = time.monotonic()
    request = BuildRequest(
        kind=args.index,
        encoder=encoder,
        dtype=args.dtype,
        keep_embeddings=args.keep_embeddings,
        checkpoint_s=args.checkpoint_s,
        recall=args.recall,
    )
    meta = build_index(corpus, folder, request, progress)
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
    name = meta.kind if meta.kind in ("torch", "bm25") else "faiss"
    _print_use(args.corpus, f"name: {name}, path: {folder}")
    return 0


def _build_collection(
    args: argparse.Namespace, corpus: Any, component: dict[str, Any], progress: ProgressLine
) -> int:
    from rlflow_environments.retrieval.encoders import make_encoder
    from rlflow_environments.retrieval.indices.qdrant import ENGINES
    from rlflow_environments.retrieval.indices.qdrant_build import build_folder, fill
    from rlflow_environments.retrieval.indices.qdrant_collections import connect

    if args.engine not in ENGINES:
        raise ConfigError(f"--engine: expected {' or '.join(ENGINES)}, found '{args.engine}'.")
    encoder = make_encoder(component, corpus)
    if args.url is None:
        folder = _folder(args)
        build_folder(corpus, folder, encoder, args.engine, progress)
        where = f"path: {folder}"
    else:
        collection = connect(
            args.url,
            args.collection,
            api_key=args.api_key,
            grpc_port=args.grpc_port,
            timeout_s=60.0,
            tries=5,
            create=encoder.dimensions,
        )
        added = fill(collection, encoder, corpus, progress)
        print(
            f"{args.url}: collection {args.collection}, {len(corpus):,} points, {added:,} of them "
            "new"
        )
        where = f"url: {args.url}, collection: {args.collection}"
        if component["name"] != "hashed":
            where += f", encoder: {component['name']}"
    _print_use(args.corpus, f"name: qdrant, {where}")
    return 0


def _print_use(corpus: str, retriever: str) -> None:
    print(f"use it with\n  environment.corpus={corpus} environment.retriever='{{{retriever}}}'")


def _print_plan(kind: str, corpus: Any, encoder: dict[str, Any]) -> None:
    """Prints the memory, beside the encoder's, and the disk that a build will take."""
    import psutil

    from rlflow_environments.retrieval.encoders.make import dimensions_of
    from rlflow_environments.retrieval.indices.dense import BLOCK
    from rlflow_environments.retrieval.indices.faiss_index import bytes_per_vector

    if kind == "bm25":
        memory = 10.0 * corpus.path.stat().st_size  # measured on English text
        disk = memory / 4
    else:
        dimensions = dimensions_of(encoder)
        memory, disk = 12.0 * BLOCK * dimensions + 64e6, 4.0 * dimensions * len(corpus)
        if kind != "torch":
            stored = bytes_per_vector(kind, dimensions) * len(corpus)
            disk += stored
            memory += 0 if kind == "Flat" else 2 * stored  # a vector that grows is there twice
    free = psutil.virtual_memory().available
    print(
        f"{len(corpus):,} passages, index {kind}: will need about {memory / 1e9:.2f} GB of memory "
        f"beside the encoder's ({free / 1e9:.2f} GB are free) and {disk / 1e9:.2f} GB of disk "
        "while it builds",
        file=sys.stderr,
    )
    if memory > free:
        print(
            "warning: that is more than is free. SQ8 takes a quarter of Flat; Flat and torch are "
            "built in a few hundred megabytes.",
            file=sys.stderr,
        )


def _encoder(args: argparse.Namespace) -> dict[str, Any]:
    import yaml

    given = {
        "name": args.encoder,
        "device": args.device,
        "dtype": args.encoder_dtype,
        "backend": args.backend,
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


def _folder(args: argparse.Namespace) -> Path:
    if not args.out:
        raise ConfigError("--out: expected the folder that the index is written to.")
    return Path(args.out).expanduser()
