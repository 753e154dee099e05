"""The keeper of a run's engines by itself: between an engine and a trainer without a model, real rollout in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.sleeping import FIRST_WEIGHTS, FakeEngine, FakeTrainer
from rlflow.errors import RolloutError
from rlflow.report.timer import GIB
from rlflow.rollout import Rollout, Tokenizer
from rlflow.rollout.engine import PauseMode, Weights
from rlflow.run.engine_keeper import MOST_RESTARTS, EngineKeeper
from tests.flow.letters import Letters, write_letters_model


class MortalEngine(FakeEngine):
    """Ends when it is told to, and is started again by the next load; takes turns with the trainer."""

    may_end = True
    sleeps = True
    deaths_ahead = 0
    """Loads in which it ends again."""
    ended = ""
    paused_how: PauseMode | None = None
    awake = True

    @property
    def failure(self) -> str:
        return self.ended

    async def load_weights(self, weights: Weights, version: int) -> None:
        self.ended = ""
        await super().load_weights(weights, version)
        if self.deaths_ahead:
            self.deaths_ahead -= 1
            self.ended = "the engine was killed."
            raise RolloutError("the connection was lost")

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.paused_how = mode
        await super().pause(mode)

    async def sleep(self) -> int:
        self.awake = False
        return 5 * GIB

    async def wake(self) -> int:
        self.awake = True
        return 3 * GIB


class GivingTrainer(FakeTrainer):
    """Gives the weights that a test sets, and remembers what they were merged in."""

    def __init__(self) -> None:
        self.now: dict[str, Tensor] = dict(FIRST_WEIGHTS)
        self.merged: list[tuple[torch.dtype, ...]] = []

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        return iter({"scale": torch.full((3,), 7.0), "shift": torch.ones(2)}.items())

    def weights(
        self, device: str | None = "cpu", *merged: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        self.merged.append(merged)
        return iter(self.now.items())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_letters_model(tmp_path_factory.mktemp("m") / "letters"))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> MortalEngine:
    return MortalEngine(tokenizer)


@pytest.fixture
def trainer() -> GivingTrainer:
    return GivingTrainer()


Keep = Callable[..., EngineKeeper]


@pytest.fixture
def keep(engine: FakeEngine, trainer: GivingTrainer, tokenizer: Tokenizer) -> Iterator[Keep]:
    """Makes the keeper of the engine and the trainer."""
    with Rollout(engine, Letters(), tokenizer) as rollout:

        def make(overlap: bool = False, **options: Any) -> EngineKeeper:
            return EngineKeeper(
                rollout, trainer, None, on_update="abort", overlap=overlap, **options
            )

        yield make


def test_a_sync_gives_the_engine_the_trainers_weights_under_the_version(
    keep: Keep, engine: MortalEngine, trainer: GivingTrainer
) -> None:
    trainer.now = {"scale": torch.full((3,), 2.0), "shift": torch.ones(2)}
    keeper = keep()
    keeper.sync(7, in_flight=False)
    assert engine.version == 7 and keeper.lost is None and keeper.restarts == 0
    assert all(torch.equal(engine.weights[name], value) for name, value in trainer.now.items())


def test_an_engine_rests_while_the_trainer_works_and_is_awake_again_with_the_new_weights(
    keep: Keep, engine: MortalEngine
) -> None:
    keeper = keep()
    keeper.rest(in_flight=False)
    assert (engine.awake, engine.paused_how) == (False, None)  # nothing was in flight
    keeper.sync(1, in_flight=False)
    metrics = keeper.metrics()
    assert engine.awake
    assert (metrics["memory/engine_freed_gib"], metrics["memory/engine_taken_gib"]) == (5, 3)


def test_requests_in_flight_meet_an_update_as_the_run_says(
    keep: Keep, engine: MortalEngine
) -> None:
    keeper = keep()
    keeper.rest(in_flight=True)
    assert engine.paused_how == "abort"


def test_where_both_work_at_a_time_an_engine_goes_on_until_the_weights_come(
    keep: Keep, engine: MortalEngine
) -> None:
    keeper = keep(overlap=True)
    keeper.rest(in_flight=True)
    assert engine.awake and engine.paused_how is None
    keeper.sync(1, in_flight=True)
    assert engine.paused_how == "abort"
    assert set(keeper.metrics()) == {"rollout/engine_restarts"}


def test_an_engine_that_ended_is_started_again_as_often_as_it_ends(
    keep: Keep, engine: MortalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended while it played, and twice while it took the weights."""
    engine.ended = "the engine was killed."
    engine.deaths_ahead = 2
    keeper = keep()
    keeper.sync(1, in_flight=False)
    assert (keeper.restarts, keeper.lost, engine.version, engine.failure) == (3, None, 1, "")
    assert keeper.metrics()["rollout/engine_restarts"] == 3
    warnings = [
        record.getMessage() for record in caplog.records if "Starting it again" in record.msg
    ]
    assert len(warnings) == 3 and warnings[-1].endswith("3 of 3 times")


def test_one_that_ends_once_more_is_lost_after_its_step_was_counted(
    keep: Keep, engine: MortalEngine
) -> None:
    """After training the error waits, so that the step is not lost; while episodes are waited for, there is none to count."""
    engine.deaths_ahead = 100
    keeper = keep()
    keeper.sync(1, in_flight=False)
    assert keeper.restarts == MOST_RESTARTS
    assert "the engine was killed. It was started again 3 times before" in str(keeper.lost)
    with pytest.raises(RolloutError, match="--resume goes on"):
        keeper.load(1)


def test_an_engine_that_goes_on_and_refuses_the_weights_ends_the_run_at_once(
    keep: Keep, engine: MortalEngine, trainer: GivingTrainer
) -> None:
    del trainer.now["shift"]
    keeper = keep()
    with pytest.raises(RolloutError, match=r"expected \['scale', 'shift'\], found \['scale'\]"):
        keeper.sync(1, in_flight=False)
    assert (keeper.restarts, keeper.lost) == (0, None)


def test_adapters_are_merged_in_what_the_engines_keep_and_other_trainers_are_not_asked_to(
    keep: Keep, trainer: GivingTrainer
) -> None:
    keep().sync(1, in_flight=False)
    keep(merged_dtype=torch.bfloat16).sync(2, in_flight=False)
    assert trainer.merged == [(), (torch.bfloat16,)]


def test_engines_that_take_adapters_alone_get_nothing_else(
    keep: Keep, engine: MortalEngine, trainer: GivingTrainer
) -> None:
    keep(adapters_alone=True).sync(1, in_flight=False)
    assert trainer.merged == [] and torch.equal(engine.weights["scale"], torch.full((3,), 7.0))


def test_of_an_engine_that_cannot_end_or_sleep_there_is_nothing_to_say(
    trainer: GivingTrainer, tokenizer: Tokenizer
) -> None:
    with Rollout(FakeEngine(tokenizer), Letters(), tokenizer) as rollout:
        keeper = EngineKeeper(rollout, trainer, None, on_update="keep", overlap=False)
        keeper.rest(in_flight=False)
        keeper.sync(1, in_flight=False)
        assert not keeper.may_end and keeper.metrics() == {}
