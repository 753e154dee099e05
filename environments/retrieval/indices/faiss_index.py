"""faiss: indices by factory strings, memory-mapped files, GPUs, how far an approximate index
searches and the recall that was measured there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil

from rlflow.errors import ConfigError, DataError, install_command, needing
from rlflow_environments.retrieval.corpus import Passage

READ_BYTES = 1 << 30
UNMEASURED = {"nprobe": 16, "ef_search": 64}
"""How far an index is searched that nobody measured; faiss itself: one list, 16 neighbours."""


def import_faiss() -> ModuleType:
    """The module faiss. Raises MissingPackageError."""
    with needing("retriever faiss", install_command("search")):
        import faiss
    return faiss


def new_index(factory: str, dimensions: int) -> Any:
    """An empty index of a factory string, metric inner product. Raises ConfigError for a string
    that faiss refuses."""
    faiss = import_faiss()
    try:
        return faiss.index_factory(dimensions, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as problem:
        raise ConfigError(
            f"index: '{factory}' is not an index_factory string that faiss takes for {dimensions} "
            f"dimensions ({_reason(problem)}). Examples: Flat, SQ8, SQfp16, HNSW32, IVF1024,Flat, "
            "IVF4096,SQ8."
        ) from None


def read_index(path: Path, *, mmap: bool) -> Any:
    """The index of a file; with `mmap` its vectors stay on disk and are shared by all processes,
    but for those of a small flat one. Raises DataError."""
    faiss = import_faiss()
    try:
        with path.open("rb") as file:
            kind = file.read(4)
        if kind == b"IxFI" and path.stat().st_size <= READ_BYTES:
            mmap = False  # scanned faster in memory, see `scan`
        # Inverted lists and flat codes have a flag each.
        lists = kind.startswith(b"Iw")
        flags = (faiss.IO_FLAG_MMAP if lists else faiss.IO_FLAG_MMAP_IFC) if mmap else 0
        index = faiss.read_index(str(path), flags)
        ivf = faiss.try_extract_index_ivf(index)
        mapped = ivf and faiss.downcast_InvertedLists(ivf.invlists)
        # faiss starts 32 threads per search that read mapped lists ahead: a help for a file that
        # memory does not hold, more than half of the time of a search for one that it holds.
        held = path.stat().st_size < psutil.virtual_memory().available
        if held and isinstance(mapped, faiss.OnDiskInvertedLists):
            mapped.prefetch_nthread = 0
        return index
    except OSError as problem:
        found = f"none ({problem.strerror})"
    except RuntimeError as problem:
        found = f"something else ({_reason(problem)})"
    raise DataError(f"{path}: expected a faiss index, found {found}. Build it again.")


def write_index(index: Any, path: Path) -> None:
    """Raises DataError where the disk does not take it."""
    try:
        import_faiss().write_index(index, str(path))
    except RuntimeError as problem:
        raise DataError(
            f"{path}: the index cannot be written ({_reason(problem)}). Is the disk full?"
        ) from None


def stored_vectors(index: Any, rows: Sequence[int]) -> tuple[np.ndarray, bool] | None:
    """((len(rows), D) float32 as the index keeps them, whether as they were or in eight bits per
    number at the least); None for kinds that cannot tell."""
    faiss = import_faiss()
    ivf = faiss.try_extract_index_ivf(index)
    try:
        if ivf is not None:
            ivf.make_direct_map()  # where each row is filed; reads ids, not vectors
        found = np.empty((len(rows), index.d), np.float32)
        for place, row in enumerate(rows):
            found[place] = index.reconstruct(row)
    except RuntimeError:
        return None
    finally:
        if ivf is not None:
            ivf.set_direct_map_type(faiss.DirectMap.NoMap)
    if isinstance(index, (faiss.IndexFlat, faiss.IndexIVFFlat, faiss.IndexHNSWFlat)):
        return found, True
    codes = faiss.ScalarQuantizer
    fine = (codes.QT_8bit, codes.QT_8bit_uniform, codes.QT_fp16)
    return found, getattr(getattr(index, "sq", None), "qtype", None) in fine


@dataclass(frozen=True)
class SearchKnob:
    """What decides how far an approximate index searches. owner.attribute: where it stands; most:
    its largest value."""

    name: str
    owner: Any
    attribute: str
    most: int

    @property
    def value(self) -> int:
        """As it is set."""
        return int(getattr(self.owner, self.attribute))

    def set(self, value: int) -> None:
        """Searches that far from now on, or as far as there is anything."""
        setattr(self.owner, self.attribute, min(value, self.most))


def knob_of(index: Any) -> SearchKnob | None:
    """`nprobe` of an IVF index, behind a transform too, `ef_search` of HNSW; None of the others."""
    faiss = import_faiss()
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        return SearchKnob("nprobe", ivf, "nprobe", int(ivf.nlist))
    if isinstance(index, faiss.IndexHNSW):
        return SearchKnob("ef_search", index.hnsw, "efSearch", max(1, int(index.ntotal)))
    return None


def set_parameters(index: Any, nprobe: int | None, ef_search: int | None) -> dict[str, int]:
    """Sets how far the index searches, and returns it."""
    knob = knob_of(index)
    for name, value, kind in (("nprobe", nprobe, "IVF"), ("ef_search", ef_search, "HNSW")):
        if value is not None and (knob is None or knob.name != name):
            raise ConfigError(
                f"retriever faiss.{name}: only an {kind} index has it; this one is "
                f"{type(index).__name__}. Remove it."
            )
    if knob is None:
        return {}
    guess = max(UNMEASURED[knob.name], knob.value)
    if knob.name == "nprobe":  # what the field searches of IVF4096: one list in 64
        guess = knob.value if knob.value > 1 else max(guess, knob.most // 64)
    knob.set(nprobe or ef_search or guess)
    return {knob.name: knob.value}


def to_gpus(index: Any) -> Any:
    """A copy on every visible GPU's share, in float16. Raises ConfigError without one."""
    faiss = import_faiss()
    if not hasattr(faiss, "GpuMultipleClonerOptions"):
        raise ConfigError(
            "retriever faiss.gpu: this faiss has no GPU support. Replace it: pip uninstall "
            f"faiss-cpu, then {install_command('search-gpu')}"
        )
    if not faiss.get_num_gpus():
        raise ConfigError("retriever faiss.gpu: faiss sees no GPU here. Remove the option.")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)


def _reason(problem: RuntimeError) -> str:
    """What faiss says, without where in its source."""
    return str(problem).rpartition(": ")[2].partition("\n")[0][:200]


TOP_K = 10
QUERIES = 200
TARGET = 0.95
WORDS = 8
AFFORDABLE_VECTORS = 20_000  # of an IVF index: a few milliseconds
AFFORDABLE_EF = 512
SAME = 0.005  # recall that is not worth twice the time


def sample_queries(corpus: Sequence[Passage]) -> list[str]:
    """Eight words from the middle of passages spread over the corpus: harder to find than a title,
    as questions are."""
    count = min(QUERIES, len(corpus))
    bodies = [corpus[place * len(corpus) // count].body.split() for place in range(count)]
    return [" ".join(words[len(words) // 2 :][:WORDS]) for words in bodies if words]


def measure_recall(
    index: Any, queries: np.ndarray, exact: Iterator[np.ndarray], target: float | None
) -> dict[str, Any] | None:
    """What an index folder says of its recall, see IndexMeta.search; None for an index that has
    nothing to set.

    queries: (Q, dimensions). exact: the vectors of the index block after block, row 0 first.
    target: recall@10 to reach, whatever it costs; None: TARGET, as far as searching a quarter of
    the lists, or 512 neighbours, gets.
    """
    faiss = import_faiss()
    from faiss.contrib.evaluation import knn_intersection_measure
    from faiss.contrib.exhaustive_search import knn_ground_truth

    knob = knob_of(index)
    queries = queries[queries.any(axis=1)]
    if knob is None or not len(queries):
        return None
    top_k = min(TOP_K, int(index.ntotal))
    nearest = knn_ground_truth(queries, exact, top_k, faiss.METRIC_INNER_PRODUCT)[1]
    wanted = TARGET if target is None else target
    recalls: dict[int, float] = {}
    for value in _ladder(knob.name, knob.most, int(index.ntotal), affordable=target is None):
        knob.set(value)
        recalls[value] = round(
            float(knn_intersection_measure(index.search(queries, top_k)[1], nearest)), 3
        )
        if recalls[value] >= wanted:
            break
    enough = min(wanted, max(recalls.values()) - SAME)
    chosen = next(value for value, recall in recalls.items() if recall >= enough)
    measured = {str(value): recall for value, recall in recalls.items()}
    return {knob.name: chosen, "target": wanted, "queries": len(queries), "recall": measured}


def _ladder(name: str, most: int, count: int, *, affordable: bool) -> list[int]:
    """Powers of two up to `most`, or to what is affordable."""
    if affordable:
        lists = max(most // 4, most * AFFORDABLE_VECTORS // count)
        most = min(most, lists if name == "nprobe" else AFFORDABLE_EF)
    least = 1 if name == "nprobe" else TOP_K  # HNSW never looks at fewer than it returns
    return sorted({min(max(2**power, least), most) for power in range(most.bit_length() + 1)})


def describe_recall(
    measured: Mapping[str, Any] | None, searched: Mapping[str, int]
) -> tuple[str, bool]:
    """(one line on the recall of an index that searches so far, whether it deserves a warning).
    measured: IndexMeta.search."""
    ((name, value),) = searched.items()
    if measured is None or name not in measured:
        return (
            f"{name} {value}, a guess: the recall of this index was never measured. Set {name} to "
            "search further",
            True,
        )
    known = [int(text) for text in measured["recall"] if int(text) <= value]
    if not known:
        return f"{name} {value}: less than was measured", True
    recall = measured["recall"][str(max(known))]
    count = measured["queries"]
    told = f"{name} {value}: recall@{TOP_K} {recall:.2f} of {count} queries from the corpus"
    if recall >= measured["target"]:
        return told, False
    return (
        f"{told}, below {measured['target']:g}. Set {name} higher, or build another index",
        True,
    )
