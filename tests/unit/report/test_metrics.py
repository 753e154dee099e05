"""Metrics: names, reductions by hand, what the file holds after a kill and a resume."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.errors import CheckpointError, ConfigError, MissingPackageError
from rlflow.report.lines import interval_text
from rlflow.report.metrics import (
    METRICS,
    PHASES,
    Metric,
    leading_score,
    load_registered,
    save_registered,
    shown,
)
from rlflow.report.reductions import (
    interval95,
    mean,
    reduced,
    rollout_metrics,
    scores_by_set,
    step_shares,
    update_metrics,
)
from rlflow.report.sinks import MetricsLog, make_display, make_sinks, read_metrics
from rlflow.report.timer import PhaseTimer
from rlflow.types import Group, StopReason, Task, Trajectory, Turn

SCORED = {"exact_match": Metric("share", "of tasks", score=True)}


def trajectory(
    reward: float, stop: StopReason = StopReason.TERMINATED, turns: int = 1, **metrics: float
) -> Trajectory:
    return Trajectory("t", "g", [], [Turn(0, 0, 1, 0.0, 0.0)] * turns, reward, stop, metrics)


def test_every_documented_name_has_a_section_a_unit_and_a_meaning() -> None:
    for name, metric in METRICS.items():
        section, _, rest = name.partition("/")
        assert (
            section
            in {"train", "rollout", "time", "memory", "speed", "eval", "data", "workers", "sync"}
            and rest
        )
        assert metric.unit and metric.meaning
    assert {f"time/{phase}_s" for phase in PHASES} <= set(METRICS)


def test_wilson_interval_equals_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3: 81/263 -> .2553, .3662; 0/20 -> .0000, .1611.
    low, high = interval95([1.0] * 81 + [0.0] * 182)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = interval95([0.0] * 20)
    assert low == 0.0 and round(high, 4) == 0.1611


def test_scores_that_are_all_alike_have_an_interval_of_some_width() -> None:
    """Two tasks of 0 leave [0, z^2/(2 + z^2)] by Wilson's formula; of no task are others certain."""
    z = 1.959964
    assert interval95([0.0, 0.0]) == (0.0, pytest.approx(z * z / (2 + z * z)))
    assert interval95([1.0]) == (pytest.approx(1 / (1 + z * z)), 1.0)
    low, high = interval95([0.25] * 3)
    assert low < 0.05 and 0.7 < high < 1, "no wider than of zeros and ones with this mean"
    unbounded = (-math.inf, math.inf)
    assert interval95([2.0] * 5) == unbounded, "nothing is known of the ends of this reward"
    assert interval95([1.0] * 20, share=False) == unbounded, "levels: each game reached the first"
    assert interval_text(*unbounded) == ""


def test_normal_interval_by_hand() -> None:
    low, high = interval95([0.0, 0.5, 1.0])  # mean .5, std .5, standard error .5/sqrt 3
    half = 1.959964 * 0.5 / math.sqrt(3)
    assert (low, high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert all(math.isnan(end) for end in interval95([]))


def test_numbers_too_large_to_square_or_to_add_are_infinite_not_errors() -> None:
    assert interval95([1e300, -1e300, 5.0]) == (-math.inf, math.inf)
    assert mean([1e308] * 4) == math.inf and mean([1e300, 1e300]) == 1e300
    assert reduced([{"reward": 1e308}, {"reward": 1e308}], {}) == {"reward": math.inf}


def test_reductions_are_per_key_over_the_records_that_have_it() -> None:
    kinds = {name: Metric("1", name, reduction=name) for name in ("max", "min", "sum")}
    records = [
        {"max": 1.0, "min": 1.0, "sum": 1.0, "other": 1.0},
        {"max": 5.0, "min": 5.0, "sum": 5.0},
        {"other": 2.0},
    ]
    assert reduced(records, kinds) == {"max": 5.0, "min": 1.0, "sum": 6.0, "other": 1.5}
    assert math.isnan(mean([]))


def test_minibatches_are_reduced_as_the_table_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "train/ratio_max", Metric("1", "largest ratio", reduction="max"))  # type: ignore[arg-type]
    updates = [{"loss": 1.0, "ratio_max": 3.0}, {"loss": 3.0, "ratio_max": 2.0}]
    assert update_metrics(updates, {}) == {"train/loss": 2.0, "train/ratio_max": 3.0}
    assert update_metrics([{"seen": 1.0}, {"seen": 2.0}], {"seen": "sum"}) == {
        "train/seen": 3.0
    }  # as the loss has it


def test_an_environments_declaration_decides_section_and_reduction() -> None:
    registered = {
        **SCORED,
        "longest": Metric("steps", "longest walk", reduction="max"),
        "calls": Metric("count", "x", "sum"),
    }
    metrics = rollout_metrics(
        [
            trajectory(1.0, exact_match=1.0, longest=4.0, calls=2.0),
            trajectory(0.0, longest=7.0, calls=3.0),
        ],
        registered,
    )
    named = {
        name: metrics[name] for name in ("train/exact_match", "rollout/longest", "rollout/calls")
    }
    assert named == {"train/exact_match": 0.5, "rollout/longest": 7.0, "rollout/calls": 5.0}


def test_a_share_of_the_step_is_made_where_its_seconds_were_reported() -> None:
    registered = {
        "time/tool_share": Metric("share", "of the step", share_of="time/tool_s"),
        **SCORED,
    }
    assert step_shares({"time/tool_s": 1.0, "time/step_s": 4.0}, registered) == {
        "time/tool_share": 0.25
    }
    assert step_shares({"time/step_s": 4.0}, registered) == {}


def test_the_first_score_that_was_measured_leads() -> None:
    registered = {"tools": Metric("count", "x"), "f1": Metric("share", "x", score=True), **SCORED}
    assert leading_score(registered, {"eval/exact_match": 1.0, "eval/f1": 0.5}, "eval") == "f1"
    assert leading_score(registered, {"eval/exact_match": 1.0}, "eval") == "exact_match"
    assert leading_score(registered, {"eval/tools": 1.0}, "eval") == "reward"


def test_a_metric_that_makes_no_sense_is_an_error_where_it_is_declared() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'mean'"):
        Metric("share", "of tasks", reduction="meen")
    for wrong in ("tools {:d}", "tools {} {}", "tools {name}"):
        with pytest.raises(ConfigError, match="a format of one number"):
            Metric("share", "of tasks", shown=wrong)
    assert shown("gold_found", Metric("share", "x"), 0.5) == "gold found 0.500"


def test_a_run_can_be_read_without_its_environment(tmp_path: Path) -> None:
    registered = {
        **SCORED,
        "time/tool_share": Metric("share", "of the step", share_of="time/tool_s"),
    }
    save_registered(tmp_path / "m.json", registered)
    assert (
        load_registered(tmp_path / "m.json") == registered
        and load_registered(tmp_path / "none.json") == {}
    )


def test_rollout_metrics_count_aborted_episodes_and_keep_them_out_of_means() -> None:
    metrics = rollout_metrics([
        trajectory(1.0, turns=2, exact_match=1.0, searches=2.0),
        trajectory(0.0, StopReason.MAX_TURNS, turns=4, exact_match=0.0, searches=4.0),
        trajectory(0.5, StopReason.MAX_TOKENS, turns=3, exact_match=0.0),
        trajectory(9.0, StopReason.ABORTED, turns=9, searches=99.0),
    ], SCORED)  # fmt: skip
    assert metrics == {
        "train/reward": 0.5, "train/exact_match": pytest.approx(1 / 3), "rollout/searches": 3.0, "rollout/turns": 3.0,
        "rollout/episodes": 4.0, "rollout/truncated_max_turns": 0.25, "rollout/truncated_max_tokens": 0.25,
        "rollout/aborted": 0.25,
    }  # fmt: skip


def test_an_episode_without_a_score_that_others_report_counts_as_0() -> None:
    episodes = [trajectory(1.0, exact_match=1.0, hops=2.0), trajectory(0.0, StopReason.MAX_TOKENS)]
    metrics = rollout_metrics(episodes, SCORED)
    assert metrics["train/exact_match"] == 0.5 and metrics["rollout/hops"] == 2.0
    assert "train/exact_match" not in rollout_metrics([trajectory(0.0)], SCORED)


def test_scores_are_told_apart_by_the_sets_that_tasks_name() -> None:
    def group(name: str | None, *scores: float | None) -> Group:
        attempts = [
            trajectory(1.0) if score is None else trajectory(1.0, exact_match=score, searches=3.0)
            for score in scores
        ]
        return Group(
            "0:a", Task("a", "?", metadata={} if name is None else {"set": name}), attempts
        )

    gone = [
        Group(
            "0:b",
            Task("b", "?", metadata={"set": "gone"}),
            [trajectory(1.0, StopReason.ABORTED, exact_match=1.0)],
        )
    ]
    groups = [
        group("nq", 1.0, 0.0),
        group("hotpot", 1.0),
        group(None, 0.0),
        group("nq", 1.0, None),
        group("none", None),
        *gone,
    ]
    shares = {
        "train/exact_match/hotpot": 1.0,
        "train/exact_match/none": 0.0,
        "train/exact_match/nq": 0.5,
    }
    assert scores_by_set(groups, SCORED, "train") == shares
    assert scores_by_set([group(None, 1.0)], SCORED, "eval") == {}


def test_a_step_in_which_everything_aborted_reports_no_reward() -> None:
    metrics = rollout_metrics([trajectory(9.0, StopReason.ABORTED)], SCORED)
    assert metrics["rollout/aborted"] == 1.0 and "train/reward" not in metrics


def test_phase_timer_adds_up_and_starts_anew() -> None:
    entered: list[str] = []
    timer = PhaseTimer(entered.append)
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timer.phase("update"):
        raise KeyError
    taken = timer.take()
    assert entered == ["rollout", "rollout", "update"]
    assert taken["time/rollout_s"] >= 0.02 and "time/update_s" in taken
    assert taken["time/step_s"] >= taken["time/rollout_s"] + taken["time/update_s"]
    assert set(timer.take()) == {"time/step_s"}


def test_one_line_per_step_of_plain_json(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(1, {"train/loss": torch.tensor(0.5), "train/kl": math.nan})
        line = (tmp_path / "metrics.jsonl").read_text()  # flushed at once
    record = json.loads(line)
    assert record["step"] == 1 and record["train/loss"] == 0.5 and record["train/kl"] is None
    assert abs(record["time"] - time.time()) < 60
    assert "train/kl" not in read_metrics(tmp_path / "metrics.jsonl")[0]


def test_resume_drops_what_came_after_the_checkpoint_and_a_half_written_line(
    tmp_path: Path,
) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.log(step, {"train/reward": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/rew')
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    with MetricsLog(tmp_path, resumed_step=3) as log:
        log.log(4, {"train/reward": 40})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["train/reward"]) for record in records] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
    ]


def test_records_of_one_step_are_merged_when_read(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(0, {"eval/exact_match": 0.1})
        log.log(1, {"train/reward": 1})
        log.log(1, {"eval/exact_match": 0.2})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.get("eval/exact_match") for record in records] == [0.1, 0.2] and records[1][
        "train/reward"
    ] == 1


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\nnot\n{"step": 2}\n')
    with pytest.raises(
        CheckpointError, match=r"m\.jsonl:2: expected a line of JSON in UTF-8, found b'not'; remove"
    ):
        read_metrics(tmp_path / "m.jsonl")


@pytest.mark.parametrize(
    ("line", "words"),
    [(b'{"step": 1, "x": "\xff"}', "JSON in UTF-8"), (b"[1]", "an object with the number of its step"),
     (b'{"x": 1}', "an object with"), (b'{"step": "one"}', "an object with"), (b"[" * 100_000, "a line of JSON")],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named_and_at_the_end_left_out(
    line: bytes, words: str, tmp_path: Path
) -> None:
    path, good = tmp_path / "metrics.jsonl", b'{"step": 1}\n'
    path.write_bytes(good + line + b"\n" + good)
    with pytest.raises(
        CheckpointError, match=rf"metrics\.jsonl:2: .*({words}).*; remove this line"
    ):
        read_metrics(path)
    path.write_bytes(good + line)
    assert read_metrics(path) == [{"step": 1}]


def test_tensorboard_gets_what_the_file_gets(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, make_sinks(tmp_path, ["tensorboard"])) as log:
        log.log(7, {"train/reward": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/reward")
    assert [(event.step, event.value) for event in events] == [(7, 0.25)]


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_step, records in ((-1, {1: 1.0, 2: 2.0, 3: 3.0}), (1, {2: 20.0})):
        with MetricsLog(
            tmp_path, make_sinks(tmp_path, ["tensorboard"], resumed_step=resumed_step)
        ) as log:
            for step, value in records.items():
                log.log(step, {"train/reward": value})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/reward")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 20.0)]


class Lines:
    """A sink for a program: one line per record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {sorted(values)}\n")

    def close(self) -> None:
        self.closed = True


class Report(Lines):
    """A sink for a person, whose file the summary names."""

    def report_files(self) -> dict[str, Path]:
        return {"lines": self.path}


def test_a_log_names_the_files_of_sinks_that_write_for_a_person(tmp_path: Path) -> None:
    sinks = [Lines(tmp_path / "program"), Report(tmp_path / "person")]
    with MetricsLog(tmp_path, sinks) as log:
        log.log(1, {"train/loss": 0.5})
        assert log.report_files() == {"lines": tmp_path / "person"}
    assert {sink.path.read_text() for sink in sinks} == {"1 ['train/loss']\n"}


def test_a_sink_that_fails_to_close_leaves_none_open(tmp_path: Path) -> None:
    class Failing(Lines):
        def close(self) -> None:
            raise OSError("no space left")

    sinks = [Lines(tmp_path / "a"), Failing(tmp_path / "b"), Lines(tmp_path / "c")]
    with pytest.raises(OSError, match="no space left"):
        MetricsLog(tmp_path, sinks).close()
    assert sinks[0].closed and sinks[2].closed


@pytest.mark.parametrize("name", ["nobodys", "no.such.package:Page", "broken.py:Page"])
def test_a_display_that_cannot_be_had_is_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    assert make_display(name, "metrics.page") is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("metrics.page: ")
    assert record.getMessage().endswith("The run goes on without it.")


class Wandb:
    """What the sink calls of the package, recorded."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.x_axes: dict[str, str | None] = {}

    def init(self, **options: Any) -> Wandb:
        self.started.append(options)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.x_axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None: ...


def test_a_resumed_run_goes_on_in_its_wandb_run_and_a_new_one_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    for resumed_step in (None, 2, -1, None):
        with MetricsLog(
            tmp_path, make_sinks(tmp_path, ["wandb"], resumed_step=resumed_step)
        ) as log:
            log.log(3, {"train/loss": 0.5})
    ids = [options["id"] for options in wandb.started]
    assert ids[0] == ids[1] == ids[2] != ids[3] and all(
        options["resume"] == "allow" for options in wandb.started
    )
    assert wandb.x_axes["*"] == "step" and wandb.logged == [{"train/loss": 0.5, "step": 3}] * 4


def test_a_missing_sink_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "wandb", None
    )  # None makes `import wandb` raise ImportError
    with pytest.raises(MissingPackageError, match=r"pip install -e '.*\[wandb\]'"):
        make_sinks(tmp_path, ["wandb"])
