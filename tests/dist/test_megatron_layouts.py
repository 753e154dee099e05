"""Every layout computes what one process and transformers compute; four real ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.trainer import Trainer
from rlflow.weights.hf import digest, iterate_weights
from tests.dist.megatron_ranks import OPTIONS, PolicyGradientWithEntropy, launch, make_batch, train

pytestmark = pytest.mark.dist

VOCAB = 301  # odd, so that every split pads it
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "llama": {"family": "llama"},
}
LAYOUTS = [(2, 2), (2, 1), (1, 2), (1, 4), (1, 1)]  # (tensor, pipeline); the rest of the four ranks is data parallel
FAST = [("qwen2-tied", layout) for layout in LAYOUTS] + [(name, (2, 2)) for name in ("qwen2", "qwen3", "llama")]
FEW_ROWS = ("few-rows", (1, 1))  # 3 rows on 4 data-parallel ranks: one rank runs a dummy
PACKED: dict[str, Any] = {"packing": True}
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
DISTRIBUTED: dict[str, Any] = {"distributed_optimizer": True}
CHUNKED: dict[str, Any] = {"logits_chunk_mib": 0.01}  # 17 positions of two ranks' vocabulary: several chunks per micro-batch
VARIANTS: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "packed": ("qwen2-tied", (2, 2), PACKED),
    "packed-data-parallel": ("qwen3", (1, 1), PACKED),
    "sequence-parallel": ("qwen2", (2, 2), SEQUENCE),
    "distributed-optimizer": ("qwen2-tied", (1, 2), DISTRIBUTED),
    "packed-sequence-parallel": ("qwen3", (2, 1), {**PACKED, **SEQUENCE}),
    "chunked-logits": ("qwen2-tied", (2, 2), CHUNKED),
    "chunked-logits-packed-sequence-parallel": ("qwen2", (2, 1), {**CHUNKED, **PACKED, **SEQUENCE}),
}
SLOW_VARIANTS = {
    "-".join((name, f"TP{tensor}-PP{pipeline}", *keys)): (name, (tensor, pipeline), dict.fromkeys(keys, True))
    for name in ("qwen2-tied", "qwen3")
    for tensor, pipeline in LAYOUTS
    for keys in (
        ("packing",),
        ("distributed_optimizer",),
        *((("sequence_parallel",), ("packing", "sequence_parallel", "distributed_optimizer")) if tensor > 1 else ()),
    )
}
SLOW = [(name, layout) for name in MODELS for layout in LAYOUTS if (name, layout) not in FAST]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    for name, options in MODELS.items():
        tiny_model(path / name, tokenizer=False, vocab_size=VOCAB, num_hidden_layers=4, scale=0.15, **options)
    return path


def run(
    directory: Path, cases: list[tuple[str, tuple[int, int]]], limit_s: float, variants: dict[str, Any] | None = None
) -> dict[Any, Any]:
    """The ranks' results by case; checkpoints of TP2 x PP2 are kept. `variants` go into the same launch."""
    jobs = [
        {
            "model": directory / ("qwen2-tied" if name == "few-rows" else name),
            "batch": make_batch(VOCAB, rows=3 if name == "few-rows" else 11),
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "options": {},
            "save_to": directory / f"checkpoint-{name}" if (tensor, pipeline) == (2, 2) else None,
            "result": directory / f"{name}-{tensor}-{pipeline}.pt",
        }
        for name, (tensor, pipeline) in cases
    ]
    jobs += [
        {
            "model": directory / name,
            "batch": make_batch(VOCAB),
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "options": options,
            "save_to": directory / f"checkpoint-{variant}",
            "result": directory / f"{variant}.pt",
        }
        for variant, (name, (tensor, pipeline), options) in (variants or {}).items()
    ]
    launch(directory, jobs, limit_s)
    names = [*cases, *(variants or {})]
    return {name: torch.load(job["result"], weights_only=False) for name, job in zip(names, jobs, strict=True)}


@pytest.fixture(scope="module")
def fast(directory: Path) -> dict[Any, dict[str, Any]]:
    return run(directory, [*FAST, FEW_ROWS], limit_s=200, variants=VARIANTS)


@pytest.fixture(scope="module")
def slow(directory: Path) -> dict[Any, dict[str, Any]]:
    return run(directory, SLOW, limit_s=280)


@pytest.fixture(scope="module")
def slow_variants(directory: Path) -> dict[str, dict[str, Any]]:
    return run(directory, [], limit_s=400, variants=SLOW_VARIANTS)


@pytest.fixture(scope="module")
def single(directory: Path) -> dict[str, dict[str, Any]]:
    """The same on one process, per model."""
    return {name: train(directory / name, make_batch(VOCAB), 1, 1, directory / f"single-{name}") for name in MODELS}


def transformers_scores(path: Path) -> dict[str, torch.Tensor]:
    """The oracle: log-probs and entropies from full logits."""
    from transformers import AutoModelForCausalLM

    batch = make_batch(VOCAB)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(batch.tokens).logits[:, :-1] / batch.temperatures[:, None, None]
    logprobs = logits.log_softmax(-1)
    valid = torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
    scores = {
        "logprobs": logprobs.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1),
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
    }
    return {name: torch.nn.functional.pad(value * valid, (1, 0)) for name, value in scores.items()}


def check(name: str, result: dict[str, Any], reference: dict[str, Any], directory: Path) -> None:
    """The claims of this file about one model in one layout."""
    oracle = transformers_scores(directory / name)
    for quantity, expected in oracle.items():
        torch.testing.assert_close(result["score"][quantity], expected, atol=1e-5, rtol=0)
    assert result["digest"] == digest(iterate_weights(directory / name)), "HF -> Megatron -> HF is not bit-exact"
    assert result["same_on_all_ranks"]
    assert torch.equal(result["reference"], result["score"]["logprobs"]), "the snapshot moved with the policy"
    for got, expected in zip(result["metrics"], reference["metrics"]):
        for metric in ("loss", "gradient_norm", "entropy", "lr", "tokens"):
            assert got[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-7), metric
    start = dict(iterate_weights(directory / name))
    for key, expected in reference["weights"].items():
        distance = (result["weights"][key] - expected).norm()
        assert distance <= 1e-5 * expected.norm(), f"{key} differs"
        assert distance <= 1e-3 * (expected - start[key]).norm(), f"{key} was trained otherwise"


@pytest.mark.parametrize("case", FAST, ids=lambda case: f"{case[0]}-TP{case[1][0]}-PP{case[1][1]}")
def test_layout_equals_one_process_and_transformers(case: Any, fast: Any, single: Any, directory: Path) -> None:
    check(case[0], fast[case], single[case[0]], directory)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: f"{case[0]}-TP{case[1][0]}-PP{case[1][1]}")
def test_every_layout_equals_one_process_and_transformers(case: Any, slow: Any, single: Any, directory: Path) -> None:
    check(case[0], slow[case], single[case[0]], directory)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_one_process_and_transformers(variant: str, fast: Any, single: Any, directory: Path) -> None:
    name = VARIANTS[variant][0]
    check(name, fast[variant], single[name], directory)


@pytest.mark.slow
@pytest.mark.parametrize("variant", SLOW_VARIANTS)
def test_every_variant_equals_one_process_and_transformers(
    variant: str, slow_variants: Any, single: Any, directory: Path
) -> None:
    name, _, options = SLOW_VARIANTS[variant]
    check(name, slow_variants[variant], single[name], directory)
    kept = {key: value for key, value in options.items() if key != "sequence_parallel"}
    check_continues(directory / name, directory / f"checkpoint-{variant}", slow_variants[variant], kept)


def test_ranks_without_rows_take_part_and_change_nothing(fast: Any, directory: Path) -> None:
    expected = train(directory / "qwen2-tied", make_batch(VOCAB, rows=3), 1, 1, None)
    result = fast[FEW_ROWS]
    torch.testing.assert_close(result["score"]["logprobs"], expected["score"]["logprobs"], atol=1e-5, rtol=0)
    for got, wanted in zip(result["metrics"], expected["metrics"]):
        for metric in ("loss", "gradient_norm", "entropy", "tokens"):
            assert got[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-7), metric


@pytest.mark.parametrize("name", list(MODELS))
def test_checkpoint_of_four_ranks_continues_on_one(name: str, fast: Any, directory: Path) -> None:
    """Written at TP2 x PP2, read at TP1 PP1: same weights and snapshot, and the next update is the same."""
    check_continues(directory / name, directory / f"checkpoint-{name}", fast[(name, (2, 2))], {})


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoint_of_a_variant_continues_on_one(variant: str, fast: Any, directory: Path) -> None:
    name, _, options = VARIANTS[variant]
    kept = {key: value for key, value in options.items() if key != "sequence_parallel"}
    check_continues(directory / name, directory / f"checkpoint-{variant}", fast[variant], kept)


def check_continues(model: Path, checkpoint: Path, saved: dict[str, Any], options: dict[str, Any]) -> None:
    trainer = Trainer.from_pretrained(model, **OPTIONS, **options)
    assert trainer.load(checkpoint) == 3
    assert digest(trainer.weights()) == digest(saved["weights"].items())
    batch = make_batch(VOCAB)
    torch.testing.assert_close(trainer.score(batch, "reference")["logprobs"], saved["reference"], atol=1e-5, rtol=0)
    metrics = trainer.update(batch, PolicyGradientWithEntropy())
    assert metrics["gradient_norm"] == pytest.approx(saved["next_metrics"]["gradient_norm"], rel=1e-5)
    assert metrics["lr"] == saved["next_metrics"]["lr"]
    for key, tensor in trainer.weights():
        expected = saved["next_weights"][key]
        assert (tensor - expected).norm() <= 1e-5 * expected.norm(), key
    trainer.close()
