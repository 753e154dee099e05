"""The contract check of algorithms finds each planted fault by its name, and nothing in the parts that ship."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from rlflow_tools.kit.checks.parts import check_algorithm, kind_of

from rlflow.algorithms.algorithm import algorithm_needs
from rlflow.algorithms.base import Advantage, Curator, Part, as_part
from rlflow.algorithms.trial.first_call import LOWERED, check_first_call, sign_problem
from rlflow.commands.cli import main
from rlflow.components import LOSS, PARTS
from rlflow.config.schema import load_config
from rlflow.errors import ConfigError
from rlflow.types import Batch, Loss, LossResult, PolicyOutput, Task, as_loss

REQUIRED: dict[str, dict[str, Any]] = {
    "kl": {"coefficient": 0.1},
    "entropy": {"coefficient": 0.1},
    "entropy_target": {"target": 0.2},
    "kl_reward": {"coefficient": 0.1},
    "sequence_mask": {"threshold": 0.1},
    "overlong": {"buffer": 16},
}
NEED_A_ROLLOUT = ("swarm", "demonstrations")
SHIPPED = [
    (kind.name, name)
    for kind in PARTS.values()
    for name in kind.names()
    if name not in NEED_A_ROLLOUT
]


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_every_part_that_ships_keeps_the_contract(kind: str, name: str) -> None:
    report = check_algorithm(name, kind, **REQUIRED.get(name, {}))
    assert report.passed, str(report)
    assert report.facts[0] == f"{kind} '{name}'"


class Sums(Loss):
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        return -(output.logprobs * batch.loss_mask).sum(dim=1), {}


class Unmasked(Loss):
    """Shares the row's mean with every token, padding and observations counted in."""

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        mean = output.logprobs.mean(dim=1, keepdim=True)
        return torch.where(batch.loss_mask, -output.logprobs - mean, 0.0), {}


class OverBatch(Loss):
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        scale = batch.advantages[batch.loss_mask].abs().max()
        return torch.where(batch.loss_mask, -output.logprobs * batch.advantages / scale, 0.0), {}


class Overflows(Loss):
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        return torch.where(
            batch.loss_mask, -(output.logprobs - batch.logprobs).exp() * batch.advantages, 0.0
        ), {}


class KeepsGraph(Loss):
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        loss = torch.where(batch.loss_mask, -output.logprobs, 0.0)
        return loss, {"mine": loss}


class WrongSign(Loss):
    """Minimizes what it ought to maximize, a KL term beside it."""

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        ratio = (output.logprobs - batch.logprobs).clamp(-5, 5).exp()
        kl = 0.1 * (output.logprobs - batch.logprobs)
        return torch.where(batch.loss_mask, ratio * batch.advantages + kl, 0.0), {}


class Detached(Loss):
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        return -output.logprobs.detach() * batch.advantages, {}


class EntropyWithoutNeeds(Loss):
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        bonus = -0.01 * output.entropy  # type: ignore[operator]
        return torch.where(batch.loss_mask, bonus - output.logprobs * batch.advantages, 0.0), {}


class ReferenceWithoutNeeds(Advantage):
    def __call__(self, batch: Batch) -> Any:
        return batch.logprobs - batch.reference_logprobs  # type: ignore[operator]


def entropy_function(output: PolicyOutput, batch: Batch) -> Any:
    return -0.01 * output.entropy, {}  # type: ignore[operator]


class NeverVanishes(Loss):
    vanishes_at_zero_advantage = True

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        return torch.where(batch.loss_mask, -output.logprobs, 0.0), {}


class ReadsMore(Loss):
    """Reads the reference and does not say so."""

    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        return torch.where(
            batch.loss_mask, output.logprobs - batch.require("reference_logprobs", "mine"), 0.0
        ), {}


class InPlace(Loss):
    def __call__(self, output: PolicyOutput, batch: Batch) -> LossResult:
        batch.advantages.mul_(2)
        return torch.where(batch.loss_mask, -output.logprobs * batch.advantages, 0.0), {}


def two_tensors(logprobs: Any, advantages: Any) -> Any:
    return -(logprobs * advantages)


def no_metrics(output: PolicyOutput, batch: Batch) -> Any:
    return -output.logprobs


def needs_the_batch_alone(batch: Batch) -> Any:
    return -batch.advantages


class WithoutBase:
    def __call__(self, output: PolicyOutput, batch: Batch) -> Any:
        return output.logprobs, {}


def standardized(batch: Batch) -> Any:
    """Divides by a deviation of 0 where a group is of equal rewards."""
    return (batch.require("rewards", "mine") - batch.require("group_mean", "mine")) / batch.require(
        "group_std", "mine"
    )


def by_place(batch: Batch) -> Any:
    return torch.arange(len(batch)).float()


def forgetful(batch: Batch) -> Batch:
    return batch.loss_mask  # type: ignore[return-value]


def remasks(batch: Batch) -> Batch:
    return batch.replace(loss_mask=batch.loss_mask & (batch.advantages > 0))


def keeps_first_row(batch: Batch) -> Batch:
    rows = torch.arange(len(batch))[:, None] == 0
    return batch.replace(coefficients=(rows & batch.loss_mask).float())


def half_returns(batch: Batch) -> Any:
    """Advantages by row, so the returns ought to be left out or be by token too."""
    return batch.require("rewards", "mine").float(), torch.zeros(batch.tokens.shape)


def returns_by_place(batch: Batch) -> Any:
    return torch.zeros(batch.tokens.shape), torch.arange(len(batch))[:, None].expand(
        batch.tokens.shape
    ).float()


class Counts(Part):
    """Remembers how often it was asked, but not in its state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Batch) -> Any:
        self.calls += 1
        return batch.require("rewards", "mine").float() * self.calls


class Restless(Curator):
    """Another order each time it is made."""

    made = itertools.count()

    def __init__(self, tasks: list[Task], seed: int) -> None:
        self.tasks, self.at = tasks, next(self.made)

    @property
    def epoch(self) -> float:
        return 0.0

    def take(self, count: int) -> list[Task]:
        return [self.tasks[self.at % len(self.tasks)]] * count


LINE = two_tensors.__code__.co_firstlineno + 1
FAULTS = [
    ("Sums", None, "does not sum"),
    ("Unmasked", None, "off the loss mask"),
    ("OverBatch", None, "micro-batches"),
    ("Overflows", None, "not finite at a log-ratio"),
    ("KeepsGraph", None, "use .detach()"),
    ("NeverVanishes", None, "vanishes_at_zero_advantage"),
    ("ReadsMore", None, "needs"),
    ("InPlace", None, "in place"),
    ("WrongSign", None, "lowers tokens of positive advantage: is a minus missing?"),
    ("Detached", None, "the loss has no gradient: it is cut off from output.logprobs"),
    ("EntropyWithoutNeeds", None, "reads output.entropy, which is None"),
    ("EntropyWithoutNeeds", None, "needs = frozenset({'entropy'})"),
    ("ReferenceWithoutNeeds", None, "needs = frozenset({'reference'})"),
    ("entropy_function", None, "derive a class from rlflow.types.Loss with needs"),
    ("standardized", "advantage", "not finite"),
    ("by_place", "advantage", "rows in another order"),
    ("half_returns", "advantage", "(advantages, returns), (B, T) both"),
    ("returns_by_place", "advantage", "rows in another order change the returns"),
    (
        "by_place",
        "aggregate",
        "the aggregate returned a tensor of shape (17,), where (B, T) is (17, 13)",
    ),
    ("forgetful", "transform", "the transform returned a tensor of shape (17, 13)"),
    (
        "two_tensors",
        None,
        f"'PolicyOutput' and 'Batch' ({__file__}:{LINE} in two_tensors); a loss takes (output: ",
    ),
    (
        "no_metrics",
        None,
        "the loss returned a tensor of shape (17, 13), where (B, T) is (17, 13); a loss takes (output: ",
    ),
    (
        "needs_the_batch_alone",
        "loss",
        "takes 1 positional argument but 2 were given; a loss takes (output: PolicyOutput",
    ),
    ("remasks", None, "other batch.loss_mask"),
    ("keeps_first_row", None, "rows in another order"),
    ("Counts", "advantage", "restored from its state_dict"),
    ("Restless", None, "same seed"),
]


@pytest.mark.parametrize(("name", "kind", "text"), FAULTS)
def test_each_planted_fault_is_told(name: str, kind: str | None, text: str) -> None:
    report = check_algorithm(f"{__file__}:{name}", kind)
    assert any(text in problem for problem in report.problems), str(report)


@pytest.mark.parametrize("name", ["WrongSign", "Detached", "EntropyWithoutNeeds"])
def test_one_mistake_is_one_line(name: str) -> None:
    report = check_algorithm(f"{__file__}:{name}")
    assert len(report.problems) == 1, str(report)


def test_a_loss_that_lowers_some_of_what_is_better_is_a_note_and_the_right_sign_is_none() -> None:
    """Some methods push down on purpose, as those that pass over the likeliest tokens."""

    def half(output: PolicyOutput, batch: Batch) -> LossResult:
        even = torch.arange(batch.tokens.shape[1]) % 2 * 2 - 1
        loss = -output.logprobs * batch.advantages * even
        return torch.where(batch.loss_mask, loss, 0.0), {}

    def right(output: PolicyOutput, batch: Batch) -> LossResult:
        return torch.where(batch.loss_mask, -output.logprobs * batch.advantages, 0.0), {}

    def without(output: PolicyOutput, batch: Batch) -> LossResult:
        return torch.where(batch.loss_mask, output.logprobs, 0.0), {}

    text, of_all = sign_problem(as_loss(half))
    assert LOWERED in text and not of_all
    assert sign_problem(as_loss(right)) == sign_problem(as_loss(without)) == ("", False)


def test_a_run_says_so_of_a_loss_of_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    check_first_call(LOSS, f"{__file__}:WrongSign", "algorithm.losses[0]")
    assert LOWERED in caplog.text
    with pytest.raises(ConfigError, match="no gradient"):
        check_first_call(LOSS, f"{__file__}:Detached", "algorithm.losses[0]")


def test_the_kind_is_told_from_name_class_or_signature() -> None:
    assert [kind_of(name).name for name in ("ppo_clip", "grpo", "epochs")] == [
        "loss",
        "advantage",
        "curator",
    ]
    assert kind_of(f"{__file__}:remasks").name == "transform"
    with pytest.raises(ConfigError, match=r"--kind .*, or annotate what it returns: Tensor"):
        kind_of(f"{__file__}:by_place")
    with pytest.raises(
        ConfigError, match=r"--kind .*, or derive it from rlflow\.types\.Loss, or from Advantage"
    ):
        kind_of(f"{__file__}:WithoutBase")
    with pytest.raises(ConfigError, match="kinds that know it: none"):
        kind_of("ppo_clap")


def test_the_command_ends_with_1_where_the_contract_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def mine(output, batch):\n    return output.logprobs.sum(), {}\n"
    )
    assert main(["algorithm", "check", f"{tmp_path}/mine.py:mine"]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    assert main(["algorithm", "check", "ppo_clip", "--set", "clip_low=0.1"]) == 0
    assert main(["algorithm", "check", "ppo_clip", "--set", "clip=0.1"]) == 2
    assert "ConfigError: ppo_clip: unknown keyword 'clip'" in capsys.readouterr().err
    assert main(["algorithm", "check", "ppo_clip", "--set", "clip_low=-1"]) == 2
    assert "ConfigError: ppo_clip.clip_low: expected a number" in capsys.readouterr().err


def test_the_list_names_every_part_with_its_keywords(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithm", "list", "--kind", "loss"]) == 0
    text = capsys.readouterr().out
    assert (
        "ppo_clip(clip_low, clip_high, dual_clip, anchor)" in text
        and "advantage" not in text.split("\n")[0]
    )


def test_the_examples_of_the_docs_pass_the_commands_of_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[5] / "docs" / "write_an_algorithm.md").read_text(
        encoding="utf-8"
    )
    examples = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (tmp_path / "my_method.py").write_text("\n".join(examples))
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^rlflow (algorithm check [^#\n]*)", page, flags=re.M)
    assert len(commands) == len(examples) == 4
    for command in commands:
        assert main(shlex.split(command)) == 0, (command, capsys.readouterr())
    (tmp_path / "run.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, flags=re.S)[-1])
    assert algorithm_needs(load_config("run.yaml").algorithm) == {"entropy", "reference", "rollout"}


@pytest.mark.parametrize("needs", ["entropy", ("entropy",)], ids=["text", "tuple"])
@pytest.mark.parametrize("base", [Loss, Advantage])
def test_needs_that_are_no_set_are_refused_with_the_fix(base: type, needs: object) -> None:
    part = type("Mine", (base,), {"needs": needs, "__call__": lambda self, *given: given})()
    with pytest.raises(
        ConfigError,
        match=r"Mine\.needs: expected a set .* write needs = frozenset\(\{'entropy'\}\)",
    ):
        as_loss(part) if base is Loss else as_part(part)
