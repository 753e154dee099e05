"""`rlflow show`: what of an episode stands out, and what of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rlflow_tools.view.commands.show import marked

from rlflow.commands import cli
from rlflow.commands.paint import Paint
from rlflow.rollout import Tokenizer
from rlflow.run.directory import RunDirectory
from rlflow.storage.files import write_json, write_text
from tests.fixtures import tiny_tokenizer
from tests.unit.tools.view.crafted import REGISTERED, evaluated, small_run, write_frame


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return small_run(tmp_path_factory.mktemp("runs") / "small", tokenizer)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_an_attempt_stands_in_its_group_with_its_advantage(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, str(run), "--trajectories", "2")
    assert "── Orvan · attempt 1 · group 0.50 ± 0.71 ──" in out
    assert "reward 1  advantage +0.50" in out and "reward 0  advantage -0.50" in out


def test_question_and_answer_are_marked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(run), "--trajectories", "1", "--color", "always")
    assert "\033[2mQuestion: \033[0m\033[1mWhere was Orvan born?\033[0m" in out
    assert "\033[2m<information>He came from \033[0m\033[30;43mVasmere\033[0m" in out
    assert (
        "\033[36;1m<answer>\033[0m\033[30;43mVasmere\033[0m" in out
        and "expected \033[30;43mVasmere\033[0m" in out
    )


def test_marks_are_whole_words_of_any_case_and_never_patterns() -> None:
    paint = Paint("always")
    assert (
        marked("a VAS\nmere b", ["vas mere"], paint, (), ("good",)).count("\033[32m") == 2
    )  # a style per line
    assert "\033[32m" not in marked(
        "vasmeres x.y", ["vasmere", "x", "."], paint, ("dim",), ("good",)
    )
    assert "\033[32m(a|b)*\033[0m" in marked(
        "see (a|b)* there", ["(a|b)*"], paint, ("dim",), ("good",)
    )


def test_changed_questions_are_shown_before_and_after(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, str(run), "--changed")
    assert out.startswith(
        "1 of 2 questions changed, step 0 to step 2: 1 won, 0 lost (p = 1, exact sign test)\n"
    )
    before, after = out.split("step 2\n")
    assert (
        "step 0\n" in before and "reward 0" in before and "reward 1" in after and "Orvan" not in out
    )
    assert "reward" not in shown(capsys, str(run), "--changed", "--failed")


def test_a_run_with_one_evaluation_has_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    assert cli.main(["show", str(tmp_path), "--changed"]) == 2
    assert "expected two evaluations, found 0" in capsys.readouterr().err


def test_the_folder_of_an_evaluation_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlflow.report.metrics import save_registered

    (tmp_path / "trajectories.jsonl").write_bytes(
        (run / "evaluations" / "step_000002.jsonl").read_bytes()
    )
    save_registered(tmp_path / "environment_metrics.json", REGISTERED)
    write_json(tmp_path / "summary.json", evaluated(0, 0.75))
    out = shown(capsys, str(tmp_path), "--solved")
    assert "EM 0.750 [0.650, 0.850]" in out and "2 of 2 solved episodes, 2 in all" in out


def test_a_time_says_what_it_counts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "step 2 after 20 s from the start, evaluations included" in shown(
        capsys, str(run), "--trajectories", "0"
    )
    write_json(tmp_path / "summary.json", {"status": "finished", "steps": 1, "seconds": 614})
    write_frame(tmp_path, [{"step": 1, "time/evaluate_s": 70.0}])
    assert "finished after 1 step and 10:14" in shown(capsys, str(tmp_path), "--trajectories", "0")


def test_a_configuration_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("run: {name: mine}\n")
    assert cli.main(["show", str(tmp_path / "mine.yaml")]) == 2
    assert "mine.yaml: no run here; expected a directory" in capsys.readouterr().err


# ---------------------------------------------------------------- summary and episodes


@pytest.fixture
def plain_run(tmp_path: Path) -> Path:
    with RunDirectory.create(tmp_path / "run") as run:
        write_text(run.config, "run: {}\n")
        steps = [
            f'{{"step": {step}, "train/reward": {step / 10}, "time/step_s": 30}}\n'
            for step in range(1, 5)
        ]
        write_text(run.metrics, "".join(steps))
        write_json(
            run.summary, {"status": "finished", "steps": 4, "seconds": 130, "written": {"run": "x"}}
        )
        episodes = [
            {"task_id": f"t{n}", "attempt": 0, "prompt": "Who?", "answer": ["Ann"], "reward": float(n == 1), "stop": "terminated",
             "turns": [{"response": f"guess {n}", "observation": "<information>doc</information>"}],
             "metrics": {"exact_match": n == 1},
             "error": "", "prompt_tokens": 3, "response_tokens": 4, "observation_tokens": 5} for n in range(3)]  # fmt: skip
        for step in (2, 4):
            write_text(
                run.trajectories(step),
                "".join(
                    json.dumps({**one, "task_id": f"{one['task_id']}@{step}"}) + "\n"
                    for one in episodes
                ),
            )
    return tmp_path / "run"


def test_show_prints_summary_and_the_last_episodes(
    plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, str(plain_run))
    for text in ("step 4 after 2:00", "reward 0.400", "finished after 4 steps and 2:10", "t0@4", "guess 1",
                 "<information>doc</information>", "reward 1", "expected Ann",
                 "tokens: 3 prompt, 4 sampled, 5 observed"):  # fmt: skip
        assert text in out
    assert "@2" not in out and "\033" not in out


def test_show_selects_step_and_outcome(plain_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, str(plain_run), "--step", "2", "--solved")
    assert "t1@2" in out and "t0@2" not in out and "1 of 1 solved episodes, 3 in all" in out
    out = shown(
        capsys,
        str(plain_run / "trajectories" / "step_000004.jsonl"),
        "--failed",
        "--trajectories",
        "1",
    )
    assert "t0@4" in out and "t2@4" not in out and "step 4 after" not in out


def test_show_folds_attempts_that_are_the_same(
    plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first, *_) = (plain_run / "trajectories" / "step_000004.jsonl").read_text().splitlines()
    alike = [json.dumps({**json.loads(first), "attempt": attempt}) for attempt in range(4)]
    other = json.dumps({**json.loads(first), "attempt": 4, "reward": 1.0})
    (plain_run / "trajectories" / "step_000004.jsonl").write_text("\n".join([*alike, other]) + "\n")
    out = shown(capsys, str(plain_run), "--trajectories", "2")
    assert out.count("guess 0") == 2 and "attempts 1, 2, 3, 4, alike (x4)" in out
    assert "attempt 5 " in out and "5 of 5 episodes, 5 in all" in out


def test_show_colours_on_demand(plain_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\033[36;1mguess 1\033[0m" in shown(capsys, str(plain_run), "--color", "always")


def test_show_says_which_steps_there_are(
    plain_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", str(plain_run), "--step", "3"]) == 2
    assert "no episodes of step 3; there are 2, 4." in capsys.readouterr().err
    assert cli.main(["show", str(plain_run.parent)]) == 2
    assert "Runs in it: run" in capsys.readouterr().err
