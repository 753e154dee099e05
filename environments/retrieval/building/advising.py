"""Which index fits: memory by arithmetic, speed by what a scan has to read, against this machine's measured bandwidth and
arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlflow_environments.retrieval.indices.cost import parse_kind, serving_bytes

_BATCH = 64
_USABLE = 0.9  # of the memory that is given
_GPU_SCRATCH = 2 << 30  # encoder, CUDA context, scores of a tile
_PROBED = 64  # lists of an IVF index per list that is searched (IVF4096 with nprobe 64)
_EF_SEARCH = 128
_RANDOM_ACCESS = 0.25  # bandwidth of vectors read one by one, relative to a scan
_MEASURED_BYTES = 256 << 20
_MEASUREMENTS = 6
_SPREAD = 1.6  # of measurements on a machine that does nothing else; on a busy one some are several times slower
_BUSY = 0.5  # runnable processes per core, beside this one
_SLOW = 3e9  # bytes/s: less than any machine of the last decade gives when nobody else reads


@dataclass(frozen=True)
class Machine:
    """What a scan runs on. ram, vram: bytes; bandwidth: bytes/s; arithmetic: multiply-adds x 2 per second. spread: of the slowest
    measurement to the fastest; 1 on a machine that does nothing else."""

    ram: float
    vram: float
    cpu_bandwidth: float
    cpu_arithmetic: float
    gpu_bandwidth: float = 2.0e12  # A100-80
    gpu_arithmetic: float = 1.5e14  # half of its dense float16 peak
    spread: float = 1.0


@dataclass(frozen=True)
class IndexOption:
    """An index and what it would take. recall: typical for text embeddings, at 10. qps: of search alone, in batches of 1 and
    64."""

    label: str
    build: str
    retriever: str
    memory: float
    on_gpu: bool
    recall: float
    qps_alone: float
    qps_batched: float
    fits: bool


def measure_machine(ram: float, vram: float) -> Machine:
    """The machine with its read bandwidth and float32 matrix products measured, in about a second."""
    block = torch.ones(_MEASURED_BYTES // 4)
    left, right = torch.ones(4096, 768), torch.ones(768, _BATCH)
    reads = [_seconds(block.sum) for _ in range(_MEASUREMENTS)]
    products = [_seconds(lambda: left @ right) for _ in range(_MEASUREMENTS)]
    arithmetic = 2 * left.numel() * _BATCH / min(products)
    spread = max(max(reads[1:]) / min(reads), max(products[1:]) / min(products))  # the first also warms up
    return Machine(ram, vram, _MEASURED_BYTES / min(reads), arithmetic, spread=spread)


def disturbance(machine: Machine, load: float, cores: int) -> str:
    """Why what was measured is not what the machine can do, in words; empty where nothing speaks against it. load: runnable
    processes, as `os.getloadavg` has them."""
    signs = []
    if load > _BUSY * cores:
        signs.append(f"{load:.1f} processes want its {cores} core{'' if cores == 1 else 's'}")
    if machine.spread > _SPREAD:
        signs.append(f"the same measurement took up to {machine.spread:.1f} times as long")
    if machine.cpu_bandwidth < _SLOW:
        signs.append(f"{machine.cpu_bandwidth / 1e9:.1f} GB/s is less than memory of today gives")
    return "; ".join(signs)


def candidates(count: int, dimensions: int, machine: Machine) -> list[IndexOption]:
    """Every kind of index for a corpus, exact ones first. count: passages."""
    lists = _lists(count)
    ivf, probed = f"IVF{lists},SQ8", max(1, lists // _PROBED)
    found = [
        _scan("torch, float32", "torch", "{name: torch}", 4, count, dimensions, machine),
        _scan("torch, bfloat16 scan", "torch", "{name: torch, dtype: bfloat16}", 2, count, dimensions, machine),
        _approximate("SQ8", "SQ8", "{name: faiss}", 0.98, 1.0, count, dimensions, machine),
        _approximate(ivf, ivf, f"{{name: faiss, nprobe: {probed}}}", 0.95, probed / lists, count, dimensions, machine),
        _graph(count, dimensions, machine),
    ]
    if machine.vram:
        on_gpu = [
            _scan(
                "torch on GPU, float32", "torch", "{name: torch, device: cuda}", 4, count, dimensions, machine, gpu=True
            ),
            _scan(
                "torch on GPU, float16 scan",
                "torch",
                "{name: torch, device: cuda, dtype: float16}",
                2,
                count,
                dimensions,
                machine,
                gpu=True,
            ),
        ]
        found = [*on_gpu, *found]
    return found


def advise(found: Sequence[IndexOption], qps: float) -> IndexOption | None:
    """The index to take: of those that fit and reach `qps` in batches the one with the best recall, on the CPU if one there does;
    where none reaches it the fastest that fits; None where none fits."""
    fitting = [option for option in found if option.fits]
    enough = [option for option in fitting if option.qps_batched >= qps]
    if enough:
        return min(enough, key=lambda option: (-option.recall, option.on_gpu))  # of equals the plainest, which comes first
    return max(fitting, key=lambda option: option.qps_batched, default=None)


def _scan(
    label: str,
    build: str,
    retriever: str,
    width: int,
    count: int,
    dimensions: int,
    machine: Machine,
    *,
    gpu: bool = False,
) -> IndexOption:
    """Every vector is read once per batch; a batch is bound by arithmetic."""
    held = float(count * dimensions * width)
    bandwidth, arithmetic = (
        (machine.gpu_bandwidth, machine.gpu_arithmetic) if gpu else (machine.cpu_bandwidth, machine.cpu_arithmetic)
    )
    alone = bandwidth / held
    batched = min(_BATCH * alone, arithmetic / (2.0 * count * dimensions))
    room = _USABLE * (machine.vram - _GPU_SCRATCH) if gpu else _USABLE * machine.ram
    return IndexOption(label, build, retriever, held, gpu, 1.0, alone, max(alone, batched), held <= room)


def _approximate(
    label: str, build: str, retriever: str, recall: float, share: float, count: int, dimensions: int, machine: Machine
) -> IndexOption:
    """faiss reads the codes of a share of the vectors for every query of a batch anew."""
    kind = parse_kind(build, dimensions)
    memory = serving_bytes(kind, count, dimensions)
    read = count * kind.code_bytes * share + 4.0 * kind.lists * dimensions
    qps = machine.cpu_bandwidth / read
    return IndexOption(label, build, retriever, memory, False, recall, qps, qps, memory <= _USABLE * machine.ram)


def _graph(count: int, dimensions: int, machine: Machine) -> IndexOption:
    """A walk over about ef x M vectors, each somewhere else."""
    kind = parse_kind("HNSW32", dimensions)
    memory = serving_bytes(kind, count, dimensions)
    read = min(count, _EF_SEARCH * kind.links) * 4.0 * dimensions
    qps = _RANDOM_ACCESS * machine.cpu_bandwidth / read
    retriever = f"{{name: faiss, ef_search: {_EF_SEARCH}}}"
    return IndexOption("HNSW32", "HNSW32", retriever, memory, False, 0.97, qps, qps, memory <= _USABLE * machine.ram)


def _lists(count: int) -> int:
    """The largest power of two up to 4 sqrt(N), and up to 4096, which the field uses for 21 million passages."""
    wanted = max(1.0, 4.0 * count**0.5)
    power = 1
    while power * 2 <= wanted and power < 4096:
        power *= 2
    return power


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
