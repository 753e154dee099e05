"""Every configuration of the recipes is read without a complaint, and every component that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlflow.components import ENGINE
from rlflow.config.batch_plan import batch_plan
from rlflow.config.checks import check_config
from rlflow.config.loading import load_config
from rlflow.config.schema import RunConfig
from rlflow.trainer.optimizers import AdamW
from rlflow.trainer.options import TrainerOptions

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "recipes").glob("*/config/*.yaml"))


def test_recipes_say_that_no_gpu_has_seen_them() -> None:
    for path in CONFIGS:
        if "qwen" in path.stem:
            comments = " ".join(
                line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")
            )
            assert "Never run on a GPU by us" in comments, path.name


def missing_part(path: Path) -> str:
    """What a recipe names that this version does not have: an engine or adapters that come with another."""
    text = path.read_text()
    base = re.search(r"^base: (\S+\.yaml)", text, flags=re.M)
    if "{name: vllm" in text and "vllm" not in ENGINE.names():
        return "the engine vllm"
    if "lora:" in text and not hasattr(TrainerOptions(), "lora"):
        return "trainer.lora"
    return missing_part(path.parent / base[1]) if base else ""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_is_read_and_its_components_exist(path: Path) -> None:
    if part := missing_part(path):
        pytest.skip(f"it needs {part}")
    config = load_config(path, [], RunConfig)
    check_config(config)
    assert (
        f"{config.rollout.prompts_per_step * config.rollout.samples_per_prompt:,} per step"
        in batch_plan(config)
    )


def test_qwen_recipe_has_the_values_of_the_published_one() -> None:
    config = load_config(ROOT / "recipes/searchr1/config/qwen2.5_3b.yaml", [], RunConfig)
    rollout, algorithm, trainer = config.rollout, config.algorithm, config.trainer
    assert (
        rollout.prompts_per_step,
        rollout.samples_per_prompt,
        algorithm.minibatches_per_step,
    ) == (512, 4, 2)
    assert (
        rollout.max_total_tokens,
        config.data.max_prompt_tokens,
        rollout.max_response_tokens,
    ) == (7096, 4096, 3000)
    environment = config.environment
    assert (environment["protocol"], environment["max_turns"], environment["top_k"]) == (
        "rlinf",
        2,
        3,
    )
    assert (rollout.max_observation_tokens, rollout.temperature, rollout.chat_template) == (
        None,
        1.0,
        False,
    )
    assert algorithm.losses[0]["anchor"] == "proximal"
    assert [loss["name"] for loss in algorithm.losses] == ["ppo_clip", "kl"]
    assert (algorithm.losses[0]["clip_low"], algorithm.losses[1]["coefficient"]) == (0.2, 0.001)
    assert trainer.adamw == AdamW(beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.01)
    assert (trainer.lr, trainer.max_gradient_norm, trainer.tokens_per_microbatch) == (
        1e-6,
        0.8,
        8192,
    )
    assert (config.evaluation.every_steps, config.checkpoint.every_steps, config.cluster.ranks) == (
        25,
        25,
        8,
    )
