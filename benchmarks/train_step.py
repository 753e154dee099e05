"""Training step: the Megatron trainer against plain transformers and torch, on the same weights, batch and loss.

Prints tokens/s and peak memory of both sides from one interleaved run, medians and spread; docs/benchmarks.md says how to read
them. The last line is one JSON object."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MIB = 2**20
RIVAL, OURS = "transformers", "rlflow"
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    groups: int
    ffn: int
    vocab: int


SHAPES = {
    "tiny": Shape(hidden=128, layers=2, heads=4, groups=2, ffn=384, vocab=4096),
    "18M": Shape(hidden=384, layers=7, heads=6, groups=2, ffn=1024, vocab=18432),
    "93M": Shape(hidden=768, layers=12, heads=12, groups=4, ffn=2048, vocab=22528),
}


@dataclass(frozen=True)
class Case:
    """One comparison. lengths: tokens per row; packed: the trainer lays rows end to end."""

    model: str
    batch: str
    lengths: tuple[int, ...]
    packed: bool

    @property
    def name(self) -> str:
        return f"{self.model} {self.batch}"


def cases(quick: bool) -> list[Case]:
    """Rows of equal length, where neither side pads; and the lengths of agent episodes: many short, one long."""
    if quick:
        equal, skewed = (128,) * 4, (256, 96, 64, 48, 40, 32, 24, 16)
        return [Case("18M", "equal", equal, False), Case("18M", "skewed", skewed, True)]
    equal, skewed = (512,) * 4, (1024, 448, 320, 256, 192, 160, 128, 96)
    return [
        Case(model, batch, lengths, packed)
        for model in ("18M", "93M")
        for batch, lengths, packed in (("equal", equal, False), ("skewed", skewed, True))
    ]


# ---------------------------------------------------------------- what both sides are given


def write_random_model(path: Path, shape: Shape) -> int:
    """A HuggingFace directory with random weights (seed 0); returns its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def make_batch(lengths: tuple[int, ...], vocab: int) -> Any:
    """Random tokens and advantages (seed 0); every token but a row's first is trained with equal weight."""
    import torch

    from rlflow.types import Batch

    draw = torch.Generator().manual_seed(0)
    rows, width = len(lengths), max(lengths)
    positions, sizes = torch.arange(width), torch.tensor(lengths)
    real = positions < sizes[:, None]
    mask = real & (positions >= 1)
    return Batch(
        tokens=torch.randint(0, vocab, (rows, width), generator=draw) * real,
        loss_mask=mask,
        logprobs=torch.zeros(rows, width),
        advantages=torch.randn(rows, width, generator=draw),
        weights=mask / mask.sum(),
        lengths=sizes,
        temperatures=torch.ones(rows),
    )


# ---------------------------------------------------------------- the two sides, each in a process of its own

Step = Callable[[], tuple[float, float]]
"""One optimizer step; returns the loss and the gradient norm before clipping."""


def transformers_step(path: Path, case: Case, fused: bool) -> Step:
    """The usual loop: whole logits, cross-entropy, clipping, AdamW. Attention is causal, so right padding needs no mask."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, **ADAM, fused=fused)
    batch = make_batch(case.lengths, SHAPES[case.model].vocab)

    def step() -> tuple[float, float]:
        logits = model(input_ids=batch.tokens, use_cache=False).logits[:, :-1]
        logprobs = -F.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none")
        loss = -((batch.weights * batch.advantages)[:, 1:].flatten() * logprobs).sum()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        return loss.item(), norm.item()

    return step


def policy_gradient(output: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """-A log p per token."""
    return -batch.advantages * output.logprobs, {}


def rlflow_step(path: Path, case: Case, fused: bool) -> Step:
    from rlflow.trainer import Trainer

    trainer = Trainer.from_pretrained(
        path,
        lr=ADAM["lr"],
        eps=ADAM["eps"],
        weight_decay=WEIGHT_DECAY,
        packing=case.packed,
        tokens_per_microbatch=len(case.lengths) * max(case.lengths),
    )
    batch = make_batch(case.lengths, SHAPES[case.model].vocab)

    def step() -> tuple[float, float]:
        metrics = trainer.update(batch, policy_gradient)
        return metrics["loss"], metrics["gradient_norm"]

    return step


def import_everything(side: str) -> None:
    """What a process of this side imports before it holds any weights."""
    from transformers.utils import logging

    logging.disable_progress_bar()

    if side == OURS:
        import rlflow.trainer.megatron  # noqa: F401
    else:
        from transformers.models.qwen2 import modeling_qwen2  # noqa: F401


def memory(key: str) -> float:
    """MiB of /proc/self/status: VmRSS now, VmHWM at its highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def wanted(pipe: Connection) -> bool:
    """Whether another step is asked for; not where the asking process was killed."""
    try:
        return bool(pipe.recv())
    except EOFError:
        return False


def serve(pipe: Connection, side: str, path: Path, case: Case, threads: int, fused: bool) -> None:
    """A child process: makes its side, then takes a step at each request and answers with what it measured."""
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    import_everything(side)
    Path("/proc/self/clear_refs").write_text("5")  # a peak of the imports is not one of the steps
    baseline = memory("VmRSS")
    step = (rlflow_step if side == OURS else transformers_step)(path, case, fused)
    pipe.send("ready")
    while wanted(pipe):
        wall, cpu = time.perf_counter(), time.process_time()
        loss, norm = step()
        pipe.send(
            {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "loss": loss,
                "gradient_norm": norm,
                "peak_mib": memory("VmHWM") - baseline,
            }
        )


@contextmanager
def child(*arguments: Any) -> Iterator[Connection]:
    """The pipe to a process that serves a side; the process ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        here.recv()
        yield here
        here.send(False)
        process.join(10)
    finally:
        process.kill()


# ---------------------------------------------------------------- the comparison


def compare(case: Case, path: Path, rounds: int, threads: int, fused: bool) -> dict[str, Any]:
    """Both sides take steps in turn, the order changing each round; one step each beforehand is not counted.

    Raises RuntimeError where the sides do not compute the same."""
    taken: dict[str, list[dict[str, float]]] = {RIVAL: [], OURS: []}
    with child(RIVAL, path, case, threads, fused) as rival, child(OURS, path, case, threads, fused) as ours:
        pipes = {RIVAL: rival, OURS: ours}
        for number in range(rounds + 1):
            for side in (RIVAL, OURS) if number % 2 else (OURS, RIVAL):
                pipes[side].send(True)
                taken[side].append(pipes[side].recv())
    for first, second in zip(taken[RIVAL], taken[OURS], strict=True):
        for key in ("loss", "gradient_norm"):
            if abs(first[key] - second[key]) > 1e-3 * max(abs(first[key]), 1e-3):
                raise RuntimeError(f"{case.name}: the sides differ in {key}: {first[key]} and {second[key]}")
    tokens = sum(case.lengths)
    result: dict[str, Any] = {"case": case.name, "tokens": tokens, "rows": len(case.lengths)}
    for side, steps in taken.items():
        result[side] = {
            "tokens_per_s": summary([tokens / step["wall_s"] for step in steps[1:]]),
            "tokens_per_cpu_s": summary([tokens / step["cpu_s"] for step in steps[1:]]),
            "peak_mib": max(step["peak_mib"] for step in steps),
        }
    for ratio, key in (("speedup", "tokens_per_s"), ("speedup_cpu", "tokens_per_cpu_s")):
        result[ratio] = result[OURS][key]["median"] / result[RIVAL][key]["median"]
    result["memory_ratio"] = result[OURS]["peak_mib"] / result[RIVAL]["peak_mib"]
    return result


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def print_result(result: dict[str, Any]) -> None:
    """Three rows of the table: both sides and their ratio."""
    for side in (RIVAL, OURS):
        row = result[side]
        wall, cpu = row["tokens_per_s"], row["tokens_per_cpu_s"]
        print(
            f"{result['case']:<12} {side:<13} {wall['median']:>9.0f} {spread(wall):>12} "
            f"{cpu['median']:>13.0f} {spread(cpu):>12} {row['peak_mib']:>9.0f}"
        )
    print(
        f"{'':<12} {'ratio':<13} {result['speedup']:>8.2f}x {'':>12} {result['speedup_cpu']:>12.2f}x "
        f"{'':>12} {result['memory_ratio']:>8.2f}x",
        flush=True,
    )


def spread(values: dict[str, float]) -> str:
    return f"{values['low']:.0f}..{values['high']:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the 18M model on small batches: under a minute")
    parser.add_argument("--rounds", type=int, help="counted steps per side and case (5; quick: 3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each side (1)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this, e.g. '93M equal'")
    parser.add_argument(
        "--plain-adam", action="store_true", help="give transformers torch's default AdamW, not the fused one"
    )
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    chosen = [case for case in cases(options.quick) if options.only in case.name]
    packages = {name: version(name) for name in ("torch", "transformers", "megatron-core")}
    print(", ".join(f"{name} {number}" for name, number in packages.items()), f"| {options.threads} thread(s) per side")
    columns = ("tokens/s", "low..high", "tokens/CPU-s", "low..high", "peak MiB")
    print("{:<12} {:<13} {:>9} {:>12} {:>13} {:>12} {:>9}".format("case", "side", *columns), flush=True)
    results = []
    with tempfile.TemporaryDirectory() as directory:
        parameters = {}
        for model in dict.fromkeys(case.model for case in chosen):
            parameters[model] = write_random_model(Path(directory) / model, SHAPES[model])
        for case in chosen:
            path = Path(directory) / case.model
            results.append(compare(case, path, rounds, options.threads, not options.plain_adam))
            print_result(results[-1])
    print(
        json.dumps(
            {
                "benchmark": "train_step",
                "versions": {"python": platform.python_version(), **packages},
                "parameters": parameters,
                "threads": options.threads,
                "rounds": rounds,
                "fused_adamw_in_transformers": not options.plain_adam,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
