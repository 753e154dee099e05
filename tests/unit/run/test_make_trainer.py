"""What of the configuration reaches the trainer of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.config.loading import to_dict
from rlflow.config.schema import load_config
from rlflow.run.assemble import make_metrics, make_trainer
from rlflow.run.directory import RunDirectory


def test_every_option_of_the_cluster_reaches_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr("rlflow.run.assemble.RayTrainer", lambda path, **given: found.update(given))
    given = {"address": "a:1", "threads_per_rank": 3, "gpus_per_rank": 0.5, "stall_timeout_s": 7.0}
    overrides = [f"cluster.{name}={value}" for name, value in given.items()]
    make_trainer(
        load_config(None, ["model.path=x", "environment.name=none", "cluster.ranks=2", *overrides])
    )
    assert found["ranks"] == 2 and {name: found[name] for name in given} == given


def test_schedules_end_with_the_updates_that_each_model_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr("rlflow.run.assemble.RayTrainer", lambda path, **given: found.update(given))
    critic = "algorithm.critic={warmup_updates: 3, schedule: {name: linear}}"
    overrides = [
        "run.steps=5",
        "algorithm.minibatches_per_step=2",
        "trainer.schedule=linear",
        "cluster.ranks=1",
        critic,
    ]
    make_trainer(load_config(None, overrides))
    assert found["schedule"] == {
        "name": "linear",
        "decay_steps": 7,
    }  # the critic's first three are not the policy's
    assert found["critic"]["schedule"] == {"name": "linear", "decay_steps": 10}


def test_a_tracker_gets_no_secret_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(
        "rlflow.run.assemble.make_sinks", lambda path, sinks, **given: found.update(given) or []
    )
    judge = "environment.reward={name: judge, url: 'http://a/?sig=secret', headers: {x-auth: secret}, openaiApiKey: secret}"
    config = load_config(None, ["model.path=x", "environment.name=search", judge])
    log = make_metrics(
        config.metrics, "x", to_dict(config), RunDirectory(tmp_path), -1, 0, page=None
    )
    with log:
        told = json.dumps(found["config"])
    assert "secret" not in told and told.count("***") == 3 and "http://a/" in told
