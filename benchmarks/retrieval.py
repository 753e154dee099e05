"""Queries per second of every kind of index, alone and in batches, with the recall of the approximate ones beside it.

    python benchmarks/retrieval.py [--quick] [--passages 200000] [--dimensions 384] [--threads 2]

Vectors are clustered at random, as text embeddings are, and queries are distinct; the encoder is left out. The rounds are
interleaved, so that whatever else the machine does touches every index alike. The bound of a flat scan is the time to read
every vector once, by the fastest read of the same bytes that was measured in the same rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import faiss
import numpy as np
import torch

from rlflow_environments.retrieval.indices.dense import DenseIndex
from rlflow_environments.retrieval.indices.faiss_index import new_index

BASELINE = "faiss Flat"
BATCHES = (1, 16, 64, 256)
TOP_K = 10


def main() -> None:
    """Builds, measures, prints the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small corpus, under a minute")
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.passages, args.rounds = min(args.passages, 20_000), 3
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    vectors = clustered(args.passages, args.dimensions, seed=0)
    queries = clustered(max(BATCHES), args.dimensions, seed=1)
    indices = build(vectors, hnsw=args.quick)
    exact = rows_of(indices[BASELINE], queries)
    recall = {name: overlap(rows_of(index, queries), exact) for name, index in indices.items()}
    seconds, read = measure(indices, queries, vectors, args.rounds)
    report(args, indices, recall, seconds, read, vectors.nbytes)


def clustered(count: int, dimensions: int, seed: int) -> np.ndarray:
    """(count, dimensions) float32 unit vectors around 1,000 centres."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(42).standard_normal((1000, dimensions), dtype=np.float32)
    vectors = centres[generator.integers(1000, size=count)]
    vectors += generator.standard_normal((count, dimensions), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def build(vectors: np.ndarray, *, hnsw: bool) -> dict[str, DenseIndex]:
    """The indices by name. HNSW takes minutes to build for 200,000 vectors on two cores, and is left to --quick."""
    lists = 1024 if len(vectors) >= 100_000 else 128
    encoder = SimpleNamespace(dimensions=vectors.shape[1])  # vectors are given
    made: dict[str, DenseIndex] = {
        BASELINE: DenseIndex(encoder, filled("Flat", vectors)),
        "SQ8": DenseIndex(encoder, filled("SQ8", vectors)),
        "SQfp16": DenseIndex(encoder, filled("SQfp16", vectors)),
    }
    ivf = filled(f"IVF{lists},SQ8", vectors)
    made[f"IVF{lists},SQ8 nprobe {lists // 64}"] = DenseIndex(encoder, ivf, nprobe=lists // 64)
    ivf = filled(f"IVF{lists},Flat", vectors)
    made[f"IVF{lists},Flat nprobe {lists // 16}"] = DenseIndex(encoder, ivf, nprobe=lists // 16)
    if hnsw:
        made["HNSW32 ef 128"] = DenseIndex(encoder, filled("HNSW32", vectors), ef_search=128)
    return made


def filled(factory: str, vectors: np.ndarray) -> faiss.Index:
    """A trained index that holds the vectors."""
    index = new_index(factory, vectors.shape[1])
    if not index.is_trained:
        index.train(vectors[:: max(1, len(vectors) // 65_536)])
    index.add(vectors)
    return index


def rows_of(index: DenseIndex, queries: np.ndarray) -> list[set[int]]:
    """The rows found for each query."""
    return [{row for row, _ in ranking} for ranking in index.rank_vectors(queries, TOP_K)]


def overlap(found: list[set[int]], exact: list[set[int]]) -> float:
    """Recall@10: the share of the exact rows that was found."""
    return statistics.fmean(
        len(one & other) / TOP_K for one, other in zip(found, exact, strict=True)
    )


def measure(
    indices: dict[str, DenseIndex], queries: np.ndarray, vectors: np.ndarray, rounds: int
) -> tuple[dict[str, dict[int, list[float]]], list[float]]:
    """(seconds per search by index and batch, one per round; seconds of the fastest read of all vectors, one per round)."""
    seconds: dict[str, dict[int, list[float]]] = {
        name: {batch: [] for batch in BATCHES} for name in indices
    }
    tensor = torch.from_numpy(vectors)
    read: list[float] = []
    for turn in range(rounds + 1):  # the first one warms up
        reads = [timed(tensor.sum), timed(tensor.amax), timed(tensor.sum)]
        for name, index in indices.items():
            for batch in BATCHES:
                took = min(
                    timed(
                        lambda index=index, batch=batch, at=at: index.rank_vectors(
                            queries[at : at + batch], TOP_K
                        )
                    )
                    for at in range(
                        len(indices) + 3 if batch == 1 else 1
                    )  # as often as all is read
                )
                if turn:
                    seconds[name][batch].append(took)
            reads.append(timed(tensor.sum))
        if turn:
            read.append(min(reads))
    return seconds, read


def timed(action: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def report(
    args: argparse.Namespace,
    indices: dict[str, DenseIndex],
    recall: dict[str, float],
    seconds: dict[str, dict[int, list[float]]],
    read: list[float],
    size: int,
) -> None:
    """Prints the table, ratios against the baseline and the bound, and the figures as JSON."""
    versions = {
        "torch": torch.__version__,
        "faiss": faiss.__version__,
        "python": platform.python_version(),
    }
    best_read = min(read)
    print(
        f"{args.passages:,} x {args.dimensions} float32, {args.threads} threads, {args.rounds} interleaved rounds, best of them"
    )
    print(
        f"bound of a flat scan: {1 / best_read:.1f} passes/s ({size / best_read / 1e9:.1f} GB/s read)   {versions}"
    )
    heads = "".join(f"{f'q/s at {batch}':>12}" for batch in BATCHES)
    print(f"\n{'index':42}{'recall@10':>10}{heads}{'of bound':>10}{f'x {BASELINE} at 64':>22}")
    rows = {}
    for name in indices:
        qps = {batch: batch / min(seconds[name][batch]) for batch in BATCHES}
        # Meaningful for indices that read all float32 vectors.
        of_bound = statistics.median(
            bound / took for bound, took in zip(read, seconds[name][1], strict=True)
        )
        ratio = qps[64] / (64 / min(seconds[BASELINE][64]))
        rows[name] = {
            "recall": recall[name],
            "qps": qps,
            "of_bound_alone": of_bound,
            "vs_baseline_at_64": ratio,
        }
        shown = f"{of_bound:>10.0%}" if name == BASELINE else f"{'':>10}"
        numbers = "".join(f"{qps[batch]:>12.1f}" for batch in BATCHES)
        print(f"{name:42}{recall[name]:>10.3f}{numbers}{shown}{ratio:>21.1f}x")
    figures = {
        "passages": args.passages,
        "dimensions": args.dimensions,
        "threads": args.threads,
        "read_gb_per_s": size / best_read / 1e9,
        "indices": rows,
        "versions": versions,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
