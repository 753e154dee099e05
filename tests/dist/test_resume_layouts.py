"""A checkpoint continues in every layout as the run that wrote it would have: weights and metrics to 1e-6.

Four real ranks over gloo; every checkpoint is written in the background while one more update is made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from tests.dist.megatron_ranks import RANKS, Ranks
from tests.dist.resume_ranks import AFTER, run, run_elsewhere, run_jobs

pytestmark = pytest.mark.dist

VOCAB = 301  # odd, so that every split pads it
ALONE: dict[str, Any] = {}
MODEL_PARALLEL: dict[str, Any] = {"tensor_parallel": 2, "pipeline_parallel": 2}
SPLIT: dict[str, Any] = {"distributed_optimizer": True}
TENSOR_SPLIT: dict[str, Any] = {"tensor_parallel": 2, **SPLIT}  # x DP2
STAGES_SPLIT: dict[str, Any] = {
    "pipeline_parallel": 2,
    **SPLIT,
}  # x DP2; a tied output layer has a bucket of its own
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
WRITERS: dict[str, dict[str, Any]] = {"TP2-PP2": MODEL_PARALLEL, "PP2-DP2-split": STAGES_SPLIT}
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (written by, options)
    "the same layout": ("TP2-PP2", MODEL_PARALLEL),
    "TP2 x PP2 from split": ("PP2-DP2-split", MODEL_PARALLEL),
    "TP2 x DP2 from one process": ("alone", TENSOR_SPLIT),
    "damaged": ("damaged", MODEL_PARALLEL),
}
SLOW_WRITERS = {
    "TP2-PP2-again": MODEL_PARALLEL,
    "PP2-split": STAGES_SPLIT,
    "PP2-split-bf16": {**STAGES_SPLIT, **BFLOAT16},
    "DP4": ALONE,
}
SLOW_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2 x DP2, split": ("TP2-PP2-again", TENSOR_SPLIT),
    "the same split": ("PP2-split", STAGES_SPLIT),
    "split over twice as many": ("PP2-split", SPLIT),
    "the same split, bf16": ("PP2-split-bf16", {**STAGES_SPLIT, **BFLOAT16}),
    "PP2 x DP2, whole, bf16": ("PP2-split-bf16", {"pipeline_parallel": 2, **BFLOAT16}),
    "DP4, split": ("DP4", SPLIT),
}
OTHER_MEGATRON = list(filter(None, os.environ.get("RLFLOW_MEGATRON_PATHS", "").split(":")))
"""Folders with other versions of megatron-core (`test_convert_versions.py`)."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    tiny_model(
        path / "model",
        "qwen2",
        tied=True,
        tokenizer=False,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        scale=0.15,
    )
    return path


def job(directory: Path, name: str, options: dict[str, Any], **what: Any) -> dict[str, Any]:
    return {
        "model": directory / "model",
        "vocab": VOCAB,
        "options": options,
        "result": directory / f"{name.replace(' ', '-')}.pt",
        **what,
    }


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Any]:
    """One process that saves and goes on."""
    return run(job(directory, "alone", ALONE, save=directory / "alone"))


Results = dict[str, list[dict[str, Any]]]


def on_four_ranks(
    ranks: Ranks, directory: Path, writers: dict[str, dict[str, Any]], readers: dict[str, Any]
) -> Results:
    """Of all writers and readers: what each rank found."""
    jobs = [
        job(directory, name, options, save=directory / name) for name, options in writers.items()
    ]
    for name, (writer, options) in readers.items():
        jobs.append(
            job(directory, name, options, load=directory / writer, damage=writer == "damaged")
        )
    ranks.run(directory, jobs, limit_s=280, work=run_jobs)
    return {
        name: [torch.load(f"{one['result']}.{rank}", weights_only=False) for rank in range(RANKS)]
        for name, one in zip([*writers, *readers], jobs, strict=True)
    }


@pytest.fixture(scope="module")
def results(ranks: Ranks, directory: Path, alone: dict[str, Any]) -> Results:
    shutil.copytree(directory / "alone", directory / "damaged")
    return on_four_ranks(ranks, directory, WRITERS, READERS)


@pytest.fixture(scope="module")
def slow_results(ranks: Ranks, directory: Path) -> Results:
    return on_four_ranks(ranks, directory, SLOW_WRITERS, SLOW_READERS)


def assert_continues(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    assert len(found["metrics"]) == AFTER
    for got, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        for metric in ("loss", "gradient_norm", "entropy", "lr", "tokens"):
            assert got[metric] == pytest.approx(wanted[metric], rel=bound, abs=bound * 1e-1), metric
    for name, tensor in expected["weights"].items():
        distance = (found["weights"][name].double() - tensor.double()).norm()
        assert distance <= bound * tensor.double().norm(), name
    torch.testing.assert_close(found["reference"], expected["reference"], atol=10 * bound, rtol=0)


@pytest.mark.parametrize(
    "reader", [name for name, (writer, _) in READERS.items() if writer in WRITERS]
)
def test_a_run_continues_in_another_layout(reader: str, results: Results) -> None:
    writer, options = READERS[reader]
    for found in results[reader]:
        assert_continues(found, results[writer][0], 0.0 if options == WRITERS[writer] else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reader", SLOW_READERS)
def test_split_and_whole_adam_continue_as_each_other(reader: str, slow_results: Results) -> None:
    """Bit for bit in the same form. Else the gradient norm is summed in another order, and bfloat16 rounds by it."""
    writer, options = SLOW_READERS[reader]
    for found in slow_results[reader]:
        bound = 0.0 if options == SLOW_WRITERS[writer] else 1e-3 if "dtype" in options else 1e-6
        assert_continues(found, slow_results[writer][0], bound)


@pytest.mark.parametrize("writer", WRITERS)
def test_four_ranks_continue_on_one(writer: str, results: Any, directory: Path) -> None:
    for options in (ALONE, SPLIT):
        found = run(job(directory, "one", options, load=directory / writer))
        assert_continues(found, results[writer][0], 1e-6)


def test_one_process_continues_on_four_ranks(results: Any, alone: dict[str, Any]) -> None:
    assert_continues(results["TP2 x DP2 from one process"][0], alone, 1e-6)


def test_saving_in_the_background_changes_nothing(alone: dict[str, Any], directory: Path) -> None:
    """What is saved is the state at the call, although the next update came before the end of the save."""
    assert_continues(run(job(directory, "again", ALONE, load=directory / "alone")), alone, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("megatron", OTHER_MEGATRON)
def test_versions_of_megatron_core_continue_each_others_runs(
    megatron: str, alone: dict[str, Any], directory: Path
) -> None:
    writer = job(directory, "other-writes", STAGES_SPLIT, save=directory / "other")
    reader = job(directory, "other-reads", TENSOR_SPLIT, load=directory / "alone")
    wrote, read = run_elsewhere(megatron, directory, [writer, reader])
    assert_continues(read, alone, 1e-6)
    for options in (ALONE, SPLIT):
        assert_continues(
            run(job(directory, "here", options, load=directory / "other")), wrote, 1e-6
        )


def test_damage_is_the_same_error_on_every_rank(results: Any) -> None:
    errors = {found["error"] for found in results["damaged"]}
    assert len(errors) == 1 and "DamagedCheckpointError" in errors.pop()
