"""Runs of a policy with experts: routes ride with tokens, and faults planted in the engine end the run with their name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.batching import ROUTED, ROUTES, make_batch
from rlflow.errors import ConfigError, DataError
from rlflow.loop import train
from rlflow.preflight.examine import examine
from rlflow.preflight.start import check_start
from rlflow.report.records import read_trajectories
from rlflow.report.sinks import read_metrics
from rlflow.rollout import codec
from rlflow.rollout.embedded.cache import KeyValueCache
from rlflow.rollout.embedded.scheduler import Scheduler
from rlflow.run.assemble import make_rollout, make_trainer
from rlflow.run.directory import RunDirectory
from rlflow.trainer.routing import routing_metrics
from tests.flow.letters import letters_config, write_letters_model
from tests.flow.thinking import TURNS, thinking_config, write_thinking_model

EXPERTS = {"num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1], "scale": 0.3}
SHORT = ("run.steps=2", "trainer.router_replay=rollout", "evaluation.at_start=false", "evaluation.every_steps=0",
         "checkpoint.every_steps=0", "metrics.picture=false", "checkpoint.export=false")  # fmt: skip
EXACT = 1e-5
LONG = "environment={name: '%s', prompt: '" + "abcdef|?" * 6 + "{letter}?'}"
"""A prompt beyond a block of the engine's cache."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("model") / "experts", "qwen3_moe", **EXPERTS)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_model(
        tmp_path_factory.mktemp("model") / "thinking", "qwen3_moe", **EXPERTS
    )


def steps_of(runs: Path) -> list[dict[str, float]]:
    return [
        one
        for one in read_metrics(RunDirectory.open(runs / "letters").metrics)
        if "train/loss" in one
    ]


@pytest.mark.parametrize("replay", ["rollout", "recompute", "off"])
def test_a_run_tells_what_its_routers_do(experts: Path, tmp_path: Path, replay: str) -> None:
    balance = "trainer.balance.aux_loss=0.01"
    train(letters_config(experts, tmp_path, *SHORT, f"trainer.router_replay={replay}", balance))
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    for step in steps:
        assert step["train/logprob_gap"] < EXACT and abs(step["train/ratio"] - 1) < EXACT
        assert 1 <= step["train/expert_load_max"] <= 4 and 0 < step["train/expert_spread"] <= 1
        assert step["train/router_aux_loss"] > 1 and "train/router_z_loss" not in step
        assert ("train/routes_differ" in step) == (replay == "rollout")
        if replay == "rollout":
            assert step["train/routes_differ"] == 0.0
            assert max(step["train/logprob_gap_free"], step["train/logprob_gap_replayed"]) < EXACT


@pytest.mark.slow
def test_the_engine_samples_with_biases_that_moved(tmp_path: Path) -> None:
    """By 2 per update where scores lie between 0 and 1: the experts of the second step are others."""
    sizes = {"n_routed_experts": 8, "num_hidden_layers": 3, "scale": 0.3}
    biased = write_letters_model(tmp_path / "model", "glm4_moe", **sizes)
    moving = ("trainer.router_replay=off", "trainer.balance.bias_rate=2.0")
    train(letters_config(biased, tmp_path / "runs", *SHORT, *moving))
    steps = steps_of(tmp_path / "runs")
    assert len(steps) == 2
    for step in steps:
        assert step["train/logprob_gap"] < EXACT and abs(step["train/ratio"] - 1) < EXACT


# ---------------------------------------------------------------- faults


def shifted(by: int) -> Callable[..., Any]:
    def routes(kept: Callable[..., Any], cache: KeyValueCache, table: Tensor, count: int) -> Any:
        found, version = kept(cache, table, count)
        return None if found is None else found.roll(by, 0), version

    return routes


def of_another_layer(
    kept: Callable[..., Any], cache: KeyValueCache, table: Tensor, count: int
) -> Any:
    found, version = kept(cache, table, count)
    return None if found is None else found.flip(1), version


def without_a_prefix(
    kept: Callable[..., Any], cache: KeyValueCache, table: Tensor, count: int
) -> Any:
    found, version = kept(cache, table, count)
    return None if found is None else found[32:], version


def zeros_for_a_prefix(
    kept: Callable[..., Any], cache: KeyValueCache, table: Tensor, count: int
) -> Any:
    found, version = kept(cache, table, count)
    return None if found is None else torch.cat([torch.zeros_like(found[:32]), found[32:]]), version


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (shifted(1), "shifted by one token: each has those of the token before it"),
        (of_another_layer, "Layer 0 has those of another layer, 1"),
        (
            without_a_prefix,
            r"row 0: expected routes of \d+ tokens, .* an engine that leaves out those of a cached prefix",
        ),
        (zeros_for_a_prefix, "token 0: its routes name an expert twice, as zeros do"),
    ],
    ids=["shifted", "layer", "prefix", "zeros"],
)
def test_routes_that_are_not_those_of_their_tokens_end_the_run(
    experts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Any],
    words: str,
) -> None:
    kept = KeyValueCache.routes
    monkeypatch.setattr(
        KeyValueCache, "routes", lambda cache, table, count: fault(kept, cache, table, count)
    )
    with pytest.raises(DataError, match=words):
        train(long_prompts(experts, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [(without_a_prefix, "expected routes of"), (zeros_for_a_prefix, "name an expert twice")],
    ids=["prefix", "zeros"],
)
def test_a_fault_of_the_first_turn_of_every_eighth_episode_ends_the_first_step(
    experts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Any],
    words: str,
) -> None:
    """The second turns cover their whole episodes."""
    kept, played = KeyValueCache.routes, set[int]()

    def routes(cache: KeyValueCache, table: Tensor, count: int) -> Any:
        first = count < 53  # the second turn's are of more
        if first:
            played.add(len(played))
        return (fault if first and len(played) % 8 == 0 else unchanged)(kept, cache, table, count)

    def unchanged(kept: Any, cache: KeyValueCache, table: Tensor, count: int) -> Any:
        return kept(cache, table, count)

    monkeypatch.setattr(KeyValueCache, "routes", routes)
    with pytest.raises(DataError, match=words):
        train(long_prompts(experts, tmp_path))
    assert not steps_of(tmp_path)


@pytest.mark.slow
def test_an_asynchronous_run_whose_routers_move_is_not_ended(experts: Path, tmp_path: Path) -> None:
    """A large learning rate: what older weights chose is not what the trainer chooses by now."""
    ahead = ("rollout.asynchronous.max_staleness=3", "rollout.asynchronous.run_ahead=2")
    large = ("run.steps=8", "trainer.lr=0.1")
    train(long_prompts(experts, tmp_path, *ahead, *large))
    steps = steps_of(tmp_path)
    assert len(steps) == 8
    assert max(step["train/routes_differ"] for step in steps) > 0.5


def test_routes_of_older_weights_end_the_run(
    experts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's cache outlives new weights: episodes that are over hold on to their blocks, and it is not emptied."""
    monkeypatch.setattr(Scheduler, "forget_cache", lambda scheduler: None)
    monkeypatch.setattr(Scheduler, "release", lambda scheduler, owner: None)
    with pytest.raises(
        DataError, match=r"its routes are of weight version 0, though version 1 or later sampled it"
    ):
        train(long_prompts(experts, tmp_path))


def long_prompts(experts: Path, runs: Path, *more: str) -> Any:
    from tests.flow.letters import REFERENCE

    sizes = ("rollout.max_total_tokens=64", "data.max_prompt_tokens=60")
    return letters_config(experts, runs, *SHORT, LONG % REFERENCE, *sizes, *more)


# ---------------------------------------------------------------- before the start


def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    model: Path, experts: Path, tmp_path: Path
) -> None:
    for replay in ("rollout", "recompute"):
        dense = letters_config(model, tmp_path, f"trainer.router_replay={replay}")
        with pytest.raises(
            ConfigError, match="router_replay: the model has no experts; set it to off"
        ):
            check_start(dense)
    with pytest.raises(ConfigError, match=r"trainer\.balance: the model has no experts"):
        check_start(letters_config(model, tmp_path, "trainer.balance.aux_loss=0.1"))
    engine = f"rollout.engine={{name: '{Path(__file__).resolve()}:engine_without_routes'}}"
    silent = letters_config(experts, tmp_path, "trainer.router_replay=rollout", engine)
    told = "cannot say to which experts tokens went; expected one that takes `routes`"
    with pytest.raises(ConfigError, match=told):
        check_start(silent)
    assert told in str([*map(str, examine(silent).problems)])
    check_start(letters_config(experts, tmp_path, "trainer.router_replay=recompute", engine))


def engine_without_routes(path: str, tokenizer: Any = None) -> Any:
    raise AssertionError("only looked at")


# ---------------------------------------------------------------- with what else there is


def test_forks_have_the_routes_of_what_each_segment_showed(thinking: Path, tmp_path: Path) -> None:
    """An episode whose template forgets thoughts: every segment replays, and comes back from bytes."""
    config = thinking_config(thinking, tmp_path, "trainer.router_replay=rollout")
    trainer = make_trainer(config)
    with make_rollout(config) as rollout:
        rollout.load_weights(trainer.weights(), 0)
        groups = rollout.collect(rollout.environment.tasks("train")[:8])
    played = codec.from_bytes(codec.to_bytes([one for group in groups for one in group.usable]))
    assert any(len(one.segments) == TURNS for one in played)
    batch = make_batch(played)
    assert torch.equal(batch.extras[ROUTED], batch.lengths - 1)
    own = trainer.score(batch, want=("logprobs", ROUTES))
    known = torch.arange(batch.tokens.shape[1]) < batch.extras[ROUTED][:, None]
    given = batch.extras[ROUTES]
    assert torch.equal(
        given.sort(-1).values[known].long(), own[ROUTES].sort(-1).values[known].long()
    )
    gap = (trainer.score(batch)["logprobs"] - batch.logprobs)[batch.loss_mask].abs()
    assert gap.max() < EXACT
    assert routing_metrics(batch, trainer, 0)["train/routes_differ"] == 0.0
    trainer.close()


@pytest.mark.slow
def test_remembered_and_resumed_trajectories_keep_their_routes(
    experts: Path, tmp_path: Path
) -> None:
    """Replays of earlier steps come out of a checkpoint with their routes: the resumed run is the whole one."""
    options = (*SHORT, "run.deterministic=true", "algorithm.filters=[{name: success_pool, success: 0.3}]",
               "rollout.prompts_per_step=36", "rollout.samples_per_prompt=2", "checkpoint.every_steps=2",
               "metrics.trajectories_per_step=72")  # fmt: skip
    train(letters_config(experts, tmp_path / "whole", *options, "run.steps=4"))
    train(letters_config(experts, tmp_path / "cut", *options, "run.steps=2"))
    train(letters_config(experts, tmp_path / "cut", *options, "run.steps=4", "run.resume=true"))
    whole, cut = (
        [
            {name: value for name, value in one.items() if name.startswith("train/")}
            for one in steps_of(tmp_path / name)
        ]
        for name in ("whole", "cut")
    )
    assert len(whole) == 4 and whole == cut
    run = RunDirectory.open(tmp_path / "cut" / "letters")
    assert any(
        one["source"] == "replay"
        for step in (3, 4)
        for one in read_trajectories(run.trajectories(step))
    )
