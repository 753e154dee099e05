"""benchmarks/gpu: the session of five calls on tiny shapes, its deadlines; the steps for eight GPUs with
stand-in commands; the model of a step's time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fake_cuda import fake_cuda
from tests.reference import ORACLE
from tests.unit.sources import ROOT
from tests.unit.trainer.on_gpu import varlen

FOLDER = ROOT / "benchmarks" / "gpu"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the folder, whose files import each other by their names."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER.parent), *sys.path])
    return importlib.import_module(name)


def run(*arguments: str, timeout_s: float = 200) -> tuple[int, str, dict[str, Any]]:
    """(exit code, what it printed, the JSON of its last line)."""
    command = [sys.executable, str(FOLDER / "run.py"), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment
    )
    assert done.stdout, done.stderr
    return done.returncode, done.stdout, json.loads(done.stdout.strip().splitlines()[-1])


def rows(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{case: {what: figure}}."""
    return {
        end["case"]: {row["what"]: row["figure"] for row in end["rows"]} for end in found["results"]
    }


# ---------------------------------------------------------------- the session


@pytest.mark.slow
def test_without_a_gpu_every_case_says_so(tmp_path: Path) -> None:
    code, out, found = run("--part", "1", "--out", str(tmp_path))
    assert code == 0 and found["gpu"] is None and len(found["results"]) > 12
    assert {end["why"] for end in found["results"]} == {"no NVIDIA GPU that torch sees"}
    assert out.count("no NVIDIA GPU") == 2 * len(found["results"])  # the table and the JSON


@pytest.mark.slow
def test_figures_are_lines_of_a_file_and_the_last_line(tmp_path: Path) -> None:
    code, out, found = run("--part", "1", "--cpu", "--only", "collectives", "--out", str(tmp_path))
    assert code == 0, out
    assert rows(found)["collectives"]["broadcast bfloat16"] == 1
    lines = [json.loads(line) for line in (tmp_path / "part1.jsonl").read_text().splitlines()]
    assert [line for line in lines if "what" in line] == found["results"][0]["rows"]
    assert lines[-1]["status"] == "done" and "1 cases done, 0 claims wrong" in out


@pytest.mark.parametrize("wrong", [False, True])
def test_a_way_to_train_is_compared_parameter_by_parameter(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen is what a wrong gradient of a single parameter does."""
    monkeypatch.setenv("RLFLOW_LAYERS", "local")
    machine, parity = module("machine", monkeypatch), module("parity", monkeypatch)
    measured = parity.measured

    def planted(path: Path, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
        found = measured(path, dtype, options)
        if wrong and "backend" not in options:
            found["gradients"]["model.layers.1.self_attn.k_proj.bias"] *= 1.001
        return found

    monkeypatch.setattr(parity, "measured", planted)
    report = machine.Report("packed", "cpu", True, tmp_path, tmp_path, tmp_path / "lines.jsonl")
    parity.parity(report, dtypes=("float32",), packing=True)
    lines = [json.loads(line) for line in report.lines.read_text().splitlines()]
    assert [line["what"] for line in lines if not line["ok"]] == (
        ["gradient of model.layers.1.self_attn.k_proj.bias, float32"] if wrong else []
    )
    assert len(lines) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "HostAdamW", "offload_snapshots"])
def test_the_gpus_side_is_compared_on_a_gpu_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlflow.trainer.megatron import layers

    monkeypatch.setenv("RLFLOW_LAYERS", "local")
    monkeypatch.setattr(layers, "varlen_attn", varlen)
    machine, parity, session = (
        module(each, monkeypatch) for each in ("machine", "parity", "session")
    )
    report = machine.Report(name, "cpu", True, tmp_path, tmp_path, tmp_path / "lines.jsonl")
    path, measured = machine.model_path(report, "tiny", "float32"), parity.measured
    expected = measured(
        path, "float32", {"backend": ORACLE, "device": "cpu"}
    )  # the fake has no "meta"

    def known(path: Path, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
        return expected if "backend" in options else measured(path, dtype, options)

    monkeypatch.setattr(parity, "measured", known)
    with fake_cuda():
        parity.parity(replace(report, device="cuda"), **session.VARIANTS[name])
    lines = [json.loads(line) for line in report.lines.read_text().splitlines()]
    assert len(lines) == 12 and not [line for line in lines if not line["ok"]]


STAND_IN = """
import subprocess, sys, time
from machine import Skipped, need

def hangs(report):
    report.row("before it hung", 1, "s")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    time.sleep(100)

def breaks(report):
    raise ValueError("it broke here")

def lacks(report):
    need("no_such_package")

def imports(report):
    import no_such_package

def is_wrong(report):
    report.at_most("gap", float("nan"), 1.0, "nats")

def works(report, number):
    report.at_most("gap", 0.5, number, "nats")
    report.row("rate", 2, "tokens/s", flops_per_s=5e11)
    report.row("best", 1, "TFLOP/s", matrix_rate=1e12)
"""


@pytest.mark.slow
def test_a_case_that_hangs_or_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    session = module("run", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{FOLDER}")
    names = ("hangs", "breaks", "lacks", "imports", "is_wrong")
    cases = [
        session.Case(name, f"stand_in:{name}", {}, 3.0 if name == "hangs" else 60.0)
        for name in names
    ]
    cases.append(session.Case("works", "stand_in:works", {"number": 1.0}))
    given = type("Given", (), {"out": str(tmp_path), "minutes": None, "quick": True})
    ends = session.play(1, cases, given, "cpu")
    assert [(end["status"], end["why"]) for end in ends] == [
        ("out of time", "not done after 3 s"),
        ("failed", "ValueError: it broke here"),
        ("skipped", "not installed: no_such_package"),
        ("skipped", "not installed: no_such_package"),
        ("done", ""),
        ("done", ""),
    ]
    assert ends[0]["rows"][0]["what"] == "before it hung"  # what it wrote is kept
    capsys.readouterr()
    session.show(ends)
    table = capsys.readouterr().out
    assert (
        "is_wrong: gap" in table
        and "WRONG (at most 1)" in table
        and "out of time: not done after 3 s" in table
    )
    assert "0.5 TFLOP/s, 50.0% of the matrix rate" in table
    given.minutes = 0.0
    assert {end["why"] for end in session.play(1, cases, given, "cpu")} == {
        "no time left (--minutes)"
    }


def test_every_case_of_the_plan_is_a_function_with_these_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import inspect

    session = module("session", monkeypatch)
    for part, minutes in session.MINUTES.items():
        cases = session.plan(part)
        assert len({case.name for case in cases}) == len(cases) and minutes < 10
        for case in cases:
            name, _, function = case.place.partition(":")
            taken = inspect.signature(getattr(module(name, monkeypatch), function))
            taken.bind(object(), **case.options)


def test_packages_are_brought_along_whole_and_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, made = tmp_path / "wheels", tmp_path / "made.whl"
    wheels.mkdir()
    for name in ("first", "second"):
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr(f"{name}/__init__.py", f"NAME = '{name}'")
        content = made.read_bytes()
        if name == "first":
            (wheels / "first-1-py3-none-any.whl").write_bytes(content)
        else:
            for number in range(0, len(content), 50):
                (wheels / f"second-1-py3-none-any.whl.{number // 50}").write_bytes(
                    content[number : number + 50]
                )
    (wheels / "alone.py").write_text("NAME = 'alone'")
    target = tmp_path / "out" / "packages"
    assert module("wheels", monkeypatch).bring(str(wheels), target) == [str(target)]
    assert sorted(path.name for path in target.iterdir()) == ["alone.py", "first", "second"]
    assert (target / "second" / "__init__.py").read_text() == "NAME = 'second'"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [1, 2, 3, 4, 5])
def test_a_whole_call_works_on_tiny_shapes(part: int, tmp_path: Path) -> None:
    code, out, found = run("--part", str(part), "--cpu", "--out", str(tmp_path), timeout_s=600)
    assert code == 0, out
    status = {end["case"]: (end["status"], end["why"]) for end in found["results"]}
    done = [name for name, (state, _) in status.items() if state == "done"]
    assert len(done) >= {1: 14, 2: 6, 3: 12, 4: 0, 5: 2}[part], status
    if part == 3:
        assert rows(found)["train 0.5B"]["0.5B, local"] > 0


# ---------------------------------------------------------------- eight GPUs


def steps_of(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Any]:
    eight = module("eight", monkeypatch)

    def step(name: str, code: str, **more: Any) -> Any:
        return eight.Step(name, [sys.executable, "-c", code], more.pop("limit_s", 20), **more)

    return eight, step


def test_steps_go_on_while_all_is_as_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    eight, step = steps_of(monkeypatch)
    looks: list[int] = []
    steps = [
        step(
            "first", "print('hello')", check=lambda folder, said: "" if said == "hello\n" else said
        ),
        step("killed", "import os; os.kill(os.getpid(), 9)", fails=True),
        step(
            "watched",
            "import time; time.sleep(0.3)",
            during=lambda folder, process: looks.append(process),
        ),
    ]
    assert eight.play(steps, tmp_path, poll_s=0.05) == 0
    assert "All 3 steps went as expected" in capsys.readouterr().out and len(looks) > 2
    with tarfile.open(tmp_path / "send.tar.gz") as archive:
        assert archive.getnames() == ["first.txt", "killed.txt", "watched.txt"]


@pytest.mark.parametrize(
    ("code", "more", "said"),
    [
        ("print('oh'); raise SystemExit(3)", {}, "exit code 3, expected 0; it said at last: oh"),
        (
            "pass",
            {"fails": True},
            "exit code 0, expected an error; it said at last: it printed nothing",
        ),
        ("import time; time.sleep(60)", {"limit_s": 0.2}, "not done after 0 s"),
        ("pass", {"check": lambda folder, said: "two engines on GPU 0"}, "two engines on GPU 0"),
    ],
)
def test_the_first_surprise_stops_and_says_what_to_send(
    code: str, more: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    eight, step = steps_of(monkeypatch)
    steps = [step("fine", "pass"), step("odd", code, **more), step("never", "pass")]
    assert eight.play(steps, tmp_path, poll_s=0.05) == 1
    out = capsys.readouterr().out
    assert f"SURPRISE at 'odd': {said}" in out and "send.tar.gz" in out and "--from 2" in out
    assert not (tmp_path / "never.txt").exists()
    assert eight.play(steps, tmp_path, first=3, poll_s=0.05) == 0


def test_each_gpu_has_one_rank_and_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight, _ = steps_of(monkeypatch)

    def look(process: int, *owners: str) -> str:
        return json.dumps(
            {
                "process": process,
                "lines": [f"{gpu}, {100 + n}, 9 MiB" for n, gpu in enumerate(owners)],
            }
        )

    (tmp_path / "gpus.jsonl").write_text(
        "\n".join([look(1, "A", "A", "A"), look(2), look(2, "A", "B"), look(2, *"ABAB")])
    )
    assert eight.pinned(tmp_path, 2) == ""
    assert "expected 2 on each of 3" in eight.pinned(tmp_path, 3)
    (tmp_path / "gpus.jsonl").write_text(look(3, *"AAAB"))
    assert "{'A': 3, 'B': 1}" in eight.pinned(tmp_path, 2)


def test_a_run_without_steps_or_figures_is_a_surprise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight, _ = steps_of(monkeypatch)
    (tmp_path / "run").mkdir()
    metrics, line = tmp_path / "run" / "metrics.jsonl", dict.fromkeys(eight.STEP_METRICS, 1.0)
    metrics.write_text("\n".join(map(json.dumps, [{"validation/exact_match": 0.5}, line, line])))
    assert eight.steps_done(tmp_path, "run", 2) == ""
    assert "has 2 training steps, expected 3" in eight.steps_done(tmp_path, "run", 3)
    metrics.write_text(json.dumps({**line, "train/logprob_gap": float("nan")}))
    assert "train/logprob_gap is [nan]" in eight.steps_done(tmp_path, "run", 1)


def test_an_update_of_another_size_after_the_resume_is_a_surprise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    eight, _ = steps_of(monkeypatch)
    lines = [
        {"update": number, "loss": 0.5, "gradient_norm": 2.0 - number / 10} for number in range(4)
    ]
    for name, kept, scores in (("whole", lines, 1.0), ("resumed", lines[2:], 1.001)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, kept)))
        torch.save(torch.full((2, 3), scores), tmp_path / f"{name}.pt")
    assert eight.same_updates(tmp_path) == ""
    torch.save(torch.full((2, 3), 1.2), tmp_path / "resumed.pt")
    assert "differ by up to 0.2" in eight.same_updates(tmp_path)
    (tmp_path / "resumed.jsonl").write_text(json.dumps({**lines[3], "gradient_norm": 3.0}))
    assert "update 3: gradient_norm 3.0 after the resume" in eight.same_updates(tmp_path)


def test_the_list_asks_for_files_and_options_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight, _ = steps_of(monkeypatch)
    given = type("Given", (), {"out": str(tmp_path), "gpus": 8, "model_3b": "m3", "model_7b": "m7", "train_data": "t",
                               "val_data": "v", "corpus": "c"})  # fmt: skip
    steps = eight.the_list(given)
    assert [step.name for step in steps][:3] == ["doctor", "nvidia-smi", "ranks over NCCL"]
    assert all(
        Path(word).exists() for step in steps for word in step.command if word.startswith(str(ROOT))
    )
    from rlflow.config.schema import load_config

    for step in steps:
        if "--config" in step.command and "run_train.sh" in " ".join(step.command):
            keys = [word for word in step.command if "=" in word]
            load_config(step.command[step.command.index("--config") + 1], keys)


@pytest.mark.slow
def test_ranks_that_are_killed_and_resumed_give_the_update_of_those_that_were_not(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """`eight.py`'s commands with two ranks over gloo."""
    from tests.fixtures import tiny_model

    eight, _ = steps_of(monkeypatch)
    model = tiny_model(tmp_path, "qwen2", tokenizer=False, vocab_size=1000)
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"model: {{path: {model}}}\nenvironment: {{name: none}}\ntrainer: {{packing: true, lr: 1.0e-3}}\n"
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(FOLDER / "ranks.py"),
    ]

    def updates(name: str, folder: str, *more: str) -> list[str]:
        files = ["--checkpoint", str(tmp_path / folder), "--out", str(tmp_path / f"{name}.jsonl")]
        return [*torchrun, "updates", "--config", str(config), "--tokens", "64", *files, *more]

    steps = [
        eight.Step("smoke", [*torchrun, "smoke"], 100),
        eight.Step(
            "whole",
            updates("whole", "whole", "--save-after", "2", "--profile", str(tmp_path / "profile")),
            100,
        ),
        eight.Step(
            "killed",
            updates("killed", "kept", "--save-after", "2", "--die-before", "3"),
            100,
            fails=True,
        ),
        eight.Step(
            "resumed",
            updates("resumed", "kept", "--resume"),
            100,
            lambda folder, said: eight.same_updates(folder),
        ),
    ]
    assert eight.play(steps, tmp_path, poll_s=0.2) == 0
    assert (tmp_path / "profile" / "profile.txt").stat().st_size > 1000


# ---------------------------------------------------------------- the time of a step


def test_the_model_of_a_step_gives_what_was_counted_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen2.5-3B, 2048 episodes of 1500 tokens, 40% of them sampled, on 8 H100s at 45% of their peak."""
    step_time = module("step_time", monkeypatch)
    from rlflow.config.schema import load_config

    config = load_config(step_time.RECIPE)
    model, gpu = step_time.architecture_of(config), step_time.GPUS["H100"]
    parts = {
        line.name: line.seconds
        for line in step_time.lines(config, model, gpu, step_time.DESK_CHECK)
    }
    tokens = 2048 * 1500
    layer = 2048 * (2048 + 2 * 256) + 2048 * 2048 + 3 * 2048 * 11008
    forward = 2 * 36 * layer * tokens + 4 * 36 * 2048 * 2048 * (1500 * 1501 // 2)
    head, rate = 2 * 2048 * 151936 * tokens, 8 * 989e12 * 0.45
    assert parts["train"] == pytest.approx(3 * (forward + 0.4 * head) / rate)
    assert parts["recompute"] == pytest.approx(0.88 * forward / rate)
    assert parts["scoring"] == pytest.approx(2 * (forward + head) / rate)
    assert 65 < sum(parts.values()) < 80  # the desk check's own sum
    fast = replace(step_time.DESK_CHECK, fused=True, scored_only=True, device_weights=True, rows_per_rank=True,
                   probes_together=True, seeds=False, recompute=(), concurrency=256)  # fmt: skip
    found = {line.name: line.seconds for line in step_time.lines(config, model, gpu, fast)}
    assert sum(found.values()) < 40 and found["weight sync"] < 2 and found["recompute"] == 0
    assert found["scoring"] == pytest.approx(2 * (forward + 0.4 * head) / (8 * 989e12 * 0.5))


def test_features_are_those_of_this_code(monkeypatch: pytest.MonkeyPatch) -> None:
    step_time = module("step_time", monkeypatch)
    from rlflow.config.schema import load_config

    config = load_config(step_time.RECIPE)
    parts = step_time.lines(
        config,
        step_time.architecture_of(config),
        step_time.GPUS["H100"],
        step_time.features(config),
    )
    assert sum(line.seconds for line in parts) < 39, "the recipe's step takes longer than it did"
    asked = ("trainer.recompute=none", "rollout.engine.max_concurrency=300")
    found = step_time.features(load_config(step_time.RECIPE, asked))
    assert (found.recompute, found.concurrency) == ((), 300)
