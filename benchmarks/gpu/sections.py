"""The sections of run.py, each a function (device, quick) -> rows of figures; one runs in a process of its own. Raises
Skipped."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import SHAPES, write_random_model
from flops import training_flops
from train_step import make_batch, policy_gradient

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
PACK = (2048, 1536, 1024, 1024, 896, 640, 512, 384, 128)  # tokens of rows that fill a micro-batch of 8,192
QUICK_PACK = (48, 16)
UPDATES = 3  # counted, after one that warms up
GB = 1e9


class Skipped(Exception):
    """A section, or a part of it, that cannot run here; the text says why."""


def need(*packages: str) -> None:
    """Raises Skipped where a package is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"not installed: {', '.join(missing)}")


@contextmanager
def random_model(name: str, device: str, dtype: str) -> Iterator[Path]:
    """A directory with random weights, in memory where there is room for it."""
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="rlflow-gpu-") as folder:
        write_random_model(Path(folder), SHAPES[name], dtype, device, eos_token_id=None)
        yield Path(folder)


def synchronized(device: str) -> float:
    """The time, once the device has done what it was given."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def matrix(device: str, quick: bool) -> list[Row]:
    """The matrix rate that this device reaches: bfloat16 products of square matrices, the best of several sizes."""
    import torch

    best = 0.0
    for size in (256,) if quick else (4096, 8192, 16384):
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        left @ right
        repeats, started = (2 if quick else 20), synchronized(device)
        for _ in range(repeats):
            left @ right
        best = max(best, 2 * size**3 * repeats / (synchronized(device) - started))
    return [{"what": "bfloat16 products", "figure": best / 1e12, "unit": "TFLOP/s"}]


def train(device: str, quick: bool, model: str, layers: str, adapters: bool) -> list[Row]:
    """Packed updates of the Megatron trainer alone: tokens/s, and model FLOP/s (recomputed activations count nothing; of adapters
    the backward pass has no products for the frozen weights, so two thirds of the operations count)."""
    need("megatron")
    if layers == "te":
        need("transformer_engine")
    from rlflow.trainer.base import Trainer
    from rlflow.trainer.options import TrainerOptions

    if adapters and not hasattr(TrainerOptions(), "lora"):
        raise Skipped("this version has no trainer.lora")
    os.environ["RLFLOW_LAYERS"] = "auto" if layers == "te" else "local"
    shape, lengths = SHAPES[model], (QUICK_PACK if quick else PACK) * 2
    options: dict[str, Any] = {"lora": {"rank": 64}} if adapters else {}
    with random_model(model, device, "float32" if device == "cpu" else "bfloat16") as path:
        trainer = Trainer.from_pretrained(
            path, lr=1e-5, packing=True, tokens_per_microbatch=sum(lengths) // 2, recompute="selective",
            dtype="float32" if device == "cpu" else "bfloat16", **options,
        )  # fmt: skip
        batch = make_batch(lengths, shape.vocab)
        trainer.update(batch, policy_gradient)
        started = synchronized(device)
        for _ in range(UPDATES):
            trainer.update(batch, policy_gradient)
        each_s = (synchronized(device) - started) / UPDATES
        peak_gib = _peak_gib(device)
        trainer.close()
    operations = training_flops(shape, lengths, sum(lengths) - len(lengths)) * (2 / 3 if adapters else 1)
    name = f"{model} {'LoRA 64' if adapters else 'all weights'}, {'Transformer Engine' if layers == 'te' else 'local layers'}"
    return [
        {"what": f"train {name}", "figure": sum(lengths) / each_s, "unit": "tokens/s", "flops_per_s": operations / each_s,
         "peak_gib": peak_gib},
    ]  # fmt: skip


def _peak_gib(device: str) -> float | None:
    import torch

    return None if device == "cpu" else torch.cuda.max_memory_reserved() / 2**30


def decode(device: str, quick: bool, engine: str, model: str, concurrency: int) -> list[Row]:
    """Tokens decoded per second with so many sequences at a time, short prompts."""
    need("transformers")
    from rlflow.components import ENGINE
    from rlflow.rollout.engine import Sampling

    if engine not in ENGINE.names():
        raise Skipped(f"this version has no engine {engine}")
    if engine == "vllm" and not os.environ.get("RLFLOW_VLLM_PYTHON"):
        need("vllm")
    length, prompt = (8, 8) if quick else (256, 128)
    dtype = "float32" if device == "cpu" else "bfloat16"
    with random_model(model, device, dtype) as path:
        options = {"max_concurrency": concurrency, "max_tokens": prompt + length, "dtype": dtype}
        made = ENGINE.build({"name": engine, **options}, path=path)
        one = made[0] if isinstance(made, list) else made
        prompts = [[(row * 131 + place) % 1000 + 1 for place in range(prompt)] for row in range(concurrency)]

        async def play(number: int) -> None:
            await asyncio.gather(
                *(one.generate(p, Sampling(length), f"{number}/{row}") for row, p in enumerate(prompts))
            )
            for row in range(concurrency):
                one.release(f"{number}/{row}")

        async def measure() -> float:
            await play(0)
            started = synchronized(device)
            await play(1)
            spent_s = synchronized(device) - started
            await one.close()
            return spent_s

        spent_s = asyncio.run(measure())
    return [
        {
            "what": f"{engine}: {model}, {concurrency} at a time",
            "figure": concurrency * length / spent_s,
            "unit": "tokens/s",
        }
    ]


def agree(device: str, quick: bool, model: str) -> list[Row]:
    """New weights from the trainer to the embedded engine in GB/s, and how far the log-probs of the two lie apart on what the
    engine samples then: mean absolute difference in nats."""
    need("megatron", "transformers")
    import torch

    from rlflow.batching import token_batch
    from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
    from rlflow.rollout.engine import Sampling
    from rlflow.trainer.base import Trainer

    dtype, rows, length = ("float32" if device == "cpu" else "bfloat16"), (2 if quick else 32), (8 if quick else 256)
    with random_model(model, device, dtype) as path:
        trainer = Trainer.from_pretrained(path, dtype=dtype, packing=True)
        engine = EmbeddedEngine(path, dtype=dtype, max_concurrency=rows, max_tokens=2 * length)

        async def sample() -> tuple[float, list[Any], list[list[int]]]:
            started = synchronized(device)
            await engine.load_weights(trainer.weights(), version=1)
            spent_s = synchronized(device) - started
            prompts = [[(row * 131 + place) % 1000 + 1 for place in range(length)] for row in range(rows)]
            said = [engine.generate(prompt, Sampling(length), f"{row}") for row, prompt in enumerate(prompts)]
            answers = list(await asyncio.gather(*said))
            await engine.close()
            return spent_s, answers, prompts

        spent_s, answers, prompts = asyncio.run(sample())
        size = sum((path / name).stat().st_size for name in os.listdir(path) if name.endswith(".safetensors"))
        batch = token_batch([prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)])
        scores = trainer.score(batch)["logprobs"]
        gaps = torch.cat(
            [
                (scores[row, length : 2 * length] - torch.tensor(answer.logprobs)).abs()
                for row, answer in enumerate(answers)
            ]
        )
        trainer.close()
    return [
        {"what": f"weights to the embedded engine, {model}", "figure": size / spent_s / GB, "unit": "GB/s"},
        {
            "what": f"log-prob gap, {model} {dtype}",
            "figure": float(gaps.mean()),
            "unit": "nats",
            "largest": float(gaps.max()),
        },
    ]


def retrieve(device: str, quick: bool, index: str) -> list[Row]:
    """Searches per second over random vectors, 256 queries at a time, the best 3."""
    import torch

    count, width, queries = (1000, 16, 8) if quick else (1_000_000, 768, 256)
    vectors = torch.nn.functional.normalize(
        torch.randn(count, width, generator=torch.Generator().manual_seed(0)), dim=1
    )
    asked = vectors[:: count // queries][:queries] + 0.01
    if index == "torch":
        held, batch = vectors.to(device), asked.to(device)
        if device != "cpu":
            held, batch = held.half(), batch.half()
        search: Callable[[], Any] = lambda: (batch @ held.T).topk(3, dim=1).indices.cpu()  # noqa: E731
    else:
        need("faiss")
        import faiss

        from rlflow.errors import install_command

        flat = faiss.IndexFlatIP(width)
        if device != "cpu":
            if not hasattr(faiss, "StandardGpuResources"):
                raise Skipped(f"the installed faiss has no GPU part ({install_command('search-gpu')})")
            options = faiss.GpuClonerOptions()
            options.useFloat16 = True
            flat = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), 0, flat, options)
        flat.add(vectors.numpy())
        search = lambda: torch.from_numpy(flat.search(asked.numpy(), 3)[1])  # noqa: E731
    found = search()
    right = float((found[:, 0] == torch.arange(queries) * (count // queries)).float().mean())
    started, rounds = synchronized(device), 3
    for _ in range(rounds):
        search()
    rate = rounds * queries / (synchronized(device) - started)
    return [{"what": f"{index} over {count:,} x {width}", "figure": rate, "unit": "searches/s", "found_itself": right}]


def tests(device: str, quick: bool) -> list[Row]:
    """The tests that need a GPU."""
    need("pytest")
    if device == "cpu":
        raise Skipped("they need a GPU")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return [{"what": f"pytest -m gpu: {last}", "figure": float(done.returncode), "unit": "exit code"}]
