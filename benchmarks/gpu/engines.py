"""The embedded engine on the device: graphs against steps that run anew, sleep, the gap to the
trainer; and vLLM where it is installed."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from machine import (
    GB,
    Report,
    Skipped,
    last_line,
    model_path,
    need,
    need_gpu,
    precision,
    synchronized,
    weight_bytes,
)

SHARES = (0.05, 0.1, 0.2, 0.3)  # nats: how many tokens lie further apart
PROMPT = 128


def prompts(rows: int, length: int) -> list[list[int]]:
    return [[(row * 131 + place) % 1000 + 1 for place in range(length)] for row in range(rows)]


async def sampled(
    engine: Any, rows: int, prompt: int, tokens: int, temperature: float = 1.0, run: str = ""
) -> list[Any]:
    """Completions of `rows` prompts at once."""
    from rlflow.rollout.engine import Sampling

    asked = enumerate(prompts(rows, prompt))
    calls = [
        engine.generate(text, Sampling(tokens, temperature, seed=row), f"{run}{row}")
        for row, text in asked
    ]
    answers = list(await asyncio.gather(*calls))
    for row in range(rows):
        engine.release(f"{run}{row}")
    return answers


def embedded(report: Report, path: Path, dtype: str, **options: Any) -> Any:
    from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine

    return EmbeddedEngine(path, dtype=dtype, device=report.device, **options)


def difference(left: list[Any], right: list[Any]) -> int:
    """Tokens that are not the same."""
    return sum(
        a != b
        for one, other in zip(left, right)
        for a, b in zip(one.tokens, other.tokens, strict=True)
    )


def graphs(report: Report) -> None:
    """CUDA graphs against steps that run anew, the same tokens; new weights reach the graphs."""
    import torch

    from rlflow.models.huggingface import iterate_weights

    torch.backends.cuda.matmul.allow_tf32 = False
    rows, tokens = (4, 8) if report.quick else (32, 128)
    path, other = (
        model_path(report, "0.5B", "float32"),
        model_path(report, "0.5B", "float32", norm=2.0),
    )
    sizes = {"max_concurrency": rows, "max_tokens": PROMPT + tokens}

    async def play() -> None:
        recorded = embedded(report, path, "float32", cuda_graphs=report.on_gpu or None, **sizes)
        eager = embedded(report, path, "float32", cuda_graphs=False, **sizes)
        for number in range(2):
            pair = [
                await sampled(engine, rows, PROMPT, tokens, run=f"{number}/")
                for engine in (recorded, eager)
            ]
            report.at_most(f"tokens that differ, round {number}", difference(*pair), 0, "tokens")
        await eager.close()
        await recorded.load_weights(iterate_weights(other), 1)
        fresh = embedded(report, other, "float32", cuda_graphs=False, **sizes)
        pair = [
            await sampled(engine, rows, PROMPT, tokens, run="new/") for engine in (recorded, fresh)
        ]
        report.at_most("tokens that differ with new weights", difference(*pair), 0, "tokens")

    asyncio.run(play())


def sleep(report: Report) -> None:
    """Bytes that the engine gives back and takes again, and the same tokens afterwards."""
    rows, tokens = (4, 8) if report.quick else (64, 32)
    path = model_path(report, "1.5B", precision(report))

    async def play() -> None:
        engine = embedded(
            report, path, precision(report), max_concurrency=rows, max_tokens=4096, sleep=True
        )
        before = await sampled(engine, rows, PROMPT, tokens)
        started = synchronized(report)
        freed = await engine.sleep()
        slept = synchronized(report)
        taken = await engine.wake()
        woken = synchronized(report)
        report.row("freed", freed / GB, "GB", seconds=slept - started)
        report.row("taken", taken / GB, "GB", seconds=woken - slept)
        after = await sampled(engine, rows, PROMPT, tokens, run="again/")
        report.at_most("tokens that differ after waking", difference(before, after), 0, "tokens")
        await engine.close()

    asyncio.run(play())


# ---------------------------------------------------------------- the gap to the trainer


def gap(
    report: Report,
    engine: str = "embedded",
    model: str = "1.5B",
    norm: float = 1.0,
    temperature: float = 1.0,
) -> None:
    """New weights from the trainer to the engine in GB/s, and how far log-probs of the two lie
    apart on what the engine samples then. norm: of the last layer; at 8 and 16 logits reach
    about 25 and 50."""
    need("megatron", "transformers")
    from rlflow.trainer.base import Trainer

    dtype, rows, tokens = (
        precision(report),
        (2 if report.quick else 64),
        (8 if report.quick else 128),
    )
    path = model_path(report, model, dtype, norm, tied=False)
    trainer = Trainer.from_pretrained(path, dtype=dtype, packing=True)

    async def play() -> tuple[float, list[Any]]:
        other = make_engine(report, engine, path, dtype, rows, 2 * PROMPT + tokens)
        await sampled(other, rows, PROMPT, 2, run="warm/")
        started = synchronized(report)
        await other.load_weights(trainer.weights(), version=1)
        spent_s = synchronized(report) - started
        answers = await sampled(other, rows, PROMPT, tokens, temperature)
        await other.close()
        return spent_s, answers

    spent_s, answers = asyncio.run(play())
    report.row(f"weights to {engine}", weight_bytes(path) / spent_s / GB, "GB/s", seconds=spent_s)
    histogram(
        report,
        trainer,
        answers,
        rows,
        temperature,
        f"{dtype}, norm {norm:g}, temperature {temperature:g}",
    )
    trainer.close()


def histogram(
    report: Report, trainer: Any, answers: list[Any], rows: int, temperature: float, named: str
) -> None:
    """Mean, quantiles and shares of the absolute differences between engine and trainer."""
    import torch

    from rlflow.batching import token_batch

    batch = token_batch(
        [prompt + one.tokens for prompt, one in zip(prompts(rows, PROMPT), answers, strict=True)]
    )
    batch = batch.replace(temperatures=torch.full((rows,), temperature))
    scores = trainer.score(batch)["logprobs"]
    gaps = torch.cat(
        [
            (scores[row, PROMPT : PROMPT + len(one.logprobs)] - torch.tensor(one.logprobs)).abs()
            for row, one in enumerate(answers)
        ]
    )
    limit = 0.1 if report.on_gpu else 1e-4
    report.at_most(f"mean gap, {named}", gaps.mean(), limit, "nats", tokens=len(gaps))
    for share in (0.5, 0.9, 0.99, 0.999, 1.0):
        report.row(f"gap of {share:.1%} of tokens at most", gaps.quantile(share), "nats")
    for above in SHARES:
        report.row(f"tokens more than {above} apart", (gaps > above).float().mean(), "share")


def make_engine(report: Report, name: str, path: Path, dtype: str, rows: int, tokens: int) -> Any:
    """One engine of that name. Raises Skipped where vLLM is not installed."""
    from rlflow.components import ENGINE

    if name == "vllm" and not os.environ.get("RLFLOW_VLLM_PYTHON"):
        need("vllm")
    options: dict[str, Any] = {"max_concurrency": rows, "max_tokens": tokens, "dtype": dtype}
    if name == "vllm" and report.on_gpu:  # the trainer is there too
        options |= {"sleep": False, "arguments": {"gpu_memory_utilization": 0.4}}
    made = ENGINE.build({"name": name, **options}, path=path)
    return made[0] if isinstance(made, list) else made


# ---------------------------------------------------------------- speed


def decode(report: Report, engine: str, model: str = "3B", rows: int = 128) -> None:
    """Tokens decoded per second, so many sequences at a time, short prompts."""
    rows, tokens = (2, 8) if report.quick else (rows, 256)
    path = model_path(report, model, precision(report))

    async def play() -> float:
        made = make_engine(report, engine, path, precision(report), rows, PROMPT + tokens)
        await sampled(made, rows, PROMPT, tokens, run="warm/")
        started = synchronized(report)
        await sampled(made, rows, PROMPT, tokens)
        spent_s = synchronized(report) - started
        await made.close()
        return spent_s

    report.row(f"{engine}, {rows} at a time", rows * tokens / asyncio.run(play()), "tokens/s")


def vllm_benchmark(report: Report, model: str = "3B", rows: int = 128) -> None:
    """vLLM's own benchmark over the same sizes."""
    python = os.environ.get("RLFLOW_VLLM_PYTHON")
    if not python:
        need("vllm")
    need_gpu(report)
    path, tokens = model_path(report, model, precision(report)), 8 if report.quick else 256
    command = [
        python or "python",
        "-m",
        "vllm.entrypoints.cli.main",
        "bench",
        "throughput",
        "--model",
        str(path),
        "--dataset-name",
        "random",
        "--random-input-len",
        str(PROMPT),
        "--random-output-len",
        str(tokens),
        "--num-prompts",
        str(rows),
        "--max-model-len",
        str(PROMPT + tokens),
        "--skip-tokenizer-init",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"([\d.]+) output tokens/s", done.stdout)
    if not found:
        raise Skipped(f"vllm bench throughput: {last_line(done.stderr)}")
    report.row(f"vllm bench throughput, {rows} at a time", float(found[1]), "tokens/s")
