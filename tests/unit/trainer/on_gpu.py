"""What a trainer does in a run, and what came of it: the same on a CPU, under `fake_cuda`, with
Megatron's local layers and, as a program of its own, with Transformer Engine's."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.models.huggingface import digest
from rlflow.types import Batch, PolicyOutput
from tests.fake_cuda import Gpu, fake_cuda
from tests.fake_transformer_engine import install, rows_apart
from tests.unit.trainer.batches import make_batch, policy_gradient

LAYERS = re.compile(r" (megatron|transformer_engine)/|/layers\.py|/low_rank\.py")
"""Places within a layer's forward or backward pass."""
CASES: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "dtype": "bfloat16"},
    "padded": {"dtype": "bfloat16"},
    "float32": {"packing": True},
    "padded float32": {},
    "recompute": {"dtype": "bfloat16", "packing": True, "recompute": "full"},
    "modules recomputed": {"packing": True, "recompute": ["core_attn", "mlp"]},
    "LoRA": {"dtype": "bfloat16", "packing": True, "lora": {"rank": 4}},
    "critic": {"dtype": "bfloat16", "packing": True, "values": True},
    "off the GPU": {
        "dtype": "bfloat16", "packing": True, "distributed_optimizer": True, "release_gradients": True,
    },
}  # fmt: skip
OFFLOADED = {"offload_snapshots": True, "optimizer": {"name": "adamw", "offload": True}}
"""What "off the GPU" has beside where there is one."""


def value_loss(output: PolicyOutput, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert output.values is not None
    return (output.values - batch.advantages) ** 2, {}


def exercise(path: Path, gpu: Gpu | None, options: dict[str, Any]) -> dict[str, Any]:
    """Builds, scores, snapshots, loads a teacher, updates, gives weights, saves, loads and resumes. Rows go one by
    one, so that there are as many micro-batches."""
    from rlflow.trainer.base import Trainer

    settings = {"lr": 1e-3, "tokens_per_microbatch": 20, **options}
    want = ("values",) if options.get("values") else ("logprobs", "entropy")
    loss = value_loss if options.get("values") else policy_gradient
    batch, trainers = make_batch(rows=4), [Trainer.from_pretrained(path, **settings)]
    try:
        trainer = trainers[0]
        inner = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])[0].optimizer
        found: dict[str, Any] = {"optimizer": type(inner).__name__, "layers": _layers(trainer)}
        found["weights"] = digest(trainer.weights())
        before = trainer.score(batch, want=want)
        found["score"] = {name: float(value.sum()) for name, value in before.items()}
        trainer.snapshot("reference")
        if not options.get("values"):
            trainer.load_frozen("teacher", path)
            teacher = trainer.score(batch, "teacher")["logprobs"]
            found["teacher"] = float((teacher - before["logprobs"]).abs().max())
        first = trainer.update(batch, loss)
        found |= {name: first[name] for name in ("loss", "gradient_norm")}
        found["waits"] = _waits_per_microbatch(trainer, batch, loss, gpu)
        if not options.get("values"):
            reference = trainer.score(batch, "reference")["logprobs"]
            found["reference"] = torch.equal(reference, before["logprobs"])
        with tempfile.TemporaryDirectory() as folder:
            trainer.save(folder, 3)
            trainers.append(Trainer.from_pretrained(path, **settings))
            assert trainers[1].load(folder) == 3
        found["resumed"] = _gap(trainer, trainers[1], batch, loss, want)
        trainer.update(batch, loss)
        found["trained"] = digest(trainer.weights())
        found["moved"] = float(
            (trainer.score(batch, want=want)[want[0]] - before[want[0]]).abs().max()
        )
    finally:
        for trainer in reversed(trainers):
            trainer.close()
    return found


def _layers(trainer: Any) -> str:
    return type(trainer._chunks[0].decoder.layers[0].self_attention.linear_qkv).__name__


def _gap(one: Any, other: Any, batch: Batch, loss: Any, want: tuple[str, ...]) -> float:
    """How far two trainers are apart after one more update."""
    scores = []
    for trainer in (one, other):
        trainer.update(batch, loss)
        scores.append(trainer.score(batch, want=want)[want[0]])
    return float((scores[0] - scores[1]).abs().max())


def _waits_per_microbatch(trainer: Any, batch: Batch, loss: Any, gpu: Gpu | None) -> dict[str, int]:
    """{place: how often the host waits there in each micro-batch}: the difference that two more
    micro-batches make."""
    counts = []
    for rows in (2, 4):
        if gpu is not None:
            gpu.waits.clear()
        trainer.update(batch.select(list(range(rows))), loss)
        counts.append(Counter(gpu.waits) if gpu is not None else Counter())
    return {
        f"{name} {place}": count // 2 for (name, place), count in (counts[1] - counts[0]).items()
    }


def varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *_: Any, **options: Any
) -> Tensor:
    """torch's attention for variable lengths, which CPUs lack."""
    from rlflow.trainer.megatron import layers

    assert query.is_cuda and bounds.is_cuda and bounds.dtype is torch.int32
    assert query.dtype is torch.bfloat16 and options["window_size"] == (-1, 0)
    return rows_apart(layers._attend, [query, key, value], bounds).view(query.shape)


def main(path: str, packages: str, names: list[str]) -> None:
    """Prints {case: what came of it} with Transformer Engine's Python from a folder."""
    with fake_cuda():
        calls = install(packages)
        from rlflow.trainer.megatron import layers

        layers.varlen_attn = varlen
    results = {}
    for name in names:
        calls.clear()
        with fake_cuda() as gpu:
            extra = OFFLOADED if name == "off the GPU" else {}
            results[name] = exercise(Path(path), gpu, {**CASES[name], **extra})
        results[name]["calls"] = sorted({call["call"] for call in calls})
        results[name]["steps"] = [call["step"] for call in calls if call["call"] == "adam"]
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
