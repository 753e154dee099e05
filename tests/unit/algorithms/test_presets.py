"""Every preset is a whole algorithm: its parts exist, take its keywords, fit together and update a real model; on samples of the
policy itself all kernels have one gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from rlflow.algorithms.algorithm import Algorithm
from rlflow.algorithms.base import Kernel
from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.batching import make_batch
from rlflow.config.checks import check_config
from rlflow.config.loading import PRESETS, presets
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.loop import training_step
from rlflow.report.timer import PhaseTimer
from rlflow.rollout import Tokenizer
from rlflow.run.assemble import make_trainer
from rlflow.trainer.base import Trainer
from rlflow.types import (
    Batch,
    Group,
    PolicyOutput,
    Segment,
    StopReason,
    Task,
    Trajectory,
    Turn,
    stamp,
)
from tests.flow.letters import asked_of_the_user, write_letters_model
from tests.reference import ORACLE
from tests.unit.algorithms.batches import Said, Tried, batch_of

NAMES = list(presets())
ROOT = Path(__file__).resolve().parents[3]
STARTING_POLICY = ROOT / "recipes" / "searchr1" / "starting_policy"
REWARDS = ([1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0], [0, 1, 0, 0])
"""Of four attempts at four tasks."""


def algorithm_of(
    name: str, folder: Path, *overrides: str, teacher: Path = STARTING_POLICY
) -> tuple[RunConfig, Algorithm]:
    """A preset's parts. A swarm gets a directory of its own and no rollout: what it does with groups needs both, see
    tests/flow/test_presets.py."""
    config = load_config(None, [*asked_of_the_user(name, folder, teacher), *overrides], preset=name)
    check_config(config, components=False)
    return config, Algorithm.from_config(config, response_budget=100, rollout=None)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_configuration_and_its_parts_can_be_made(name: str, tmp_path: Path) -> None:
    algorithm_of(name, tmp_path)[1].close()


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_what_it_is_and_sets_the_algorithm_alone(name: str) -> None:
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    comment = list(itertools.takewhile(lambda line: line.startswith("# "), text.splitlines()))
    assert 1 <= len(comment) <= 4 and len(presets()[name]) > 40 and name == name.lower()
    assert max(map(len, text.splitlines())) <= 128
    assert set(yaml.safe_load(text)) == {"algorithm"}


@pytest.mark.parametrize(
    ("name", "key"), [("opd", "teacher.*path"), ("sapo_swarm", "filters.*transport")]
)
def test_what_a_preset_leaves_to_the_user_is_asked_for(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}"):
        check_config(load_config(None, [], preset=name), components=False)


def test_the_page_of_presets_lists_every_one_and_no_other() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1].strip().strip("`")
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    assert sorted(rows) == NAMES


def test_the_default_algorithm_is_not_hidden_in_a_preset() -> None:
    assert RunConfig().algorithm.losses == [{"name": "ppo_clip"}]


def named_rewards(reward: float, attempt: int) -> dict[str, float]:
    """For `gdpo`: two rewards of other scales, which do not rank a group's attempts alike."""
    return {"right": float(reward), "brief": 10.0 * (attempt % 3)}


def fresh_batch() -> Batch:
    """Attempts of one to three turns whose log-probs are the policy's own, whoever asks; what models know is made up."""
    draw = torch.Generator().manual_seed(1)
    before = itertools.cycle([[], [Said(2, 0.0, 1.0)], [Said(2, 0.0, 1.0), Said(1, 0.0, 2.0)]])
    batch = batch_of(
        *(
            [
                Tried([*next(before), Said(3, float(reward), 4.0)], named_rewards(reward, place))
                for place, reward in enumerate(group)
            ]
            for group in REWARDS
        )
    )
    own, other, values, entropy = torch.rand(4, *batch.tokens.shape, generator=draw)
    own = -own.masked_fill(~batch.loss_mask, 0.0)
    return batch.replace(
        logprobs=own, proximal_logprobs=own, current_logprobs=own, reference_logprobs=-other, teacher_logprobs=-other,
        values=values, final_values=values[:, 0], current_entropy=entropy, trainer_version=torch.zeros_like(batch.lengths),
    )  # fmt: skip


def gradient(algorithm: Algorithm) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T) float64 of the policy-gradient term by the log-probs, the advantages A, and each token's share Z of the loss."""
    batch = algorithm.credit(fresh_batch())
    batch, _ = algorithm.transform(batch.replace(weights=algorithm.aggregate(batch)))
    kernel = [term for term in algorithm.loss.terms if isinstance(term, Kernel)]
    assert len(kernel) == 1
    logprobs = batch.logprobs.double().requires_grad_()
    loss, _ = kernel[0](PolicyOutput(logprobs), batch)
    (found,) = torch.autograd.grad((loss * batch.weights.double()).sum(), logprobs)
    shares = batch.weights if batch.coefficients is None else batch.weights * batch.coefficients
    return found, batch.advantages.double(), shares.double()


def test_on_the_policys_own_samples_presets_of_equal_advantage_and_share_have_equal_gradients(
    tmp_path: Path,
) -> None:
    """At ratio 1 the gradient of every kernel K(r, A) by the log-prob is A, so that of the loss is minus A Z."""
    found = {}
    for name in NAMES:
        algorithm = algorithm_of(name, tmp_path)[1]
        found[name] = gradient(algorithm)
        algorithm.close()
    for name, (slope, advantages, shares) in found.items():
        assert float(slope.abs().max()) > 1e-4, name
        torch.testing.assert_close(slope, -advantages * shares, rtol=1e-6, atol=1e-9, msg=name)
    same = {
        (one, other)
        for one, other in itertools.combinations(NAMES, 2)
        if all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(found[one][1:], found[other][1:], strict=True)
        )
    }
    for one, other in same:
        torch.testing.assert_close(found[one][0], found[other][0], rtol=1e-6, atol=1e-9)
    # Other kernels and corrections on the same A and Z: the comparison is not empty.
    assert same >= {
        ("cispo", "dapo"),
        ("dapo", "m2po_paper"),
        ("drgrpo", "llamarl_aipo"),
        ("gspo", "soft_sapo"),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model") / "letters")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("teacher") / "letters", seed=3, scale=0.3)


def groups_of(trainer: Trainer) -> list[Group]:
    """Made-up attempts of two turns, with the log-probs that the trainer gives them."""
    draw = torch.Generator().manual_seed(2)
    mask = torch.tensor([False, False, True, True, False, True, True])
    groups = []
    for place, rewards in enumerate(REWARDS):
        attempts: list[Trajectory] = []
        for attempt, reward in enumerate(rewards):
            tokens = torch.randint(2, 10, mask.shape, generator=draw)
            segment = Segment(tokens, mask, None, torch.where(mask, 0, -1))
            turns = [Turn(0, 2, 4, 0.0, 0.5), Turn(0, 5, 7, float(reward), 1.5)]
            attempts.append(
                Trajectory(
                    f"t{place}",
                    f"g{place}",
                    [segment],
                    turns,
                    float(reward),
                    StopReason.TERMINATED,
                    attempt=attempt,
                    rewards=named_rewards(reward, attempt),
                )
            )
        stamp(attempts)
        groups.append(Group(f"g{place}", Task(f"t{place}", "a?"), attempts))
    everyone = [one for group in groups for one in group.trajectories]
    scores = trainer.score(make_batch(everyone))["logprobs"]
    for one, row in zip(everyone, scores, strict=True):
        one.segments[0] = dataclasses.replace(one.segments[0], logprobs=torch.where(mask, row, 0.0))
    return groups


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_makes_the_updates_of_a_step(
    name: str, model: Path, teacher: Path, tmp_path: Path
) -> None:
    options = (f"model.path={model}", f"trainer.backend={ORACLE}", "trainer.lr=1e-3", "rollout.prompts_per_step=4",
               "rollout.samples_per_prompt=4")  # fmt: skip
    config, algorithm = algorithm_of(name, tmp_path, *options, teacher=teacher)
    trainer = make_trainer(config)
    before = {key: value.clone() for key, value in trainer.weights()}
    if "reference" in algorithm.needs:
        trainer.snapshot("reference")
    if algorithm.teacher is not None:
        tokenizer = Tokenizer.from_pretrained(model)
        algorithm.teacher.open(
            Classroom(trainer, tokenizer, lambda task: tokenizer.encode_prompt(task.prompt), 1.0)
        )
    groups = groups_of(trainer)
    if name != "sapo_swarm":
        groups = algorithm.complete(algorithm.admit(groups))
    metrics = training_step(0, groups, trainer, algorithm, PhaseTimer())
    assert len(groups) == 4 and all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["train/gradient_norm"] > 0
    assert any(not torch.equal(value, before[key]) for key, value in trainer.weights())
    algorithm.close()
    trainer.close()


@pytest.mark.parametrize("name", ["dart", "mobile_agent_trpo"])
def test_a_stored_success_is_trained_on_with_what_else_the_preset_corrects(
    name: str, model: Path, tmp_path: Path
) -> None:
    options = (f"model.path={model}", f"trainer.backend={ORACLE}", "trainer.lr=1e-3")
    config, algorithm = algorithm_of(name, tmp_path, *options)
    trainer = make_trainer(config)
    if "reference" in algorithm.needs:
        trainer.snapshot("reference")
    algorithm.complete(algorithm.admit(groups_of(trainer)))
    failed = groups_of(trainer)
    for one in (one for group in failed for one in group.trajectories):
        one.reward = one.turns[-1].reward = 0.0
    completed = algorithm.complete(algorithm.admit(failed))
    stored = [one for group in completed for one in group.trajectories if one.source == "replay"]
    assert len(stored) == 4 and all(
        one.reward == 1 and one.segments[0].logprobs is None for one in stored
    )
    metrics = training_step(1, completed, trainer, algorithm, PhaseTimer())
    assert (
        all(math.isfinite(value) for value in metrics.values())
        and metrics["train/gradient_norm"] > 0
    )
    trainer.close()
