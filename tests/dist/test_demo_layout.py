"""The demo's model, trainer and algorithm train alike in one process and over ranks: the same batches, three updates."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import token_weights
from rlflow.algorithms.algorithm import Algorithm
from rlflow.batching import make_batch
from rlflow.config.schema import RunConfig, load_config
from rlflow.loop import score_step
from rlflow.models.huggingface import iterate_weights
from rlflow.rollout import Rollout
from rlflow.run.assemble import make_trainer
from rlflow.trainer.base import Trainer
from rlflow.types import Batch
from rlflow_environments.search import SearchEnvironment
from tests.reference import ORACLE
from tests.reference.trainer import ReferenceTrainer

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "searchr1"
UPDATES = 3
RELATIVE = 1e-5
GRADIENT_NOISE = (
    6e-8  # half a unit in the last place of float32, of gradients whose norm is clipped to 1
)


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
        from rlflow.models.tiny import write_random_model, write_tokenizer
        from rlflow_environments.search.world.warm_up import (
            LEARNED_ON,
            TAGS,
            VOCABULARY,
            tokenizer_texts,
        )

        write_tokenizer(
            policy, tokenizer_texts(), vocabulary=VOCABULARY, tags=TAGS, learned_on=LEARNED_ON
        )
        write_random_model(policy)
    config = load_config(
        RECIPE / "config" / "demo.yaml", [f"model.path={policy}", "trainer.schedule.warmup_steps=1"]
    )
    world = {
        "directory": str(directory / "world"),
        "size": 0.1,
        "train_questions": 60,
        "val_questions": 20,
    }
    environment = SearchEnvironment(world=world, retriever="bm25")
    tasks = environment.tasks("train")
    section = config.rollout
    with Rollout.from_pretrained(
        policy, environment, samples_per_prompt=4, max_turns=section.max_turns,
        max_response_tokens=section.max_response_tokens, max_total_tokens=section.max_total_tokens,
    ) as rollout:  # fmt: skip
        steps = [
            rollout.collect(tasks[start : start + 2], step) for step, start in enumerate((0, 2, 4))
        ]
    return Demo(
        config,
        [_with_rewards([one for group in groups for one in group.usable]) for groups in steps],
    )


def _with_rewards(trajectories: list[Any]) -> Batch:
    """A batch whose rewards differ within every group, as those of a policy that knows something would."""
    draw = random.Random(0)
    for start in range(0, len(trajectories), 4):
        rewards = draw.sample([0.0, 0.0, 1.0, 1.0], 4)
        for member, reward in zip(trajectories[start : start + 4], rewards):
            member.reward, member.group_stats = reward, (4, 0.5, 3**-0.5)
    return make_batch(trajectories)


def trained(
    demo: Demo, observe: Callable[[Trainer], None] = lambda trainer: None, **layout: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of each update, after which `observe` sees the trainer, and the weights after the last."""
    config = dataclasses.replace(
        demo.config,
        trainer=dataclasses.replace(
            demo.config.trainer, **{k: v for k, v in layout.items() if k != "ranks"}
        ),
        cluster=dataclasses.replace(demo.config.cluster, ranks=layout.get("ranks", 0)),
    )
    algorithm = Algorithm.from_config(config, response_budget=1)
    trainer = make_trainer(config)
    try:
        trainer.snapshot("reference")
        metrics = []
        for batch in demo.batches:
            batch = score_step(batch, trainer, algorithm.needs)
            batch = batch.replace(advantages=algorithm.advantage(batch)[:, None] * batch.loss_mask)
            batch = batch.replace(weights=token_weights(batch))
            metrics.append(trainer.update(batch, algorithm.loss))
            observe(trainer)
        return metrics, dict(trainer.weights())
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def alone(demo: Demo) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return trained(demo)


@pytest.fixture(scope="module")
def smallest_gradients(demo: Demo) -> dict[str, Tensor]:
    """Of every element, the smallest of its clipped gradients in the updates (absolute), as the reference trainer has them."""
    updates: list[dict[str, Tensor]] = []

    def observe(trainer: Trainer) -> None:
        assert isinstance(trainer, ReferenceTrainer)
        updates.append(
            {
                name: one.grad.abs()
                for name, one in trainer.model.named_parameters()
                if one.grad is not None
            }
        )

    trained(demo, observe, backend=ORACLE, packing=False)
    return {name: torch.stack([update[name] for update in updates]).amin(0) for name in updates[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 2, "tensor_parallel": 2},
        {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
        {"ranks": 4, "tensor_parallel": 2},
    ],
    ids=["TP2", "TP2xPP2", "TP2xDP2"],
)
def test_the_demo_trains_alike_in_one_process_and_over_ranks(
    layout: dict[str, int],
    demo: Demo,
    alone: tuple[list[dict[str, float]], dict[str, Tensor]],
    smallest_gradients: dict[str, Tensor],
) -> None:
    metrics, weights = trained(demo, **layout)
    expected, expected_weights = alone
    assert len(metrics) == UPDATES and [one["lr"] for one in metrics] == [
        one["lr"] for one in expected
    ]
    for found, one in zip(metrics, expected):
        # The loss is a sum of terms of both signs that nearly cancel: relative to the terms' size, about 1.
        assert abs(found["loss"] - one["loss"]) <= RELATIVE
        assert found["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=RELATIVE)
        for name in ("entropy", "ratio"):
            assert found[name] == pytest.approx(one[name], rel=RELATIVE, abs=1e-7), name
        # exp(r) - r - 1 of a log ratio r: rounding of the few tokens that moved far is multiplied by exp(r).
        assert found["kl"] == pytest.approx(one["kl"], rel=10 * RELATIVE, abs=1e-7)
    assert set(weights) == set(expected_weights)
    distance, size = (
        _norm({name: weights[name] - tensor for name, tensor in expected_weights.items()}),
        _norm(weights),
    )
    assert distance <= RELATIVE * size
    rate = demo.config.trainer.lr
    for name, tensor in expected_weights.items():
        excess = (weights[name] - tensor).abs() / rate - _most_apart(
            smallest_gradients[name], demo.config.trainer.adamw.eps
        )
        assert excess.max() <= 0, f"{name}: {excess.max():.2g} lr too far apart"
    start = dict(iterate_weights(demo.config.model.path))
    assert (
        _norm({name: tensor - start[name] for name, tensor in expected_weights.items()})
        > 100 * RELATIVE * size
    )


def _most_apart(gradient: Tensor, eps: float) -> Tensor:
    """How far two runs that differ in rounding alone may move an element apart, in learning rates.

    Adam moves an element by m / (sqrt(v) + eps), about the sign of its gradient, so what rounding does to a gradient g
    shows in the weight as noise / (|g| + eps): all of it where g itself is rounding (key biases, which softmax hardly sees;
    rows of tokens that were never likely). Each of the updates moves it by at most about one learning rate, either way.
    0.001 is what rounding of the weights themselves and of large gradients can do."""
    return 1e-3 + (GRADIENT_NOISE / (gradient + eps)).clamp(max=2 * UPDATES)


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()))
