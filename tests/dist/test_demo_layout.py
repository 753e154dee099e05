"""The demo's model, trainer and algorithm train alike in one process and over ranks: the same batches, three updates."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rlflow.algorithms import token_weights
from rlflow.batching import make_batch
from rlflow.cluster import make_trainer
from rlflow.loop import Algorithm, add_scores
from rlflow.rollout import Rollout
from rlflow.schema import RunConfig, load_config
from rlflow.types import Batch
from rlflow.weights.hf import iterate_weights
from rlflow_environments.search import SearchEnvironment

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'rlflow[ray]'"),
]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "searchr1"
UPDATES = 3
RELATIVE = 1e-5


@dataclasses.dataclass
class Demo:
    config: RunConfig
    batches: list[Batch]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo's configuration over its starting policy (a random one of that architecture where none is shipped), and
    the batches of three steps that this policy rolled out in a small world."""
    directory = tmp_path_factory.mktemp("demo")
    policy = directory / "policy"
    if (RECIPE / "starting_policy" / "config.json").is_file():
        shutil.copytree(RECIPE / "starting_policy", policy)
    else:
        from rlflow_environments.search.tiny_model import write_random_model, write_tokenizer

        write_tokenizer(policy)
        write_random_model(policy)
    config = load_config(RECIPE / "config" / "demo.yaml", [f"model.path={policy}", "trainer.lr_warmup_steps=1"])
    world = {"directory": str(directory / "world"), "size": 0.1, "train_questions": 60, "val_questions": 20}
    environment = SearchEnvironment(world=world, retriever="bm25")
    tasks = environment.tasks("train")
    section = config.rollout
    with Rollout.from_pretrained(
        policy, environment, samples_per_prompt=4, max_turns=section.max_turns,
        max_response_tokens=section.max_response_tokens, max_total_tokens=section.max_total_tokens,
    ) as rollout:  # fmt: skip
        steps = [rollout.collect(tasks[start : start + 4], step) for step, start in enumerate((0, 4, 8))]
    return Demo(config, [_with_rewards([one for group in groups for one in group.usable]) for groups in steps])


def _with_rewards(trajectories: list[Any]) -> Batch:
    """A batch whose rewards differ within every group, as those of a policy that knows something would."""
    draw = random.Random(0)
    for start in range(0, len(trajectories), 4):
        rewards = draw.sample([0.0, 0.0, 1.0, 1.0], 4)
        for member, reward in zip(trajectories[start : start + 4], rewards):
            member.reward, member.group_stats = reward, (4, 0.5, 3**-0.5)
    return make_batch(trajectories)


def trained(demo: Demo, **layout: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of each update, and the weights after the last."""
    config = dataclasses.replace(
        demo.config,
        trainer=dataclasses.replace(demo.config.trainer, **{k: v for k, v in layout.items() if k != "ranks"}),
        cluster=dataclasses.replace(demo.config.cluster, ranks=layout.get("ranks", 0)),
    )
    algorithm = Algorithm.from_config(config)
    trainer = make_trainer(config)
    try:
        trainer.snapshot("reference")
        metrics = []
        for batch in demo.batches:
            batch = add_scores(batch, trainer, algorithm)
            batch = batch.replace(advantages=algorithm.advantage(batch)[:, None] * batch.loss_mask)
            batch = batch.replace(weights=token_weights(batch, config.algorithm.aggregate))
            metrics.append(trainer.update(batch, algorithm.loss))
        return metrics, dict(trainer.weights())
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def alone(demo: Demo) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return trained(demo)


@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 2, "tensor_parallel": 2},
        pytest.param({"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=["TP2", "TP2xPP2", "TP2xDP2"],
)
def test_the_demo_trains_alike_in_one_process_and_over_ranks(
    layout: dict[str, int], demo: Demo, alone: tuple[list[dict[str, float]], dict[str, Tensor]]
) -> None:
    metrics, weights = trained(demo, **layout)
    expected, expected_weights = alone
    assert len(metrics) == UPDATES and [one["lr"] for one in metrics] == [one["lr"] for one in expected]
    for found, one in zip(metrics, expected):
        # The loss is a sum of terms of both signs that nearly cancel: relative to the terms' size, about 1.
        assert abs(found["loss"] - one["loss"]) <= RELATIVE
        assert found["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=RELATIVE)
        for name in ("entropy", "kl", "ratio"):
            assert found[name] == pytest.approx(one[name], rel=RELATIVE, abs=1e-7), name
    assert set(weights) == set(expected_weights)
    distance, size = _norm({name: weights[name] - tensor for name, tensor in expected_weights.items()}), _norm(weights)
    assert distance <= RELATIVE * size
    # Adam moves an element that has nearly no gradient (a key bias: softmax hardly sees it) by what rounding makes of it.
    rate = demo.config.trainer.lr
    far = sum(int(((weights[name] - tensor).abs() > 0.1 * rate).sum()) for name, tensor in expected_weights.items())
    assert far <= 1e-4 * sum(tensor.numel() for tensor in expected_weights.values()), far
    start = dict(iterate_weights(demo.config.model.path))
    assert _norm({name: tensor - start[name] for name, tensor in expected_weights.items()}) > 100 * RELATIVE * size


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()))
