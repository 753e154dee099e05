"""How a run is closed: whatever ended it, what went wrong first is what is said."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlflow.config.schema import RunConfig
from rlflow.errors import ConfigError, ModelError, RolloutError, StorageError
from rlflow.models import tables
from rlflow.preflight.start import _check_routes
from rlflow.run.directory import RunDirectory
from rlflow.run.open import open_run
from rlflow.run.resume import finished_summary
from rlflow.storage.files import write_json
from tests import fixtures
from tests.flow.letters import letters_config, write_letters_model
from tests.reference import ORACLE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RunConfig:
    return letters_config(model, tmp_path, f"trainer.backend={ORACLE}")


class FailingSink:
    """A sink that cannot write its last lines."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        raise OSError(self.number, os.strerror(self.number), "events.out")


def test_a_disk_that_is_full_at_the_very_end_is_a_storage_error(config: RunConfig) -> None:
    words = r"events\.out: .*; the newest checkpoint is that of step 0\."
    with pytest.raises(StorageError, match=words), open_run(config) as run:
        run.save()
        run.log.metrics.sinks.append(FailingSink(errno.ENOSPC))


def test_another_failure_to_close_is_told_as_it_is(config: RunConfig) -> None:
    with pytest.raises(OSError, match=r"events\.out") as caught, open_run(config) as run:
        run.log.metrics.sinks.append(FailingSink(errno.EACCES))
    assert caught.value.errno == errno.EACCES


def test_what_went_wrong_first_says_more_than_a_sink_that_cannot_close(
    config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(RolloutError, match="the first"), open_run(config) as run:
        run.log.metrics.sinks.append(FailingSink(errno.ENOSPC))
        raise RolloutError("the first")
    with RunDirectory.create(
        tmp_path / "letters", overwrite=True
    ):  # everything else is closed, the lock included
        pass


def test_a_full_disk_in_the_middle_is_a_storage_error(config: RunConfig) -> None:
    with pytest.raises(StorageError, match="there is no checkpoint yet"), open_run(config):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")


def test_a_run_that_goes_on_is_not_finished_by_its_old_summary(
    config: RunConfig, tmp_path: Path
) -> None:
    """A kill in the last evaluation of a run that went back would else leave the old branch's results."""
    config.run.steps = 1
    with open_run(config) as run:
        run.step = 1
        run.save()
        write_json(run.directory.summary, {"status": "finished", "steps": 1})
    config.run.resume = True
    assert finished_summary(config.run) is not None
    config.run.epochs = 2.0  # how many steps they are is not known yet
    assert finished_summary(config.run) is None
    config.run.epochs = None
    with open_run(config):
        pass
    assert finished_summary(config.run) is None


def test_an_error_ends_the_save_under_way(model: Path, tmp_path: Path) -> None:
    config = letters_config(model, tmp_path, "checkpoint.asynchronous=true")
    with pytest.raises(RolloutError), open_run(config) as run:
        run.save()
        raise RolloutError("after the save began")
    assert RunDirectory.open(tmp_path / "letters").saved.steps() == [0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_a_family_that_others_add_is_held_against_transformers_before_the_first_step(
    multiplier: float,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Granite is a Llama where its multipliers are those of one; no name or shape tells what they are."""
    monkeypatch.setitem(tables.FAMILIES, "granite", tables.FAMILIES["mistral"])
    monkeypatch.setitem(fixtures._OF_FAMILY, "granite", {})
    sizes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_multiplier": 0.25,
        "residual_multiplier": multiplier,
    }
    path = write_letters_model(tmp_path / "granite", "granite", **sizes)
    config = letters_config(path, tmp_path, f"model.dtype={dtype}")
    caplog.set_level("INFO")
    if multiplier == 1.0:
        with open_run(config):
            assert "model family granite: log-probs within" in caplog.text
    else:
        with pytest.raises(
            ModelError, match=r"differ by .* family 'granite' is not one of rlflow's"
        ):
            with open_run(config):
                pass


def test_a_curator_is_offered_the_attempts_of_the_run(model: Path, tmp_path: Path) -> None:
    config = letters_config(
        model, tmp_path, "data.curator=adaptive", "rollout.samples_per_prompt=12"
    )
    with open_run(config) as run:
        assert {task.most_attempts for task in run.source.take(1)} == {12}


def test_overwrite_throws_nothing_away_for_a_run_that_cannot_begin(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "curators.py").write_text(
        "def broken(*, tasks, seed):\n    raise ValueError('no order')\n"
    )
    with open_run(letters_config(model, tmp_path)) as run:
        run.save()
    more = f"data.curator={tmp_path}/curators.py:broken", "run.overwrite=true"
    with (
        pytest.raises((ValueError, ConfigError), match="no order"),
        open_run(letters_config(model, tmp_path, *more)),
    ):
        pass
    assert run.directory.saved.steps() == [0] and run.directory.config.is_file()


def test_routes_of_the_rollout_are_not_there_for_what_others_sampled(
    model: Path, tmp_path: Path
) -> None:
    filters = "algorithm.filters=[{name: demonstrations, path: x.jsonl}]"
    config = letters_config(model, tmp_path, "trainer.router_replay=rollout", filters)
    with pytest.raises(
        ConfigError,
        match=r"router_replay: algorithm\.filters\[0\] 'demonstrations' brings attempts that no",
    ):
        _check_routes(config.rollout.engine, config.algorithm.filters)


def test_epochs_set_the_steps_as_soon_as_the_tasks_are_known(model: Path, tmp_path: Path) -> None:
    """36 tasks, 10 a step: one and a half passes are 54 prompts, in 6 steps; the schedule decays over these."""
    config = letters_config(
        model,
        tmp_path,
        f"trainer.backend={ORACLE}",
        "run.epochs=1.5",
        "rollout.prompts_per_step=10",
        "trainer.schedule={name: linear, min_lr: 0.0}",
    )
    with open_run(config) as run:
        assert run.config.run.steps == 6 and run.log.progress.steps == 6
        assert config.trainer.decaying_over(config.policy_updates).schedule["decay_steps"] == 6
