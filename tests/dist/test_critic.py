"""A critic computes in every layout what one plain torch model computes; four real ranks over gloo.

Cases are those of test_layouts, which has the fast one: a model and words, what of the four ranks is left is data parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_model

from tests.dist.critic_ranks import VOCAB, check, make_job, make_targets, train, train_alone
from tests.dist.megatron_ranks import Ranks
from tests.dist.test_layouts import options_of
from tests.reference import ORACLE

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1500)]

MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3"},
}
CASES = [
    f"{model} {layout}".strip()
    for model in MODELS
    for layout in (
        "", "few", "TP2", "PP2", "CP2", "TP2 SP", "PP2 VPP2", "TP2 PP2", "TP2 CP2 SP packed DO full", "PP2 VPP2 CP2 DO",
        "CP4 packed", "PP4 selective", "TP2 PP2 VPP2 SP",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critic")
    for name, options in MODELS.items():
        tiny_model(
            path / name,
            tokenizer=False,
            vocab_size=VOCAB,
            num_hidden_layers=4,
            scale=0.15,
            **options,
        )
    return path


@pytest.fixture(scope="module")
def single(directory: Path) -> dict[str, dict[str, Any]]:
    return {name: train_alone(directory, name) for name in MODELS}


@pytest.fixture(scope="module")
def jobs(directory: Path, single: Any, ranks: Ranks) -> dict[str, dict[str, Any]]:
    made = {
        case: make_job(directory, case.split()[0], case, options_of(case), few="few" in case)
        for case in CASES
    }
    ranks.run(directory, list(made.values()), limit_s=1400)
    return made


@pytest.mark.parametrize("case", CASES)
def test_every_layout_of_a_critic_is_one_plain_critic(
    case: str, jobs: Any, directory: Path, single: Any
) -> None:
    """Its checkpoints load into one process, and that of one process into it."""
    expected = single[case.split()[0]]
    if "few" in case.split():  # fewer rows than data-parallel ranks: some micro-batches are dummies
        expected = train(directory / case.split()[0], make_targets(VOCAB, 3), {"backend": ORACLE})
    check(jobs[case], expected)
