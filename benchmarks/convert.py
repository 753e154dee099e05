"""Checkpoint conversion against `cp` + fsync of the same bytes, in interleaved pairs on evicted page caches.

    python benchmarks/convert.py --quick            # a small shape, under a minute
    python benchmarks/convert.py [--pairs 5] [--directory DIR]

Makes a checkpoint of the shape of Qwen2.5-3B in bfloat16 (6.2 GB of random weights, as four ranks of TP2 x PP2 store
it), and one of half the layers. Each pair copies the checkpoint with `cp` and fsync, and converts it with
`ckpt_convert to-hf --verify fast`, both as commands of their own, in alternating order; the same for the way back, with
`to-megatron` and a copy of the HuggingFace directory. Three times the bytes of the checkpoint are needed on the disk,
and freed at the end. A ratio is 1 where the conversion takes as long as `cp` and fsync of the bytes that it reads;
"work" leaves out what it takes to start Python."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlflow.models.architecture import architecture, placed_rules  # noqa: E402
from rlflow.models.rules import Split  # noqa: E402

QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SMALL = {
    **QWEN,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "intermediate_size": 2816,
    "vocab_size": 32000,
}
TENSOR_PARALLEL, PIPELINE_PARALLEL = 2, 2
MOST_RSS_MIB = 350


@dataclass
class Run:
    """A finished command: wall-clock seconds, CPU seconds; of a conversion its own count of seconds and of peak resident
    MiB (the kernel's count for a child includes that of its parent at the fork)."""

    seconds: float
    cpu: float
    work: float
    rss_mib: int


def chunks(
    split: Split, shape: Sequence[int], parts: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(tensor-parallel rank, offsets, sizes) of a Megatron tensor's chunks; `parts`: 2 for gate and up, else 1."""
    if split is Split.REPLICATED:
        yield 0, (0,) * len(shape), tuple(shape)
        return
    axis = 1 if split is Split.ROW else 0
    step = shape[axis] // parts // TENSOR_PARALLEL
    for number in range(parts * TENSOR_PARALLEL):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[axis], sizes[axis] = number * step, step
        yield number % TENSOR_PARALLEL, tuple(offsets), tuple(sizes)


def random_bfloat16(draw: np.random.Generator, sizes: Sequence[int]) -> torch.Tensor:
    """Random bits with the highest exponent bit cleared: finite, between -2 and 2, incompressible."""
    bits = draw.integers(0, 1 << 16, size=tuple(sizes), dtype=np.uint16) & np.uint16(0xBFFF)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def make_checkpoint(path: Path, config: dict[str, object], seed: int = 0) -> int:
    """Writes the checkpoint chunk by chunk, as torch.distributed.checkpoint does; returns the bytes of its weights."""
    model, draw = architecture(config), np.random.default_rng(seed)
    path.mkdir(parents=True)
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files = {
        rank: (path / f"__{rank}_0.distcp").open("wb")
        for rank in range(TENSOR_PARALLEL * PIPELINE_PARALLEL)
    }
    total = 0
    for rule, layer in placed_rules(model):
        name = (rule.fused or rule.megatron).replace("{i}.", "")
        shapes = rule.shapes(model)
        shape = (sum(one[0] for one in shapes), *shapes[0][1:])
        lead, full = ((layer,), (model.layers, *shape)) if rule.per_layer else ((), shape)
        entry = tensors.setdefault(
            name, TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(full), [])
        )
        stage = layer * PIPELINE_PARALLEL // model.layers if rule.per_layer else 0
        for rank, offsets, sizes in chunks(
            rule.split, shape, 2 if rule.split is Split.GATE_UP else 1
        ):
            stream = files[stage * TENSOR_PARALLEL + rank]
            start = stream.tell()
            torch.save(random_bfloat16(draw, (*[1] * len(lead), *sizes)), stream)
            place = torch.Size((*lead, *offsets))
            entry.chunks.append(ChunkStorageMetadata(place, torch.Size((*[1] * len(lead), *sizes))))
            places[MetadataIndex(name, place)] = _StorageInfo(
                Path(stream.name).name, start, stream.tell() - start
            )
            total += int(np.prod(sizes)) * 2
    for stream in files.values():
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))
    (path / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return total


def evict(path: Path) -> None:
    """Asks the kernel to forget the cached pages of a directory's files."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run(command: Sequence[str]) -> Run:
    """Runs a command to its end. Raises CalledProcessError where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, stdout=out, env=environment, cwd=ROOT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        out.seek(0)
        text = out.read().decode()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    report = json.loads(text) if text.startswith("{") else {}
    cpu = usage.ru_utime + usage.ru_stime
    return Run(seconds, cpu, report.get("seconds", seconds), report.get("peak_rss_mib", 0))


def copy_command(source: Path, out: Path) -> list[str]:
    return [
        "sh",
        "-c",
        'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +',
        "sh",
        str(source),
        str(out),
    ]


def tool(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "ckpt_convert"), *map(str, arguments)]


def measure(
    folder: Path, config: dict[str, object], args: argparse.Namespace, pairs: int
) -> dict[str, dict[str, object]]:
    """Both directions for one shape; everything that it made is removed."""
    checkpoint, reference, exported, out = (
        folder / name for name in ("checkpoint", "reference", "exported", "out")
    )
    size = make_checkpoint(checkpoint, config)
    reference.mkdir()
    (reference / "config.json").write_text(json.dumps(config))
    options = ["--workers", args.workers, "--verify", args.verify, "--json"]
    export = tool("to-hf", checkpoint, out, "--hf", reference, *options)
    there = compare("to-hf", checkpoint, out, export, size, pairs)
    run(export)
    out.rename(exported)
    shutil.rmtree(checkpoint)
    back = tool(
        "to-megatron", exported, out, "--tp", TENSOR_PARALLEL, "--pp", PIPELINE_PARALLEL, *options
    )
    result = {
        "to-hf": there,
        "to-megatron": compare("to-megatron", exported, out, back, size, pairs),
    }
    shutil.rmtree(folder)
    return result


def compare(
    name: str, source: Path, out: Path, command: Sequence[str], size: int, pairs: int
) -> dict[str, object]:
    """The medians of interleaved pairs of `cp` + fsync and a conversion, both of a source that is not in the cache."""
    commands = {"cp": copy_command(source, out), name: command}
    found: dict[str, list[Run]] = {one: [] for one in commands}
    for pair in range(pairs):
        for one in list(commands)[:: 1 if pair % 2 else -1]:
            evict(source)
            found[one].append(run(commands[one]))
            shutil.rmtree(out)
            print(
                f"  {size / 1e9:.2f} GB, pair {pair + 1} of {pairs}: {one} {found[one][-1].seconds:.1f} s",
                file=sys.stderr,
            )
    base, ours = found["cp"], found[name]
    cp_s, own_s, work_s = (
        statistics.median(times)
        for times in (
            [one.seconds for one in base],
            [one.seconds for one in ours],
            [one.work for one in ours],
        )
    )
    return {
        "gb": round(size / 1e9, 3),
        "cp_s": [round(one.seconds, 2) for one in base],
        "convert_s": [round(one.seconds, 2) for one in ours],
        "work_s": [round(one.work, 2) for one in ours],
        "median_cp_s": round(cp_s, 2),
        "median_s": round(own_s, 2),
        "gb_per_s": round(size / 1e9 / own_s, 3),
        "of_cp": round(cp_s / own_s, 3),
        "of_cp_work": round(cp_s / work_s, 3),
        "cpu_s": round(statistics.median(one.cpu for one in ours), 2),
        "cpu_cp_s": round(statistics.median(one.cpu for one in base), 2),
        "peak_rss_mib": max(one.rss_mib for one in ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small shape and three pairs")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--verify", choices=("fast", "full", "none"), default="fast")
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="where to work (default: the temporary directory)",
    )
    args = parser.parse_args()
    shapes = (
        {"small": SMALL}
        if args.quick
        else {"half of 3B": {**QWEN, "num_hidden_layers": 18}, "Qwen2.5-3B": QWEN}
    )
    with tempfile.TemporaryDirectory(prefix="rlflow-convert-", dir=args.directory) as place:
        needed, free = 0.8e9 if args.quick else 3.2 * 6.2e9, shutil.disk_usage(place).free
        if free < needed:
            sys.exit(
                f"{place}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; pass --directory."
            )
        results = {}
        for name, config in shapes.items():
            pairs = 3 if args.quick else args.pairs if config is QWEN else 2
            results[name] = measure(Path(place) / "work", config, args, pairs)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    columns = (
        "gb",
        "median_cp_s",
        "median_s",
        "gb_per_s",
        "of_cp",
        "of_cp_work",
        "cpu_s",
        "cpu_cp_s",
        "peak_rss_mib",
    )
    print(f"{'shape':<11} {'direction':<11} " + " ".join(f"{name:>12}" for name in columns))
    for shape, directions in results.items():
        for direction, one in directions.items():
            print(
                f"{shape:<11} {direction:<11} "
                + " ".join(f"{one[name]:>12.2f}" for name in columns)
            )
    print(
        json.dumps(
            {
                "workers": args.workers,
                "verify": args.verify,
                "rss_limit_mib": MOST_RSS_MIB,
                "shapes": results,
            }
        )
    )


if __name__ == "__main__":
    main()
