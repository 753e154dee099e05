"""Training step: the Megatron trainer against plain transformers and torch, on the same weights, batch and loss.

Prints tokens/s and peak memory of both sides from one interleaved run, medians and spread; docs/benchmarks.md says how to read
them. The last line is one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import (
    EXPERTS,
    MIB,
    SHAPES,
    Turns,
    interleave,
    spread,
    summary,
    versions,
    write_random_model,
)

RIVAL, OURS, ADAPTERS = "transformers", "rlflow", "rlflow LoRA"
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Case:
    """One comparison. lengths: tokens per row; packed: the trainer lays rows end to end. tokens_per_microbatch: of the
    trainer; None: all rows at once."""

    model: str
    batch: str
    lengths: tuple[int, ...]
    packed: bool
    tokens_per_microbatch: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.batch}"


def cases(quick: bool, moe: bool = False) -> list[Case]:
    """Rows of equal length, where neither side pads; and the lengths of agent episodes: many short, one long."""
    models = tuple(EXPERTS) if moe else ("18M", "93M")
    equal, skewed = (512,) * 4, (1024, 448, 320, 256, 192, 160, 128, 96)
    if quick:
        models, equal, skewed = models[:1], (128,) * 4, (192, 96, 64, 48, 40, 32, 24, 16)
    return [
        Case(model, batch, lengths, packed)
        for model in models
        for batch, lengths, packed in (("equal", equal, False), ("skewed", skewed, True))
    ]


# ---------------------------------------------------------------- what both sides are given


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


@dataclass(frozen=True)
class Setting:
    """What the sides run on. On a GPU in bfloat16, both keep float32 weights in the optimizer. fused: transformers' AdamW."""

    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    fused: bool = True
    recompute: str = "none"  # of the Megatron trainer
    lora: int = 0  # rank of adapters that the Megatron trainer trains in place of the weights; 0: the weights


def transformers_side(turns: Turns, path: Path, case: Case, setting: Setting) -> None:
    """The usual loop: whole logits, cross-entropy, clipping, AdamW. Attention is causal, so right padding needs no mask."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

    turns.imported()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(setting.device)
    model.train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, **ADAM, fused=setting.fused)
    batch = make_batch(case.lengths, SHAPES[case.model].vocab)
    tokens = batch.tokens.to(setting.device)
    share = (batch.weights * batch.advantages)[:, 1:].flatten().to(setting.device)
    mixed = torch.autocast(setting.device, torch.bfloat16, enabled=setting.dtype == "bfloat16")
    while turns.begin():
        with mixed:
            logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        logprobs = -F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = -(share * logprobs).sum()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        turns.end(loss=loss.item(), gradient_norm=norm.item())


def policy_gradient(output: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """-A log p per token."""
    return -batch.advantages * output.logprobs, {}


def rlflow_side(turns: Turns, path: Path, case: Case, setting: Setting) -> None:
    """The Megatron trainer, all rows in one micro-batch."""
    import rlflow.trainer.megatron  # noqa: F401
    from rlflow.trainer.base import Trainer

    turns.imported()
    trainer = Trainer.from_pretrained(
        path,
        lr=ADAM["lr"],
        optimizer={"name": "adamw", "eps": ADAM["eps"], "weight_decay": WEIGHT_DECAY},
        packing=case.packed,
        tokens_per_microbatch=case.tokens_per_microbatch or len(case.lengths) * max(case.lengths),
        dtype=setting.dtype,
        recompute=setting.recompute,
        lora={"rank": setting.lora, "alpha": 2.0 * setting.lora} if setting.lora else None,
    )
    batch = make_batch(case.lengths, SHAPES[case.model].vocab)
    while turns.begin():
        metrics = trainer.update(batch, policy_gradient)
        turns.end(
            loss=metrics["loss"], gradient_norm=metrics["gradient_norm"], **state_mib(trainer)
        )


def state_mib(trainer: Any) -> dict[str, float]:
    """MiB of the Megatron trainer's weights, gradient buffers, and Adam's moments. Experts have their own."""
    from rlflow.trainer.megatron.optimizer import chained

    states = [
        state for one in chained(trainer._optimizer) for state in one.optimizer.state.values()
    ]
    buffers = [
        buffer
        for chunk in trainer._model
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    counted = {
        "weights": [parameter for chunk in trainer._chunks for parameter in chunk.parameters()],
        "gradients": [buffer.grad_data for buffer in buffers],
        "moments": [value for state in states for key, value in state.items() if key != "step"],
    }
    return {
        f"{name}_mib": sum(tensor.nbytes for tensor in held) / MIB for name, held in counted.items()
    }


# ---------------------------------------------------------------- the comparison


def compare(case: Case, path: Path, rounds: int, setting: Setting) -> dict[str, Any]:
    """Figures of both sides and their ratios. Raises RuntimeError where the sides do not compute the same."""
    first, second = (OURS, ADAPTERS) if setting.lora else (RIVAL, OURS)
    rival = rlflow_side if setting.lora else transformers_side
    sides = {
        first: (rival, path, case, dataclasses.replace(setting, lora=0)),
        second: (rlflow_side, path, case, setting),
    }
    taken = interleave(sides, rounds, threads=setting.threads, device=setting.device)
    tolerance = {"float32": 1e-3, "bfloat16": 5e-2}[setting.dtype]
    # Adapters begin at the same policy and go another way.
    compared, keys = (1, ("loss",)) if setting.lora else (None, ("loss", "gradient_norm"))
    for one, other in zip(taken[first][:compared], taken[second][:compared], strict=True):
        for key in keys:
            if abs(one[key] - other[key]) > tolerance * max(abs(one[key]), tolerance):
                raise RuntimeError(
                    f"{case.name}: the sides differ in {key}: {one[key]} and {other[key]}"
                )
    tokens = sum(case.lengths)
    result: dict[str, Any] = {"case": case.name, "tokens": tokens, "rows": len(case.lengths)}
    for side, steps in taken.items():
        result[side] = {
            "tokens_per_s": summary([tokens / step["wall_s"] for step in steps[1:]]),
            "tokens_per_cpu_s": summary([tokens / step["cpu_s"] for step in steps[1:]]),
            "peak_mib": max(step["peak_mib"] for step in steps),
            **{
                key: steps[-1][key]
                for key in ("weights_mib", "gradients_mib", "moments_mib")
                if key in steps[-1]
            },
        }
    for ratio, key in (("speedup", "tokens_per_s"), ("speedup_cpu", "tokens_per_cpu_s")):
        result[ratio] = result[second][key]["median"] / result[first][key]["median"]
    result["memory_ratio"] = result[second]["peak_mib"] / result[first]["peak_mib"]
    return result


def print_result(result: dict[str, Any]) -> None:
    """Three rows of the table: both sides and their ratio."""
    for side, row in ((name, result[name]) for name in (RIVAL, OURS, ADAPTERS) if name in result):
        wall, cpu = row["tokens_per_s"], row["tokens_per_cpu_s"]
        print(
            f"{result['case']:<12} {side:<13} {wall['median']:>9.0f} {spread(wall):>12} "
            f"{cpu['median']:>13.0f} {spread(cpu):>12} {row['peak_mib']:>9.0f}"
        )
        if ADAPTERS in result:
            held = ", ".join(
                f"{name} {row[f'{name}_mib']:.1f}" for name in ("weights", "gradients", "moments")
            )
            print(f"{'':<12} {'':<13} MiB of {held}")
    print(
        f"{'':<12} {'ratio':<13} {result['speedup']:>8.2f}x {'':>12} {result['speedup_cpu']:>12.2f}x "
        f"{'':>12} {result['memory_ratio']:>8.2f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="the smaller model on small batches: under a minute"
    )
    parser.add_argument(
        "--moe",
        action="store_true",
        help="mixtures of experts (Qwen3-MoE) in place of dense models",
    )
    parser.add_argument("--rounds", type=int, help="counted steps per side and case (5; quick: 3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each side (1)")
    parser.add_argument(
        "--only", default="", help="run the cases whose name contains this, e.g. '93M equal'"
    )
    parser.add_argument(
        "--plain-adam",
        action="store_true",
        help="give transformers torch's default AdamW, not the fused one",
    )
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="compare LoRA of this rank with all weights",
    )
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setting = Setting(threads=options.threads, fused=not options.plain_adam, lora=options.lora)

    chosen = [case for case in cases(options.quick, options.moe) if options.only in case.name]
    packages = versions("rlflow", "torch", "transformers", "megatron-core")
    print(
        ", ".join(f"{name} {number}" for name, number in packages.items()),
        f"| {options.threads} thread(s) per side",
    )
    columns = ("tokens/s", "low..high", "tokens/CPU-s", "low..high", "peak MiB")
    print(
        "{:<12} {:<13} {:>9} {:>12} {:>13} {:>12} {:>9}".format("case", "side", *columns),
        flush=True,
    )
    results = []
    with tempfile.TemporaryDirectory() as directory:
        parameters = {}
        for model in dict.fromkeys(case.model for case in chosen):
            experts = (
                {"family": "qwen3_moe", "norm_topk_prob": True, **EXPERTS[model]}
                if options.moe
                else {}
            )
            size = {"head_dim": SHAPES[model].head_dim} if options.moe else {}
            parameters[model] = write_random_model(
                Path(directory) / model, SHAPES[model], **experts, **size
            )
        for case in chosen:
            path = Path(directory) / case.model
            results.append(compare(case, path, rounds, setting))
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
                "lora_rank": options.lora,
                "experts": {model: EXPERTS[model] for model in parameters} if options.moe else None,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
