"""The Megatron trainer on the device against the plain float32 trainer on the CPU: log-probs, the
gradient of every parameter, updates after a resume, checkpoints that travel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import SHAPES, Report, Skipped, model_path, need, on_the_cpu
from train_step import make_batch, policy_gradient

from tests.reference import ORACLE

LENGTHS = (48, 16, 30, 60, 7, 90, 20, 33)
TOKENS = 200  # of a micro-batch: several for the batch
LIMITS = {
    "float32": {"log-probs": 1e-4, "gradients": 1e-4, "after the update": 1e-3},
    "bfloat16": {"log-probs": 0.1, "gradients": 0.1, "after the update": 0.3},
}
"""Log-probs: largest difference in nats. Gradients: of the parameter that differs most, the norm of
the difference over the norm."""
SPARES = {"offload_snapshots", "optimizer"}  # options that need a GPU whose memory they spare


def squared_error(output: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """A critic's loss."""
    return (output.values - batch.advantages) ** 2, {}


def make(path: Path, dtype: str, options: dict[str, Any]) -> Any:
    """A trainer that clips nothing."""
    from rlflow.trainer.base import Trainer

    usual = {"lr": 1e-3, "max_gradient_norm": 0.0, "tokens_per_microbatch": TOKENS, "dtype": dtype}
    return Trainer.from_pretrained(path, **{**usual, **options})


def trained_parameters(trainer: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, parameter, its gradient of the last update) of either trainer."""
    if hasattr(trainer, "model"):
        named = trainer.model.named_parameters()
        yield from ((name, value, value.grad) for name, value in named if value.requires_grad)
        return
    for chunk in trainer._chunks:
        named = chunk.named_parameters()
        yield from ((name, value, value.main_grad) for name, value in named if value.requires_grad)


def gradients(trainer: Any) -> dict[str, Any]:
    """{HuggingFace name: gradient on the CPU in float32}: they take the parameters' places, and the
    trainer's own way to HuggingFace tensors names and splits them."""
    held = list(trained_parameters(trainer))
    before = [parameter.data for _, parameter, _ in held]
    try:
        for _, parameter, gradient in held:
            parameter.data = gradient.detach().clone()
        adapters = dict(trainer.adapter_weights())
        found = adapters or dict(trainer.weights())
        found |= {name: value.data for name, value, _ in held if name.startswith("output_layer.")}
    finally:
        for (_, parameter, _), data in zip(held, before, strict=True):
            parameter.data = data
    return {name: value.detach().float().cpu().clone() for name, value in found.items()}


def measured(path: Path, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    """Scores before an update, its metrics and gradients, scores after it. A critic's head
    starts as 0 and passes no gradient on, so of a critic it is the second update."""
    values = bool(options.get("values"))
    want, loss = ("values", squared_error) if values else ("logprobs", policy_gradient)
    trainer = make(path, dtype, options)
    batch = make_batch(LENGTHS, SHAPES["tiny"].vocab)
    try:
        if values:
            trainer.update(batch, loss)
        found = {"before": trainer.score(batch, want=(want,))[want]}
        trainer.snapshot("reference")
        found["metrics"] = trainer.update(batch, loss)
        kept = not options.get("release_gradients")
        found["gradients"] = gradients(trainer) if kept else {}
        found["after"] = trainer.score(batch, want=(want,))[want]
        found["snapshot"] = trainer.score(batch, "reference", (want,))[want]
    finally:
        trainer.close()
    return found


def parity(
    report: Report, layers: str = "local", dtypes: Any = ("float32", "bfloat16"), **options: Any
) -> None:
    """One way to train, in both precisions. layers: local, or te for Transformer Engine's."""
    import torch

    need("megatron", *(["transformer_engine"] if layers == "te" else []))
    if not report.on_gpu and SPARES & options.keys():
        raise Skipped("it needs a GPU whose memory it could spare")
    os.environ["RLFLOW_LAYERS"] = "auto" if layers == "te" else "local"
    torch.backends.cuda.matmul.allow_tf32 = False
    path = model_path(report, "tiny", "float32")
    kind = {name: options[name] for name in ("lora", "values") if name in options}
    expected = measured(path, "float32", {**kind, "backend": ORACLE, "device": "cpu"})
    for dtype in dtypes:
        compare(report, dtype, measured(path, dtype, options), expected)


def compare(report: Report, dtype: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Writes how far the two lie apart."""
    limits = LIMITS[dtype]
    for what, key in (("log-probs", "before"), ("after the update", "after")):
        gap = (found[key] - expected[key]).abs().max()
        report.at_most(f"{what}, {dtype}", gap, limits[what], "nats")
    report.at_most(
        f"snapshot is the model before the update, {dtype}",
        (found["snapshot"] - found["before"]).abs().max(),
        0.0,
        "nats",
    )
    norm, right = (side["metrics"]["gradient_norm"] for side in (found, expected))
    report.at_most(
        f"gradient norm, {dtype}", abs(norm - right) / right, limits["gradients"], "relative"
    )
    if not found["gradients"]:
        return
    report.holds(
        f"every parameter has a gradient, {dtype}",
        found["gradients"].keys() == expected["gradients"].keys(),
    )
    gaps = {
        name: relative(value, expected["gradients"][name])
        for name, value in found["gradients"].items()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    report.at_most(f"gradient of {worst}, {dtype}", gaps[worst], limits["gradients"], "relative")


def relative(found: Any, expected: Any) -> float:
    """The norm of the difference over the norm of what is expected."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


# ---------------------------------------------------------------- checkpoints


def resume(report: Report, layers: str = "local", dtype: str = "float32", **options: Any) -> None:
    """The update after a resume, in another trainer and in the same one, against the
    uninterrupted one. A wrong count of Adam's shows after several updates."""
    need("megatron", *(["transformer_engine"] if layers == "te" else []))
    if not report.on_gpu and SPARES & options.keys():
        raise Skipped("it needs a GPU whose memory it could spare")
    os.environ["RLFLOW_LAYERS"] = "auto" if layers == "te" else "local"
    path, batch = model_path(report, "tiny", "float32"), make_batch(LENGTHS, SHAPES["tiny"].vocab)
    folder = report.folder / "checkpoints" / report.case.replace(" ", "-")
    options = {"packing": True, **options}
    live = make(path, dtype, options)
    for _ in range(12):
        live.update(batch, policy_gradient)
    live.save(folder, 12)
    before = live.score(batch)["logprobs"]
    live.update(batch, policy_gradient)
    expected = live.score(batch)["logprobs"]
    report.row("change by the update", (expected - before).abs().mean(), "nats")
    again = make(path, dtype, options)
    for name, trainer in (("another trainer", again), ("the same trainer", live)):
        step = trainer.load(folder)
        report.holds(f"{name}: step", step == 12)
        report.at_most(
            f"{name}: weights", (trainer.score(batch)["logprobs"] - before).abs().max(), 0.0, "nats"
        )
        trainer.update(batch, policy_gradient)
        gap = (trainer.score(batch)["logprobs"] - expected).abs().max()
        report.at_most(f"{name}: update", gap, 1e-5, "nats", optimizer=optimizer_name(trainer))
    again.close()
    live.close()


def optimizer_name(trainer: Any) -> str:
    """The class that Megatron took."""
    inner = getattr(trainer._optimizer, "chained_optimizers", [trainer._optimizer])[0]
    return type(inner.optimizer).__module__ + "." + type(inner.optimizer).__name__


def travel(report: Report) -> None:
    """A checkpoint of the device, loaded, trained on and saved on the CPU, and loaded back."""
    import torch

    need("megatron")
    path, batch = model_path(report, "tiny", "float32"), make_batch(LENGTHS, SHAPES["tiny"].vocab)
    there, back, scores = (
        report.folder / "checkpoints" / name for name in ("there", "back", "scores.pt")
    )
    trainer = make(path, "float32", {"packing": True})
    for _ in range(2):
        trainer.update(batch, policy_gradient)
    trainer.save(there, 2)
    before = trainer.score(batch)["logprobs"]
    on_the_cpu(
        report, "parity:visit", path=str(path), there=str(there), back=str(back), scores=str(scores)
    )
    loaded, updated = torch.load(scores)
    report.at_most("loaded on the CPU", (loaded - before).abs().max(), 1e-4, "nats")
    report.holds("loaded back: step", trainer.load(back) == 3)
    report.at_most(
        "loaded back", (trainer.score(batch)["logprobs"] - updated).abs().max(), 1e-4, "nats"
    )
    trainer.close()


def visit(report: Report, path: str, there: str, back: str, scores: str) -> None:
    """The CPU's side of `travel`."""
    import torch

    batch = make_batch(LENGTHS, SHAPES["tiny"].vocab)
    trainer = make(Path(path), "float32", {"packing": True})
    trainer.load(there)
    loaded = trainer.score(batch)["logprobs"]
    trainer.update(batch, policy_gradient)
    trainer.save(back, 3)
    torch.save((loaded, trainer.score(batch)["logprobs"]), scores)
    trainer.close()
