"""Runs held against each other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rlflow_tools.view.comparison import (
    Duel,
    common_height,
    compare,
    comparison_text,
    differing_keys,
    duel,
    first_at,
    sign_test,
    write_comparison,
)
from rlflow_tools.view.curves import Measurement, curve
from rlflow_tools.view.recorded import RunFiles

from rlflow.commands import cli
from rlflow.errors import ConfigError
from rlflow.rollout import Tokenizer
from tests.unit.tools.view.crafted import (
    SEARCHED,
    attempt,
    evaluated,
    group_of,
    small_run,
    task,
    trained,
    write_evaluation,
    write_frame,
)


def run_with(
    path: Path,
    tokenizer: Tokenizer,
    right: list[bool],
    config: str = "run: {name: x}\n",
    score: float = 0.5,
) -> Path:
    write_frame(
        path, [evaluated(0, 0.1), trained(1, 0.2), trained(2, 0.6), evaluated(2, score)], config
    )
    tasks = [task(f"t{number}") for number in range(len(right))]
    write_evaluation(
        path,
        2,
        [
            group_of(of, [attempt(tokenizer, of, 0, SEARCHED, solved=won)])
            for of, won in zip(tasks, right)
        ],
    )
    return path


def test_the_sign_test_is_the_exact_binomial() -> None:
    assert sign_test(0, 0) == sign_test(3, 3) == sign_test(1, 0) == 1.0
    assert sign_test(5, 0) == sign_test(0, 5) == 2 / 32
    assert sign_test(8, 1) == pytest.approx(2 * (1 + 9) / 512)
    assert sign_test(600, 400) == pytest.approx(
        2.7e-10, rel=0.05
    )  # normal approximation: z = 6.29 with continuity


def test_questions_won_and_lost_are_those_that_differ(tmp_path: Path, tokenizer: Tokenizer) -> None:
    base = run_with(
        tmp_path / "base", tokenizer, [True, True, False, False, False, False, False, False, False]
    )
    other = run_with(
        tmp_path / "other", tokenizer, [True, False, True, True, True, True, True, True]
    )
    found = duel(RunFiles.open(base), RunFiles.open(other), "base", "other")
    assert (found.shared, len(found.won), len(found.lost)) == (8, 6, 1)
    assert found.p == pytest.approx(2 * (1 + 7) / 128) and "no difference is shown" in found.verdict
    assert found.lost == ["Where was t1 born?"]


def test_configuration_keys_that_differ_are_listed_and_no_others() -> None:
    one = {
        "run": {"name": "a", "seed": 0},
        "algorithm": {"losses": [{"name": "ppo_clip", "clip_high": 0.2}], "critic": None},
    }
    two = {
        "run": {"name": "b", "seed": 0},
        "algorithm": {"losses": [{"name": "ppo_clip"}, {"name": "kl"}], "critic": None},
    }
    assert differing_keys([one, two]) == [
        ["algorithm.losses.0.clip_high", "0.2", "-"],
        ["algorithm.losses.1.name", "-", "kl"],
    ]


def test_time_and_tokens_to_a_score_count_finished_steps() -> None:
    points = curve([evaluated(0, 0.1), trained(1), {**trained(2), **evaluated(2, 0.4)}, {**trained(4), **evaluated(4, 0.6)}],
                   "eval/exact_match")  # fmt: skip
    reached = first_at(points, 0.4)
    assert reached is not None and (reached.step, reached.seconds, reached.tokens) == (
        2,
        20.0,
        2000.0,
    )
    assert first_at(points, 0.7) is None


def test_the_time_to_a_score_is_asked_where_somebody_rose_to_it() -> None:
    def rising(first: float, last: float) -> list[Measurement]:
        return curve(
            [evaluated(0, first), {**trained(4), **evaluated(4, last)}], "eval/exact_match"
        )

    assert common_height([rising(0.1, 0.6), rising(0.2, 0.9)]) == 0.6
    assert (
        common_height([rising(0.0, 0.0), rising(0.0, 0.9)]) is None
    )  # the first never rose: all are there from the start
    assert common_height([rising(0.1, 0.6), []]) is None


def test_the_terminal_and_the_page_say_the_same_in_80_columns(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    long = "model: {path: /a/very/long/path/of/a/model/directory/that/does/not/fit/into/a/line/of/a/terminal/at/all}\n"
    base = run_with(
        tmp_path / "base-run-with-a-long-name",
        tokenizer,
        [False] * 8,
        "trainer: {lr: 1.0e-4}\n",
        0.2,
    )
    other = run_with(
        tmp_path / "other", tokenizer, [True] * 8, "trainer: {lr: 2.0e-4}\n" + long, 0.9
    )
    comparison = compare([RunFiles.open(base), RunFiles.open(other)])
    text = comparison_text(comparison)
    assert max(map(len, text.splitlines())) <= 80
    assert "8 won, 0 lost" in text and "other is better" in text and "trainer.lr" in text
    assert "to exact match 0.200" in text and "0:20" in text.replace("20 s", "0:20")
    write_comparison(comparison, tmp_path / "compare.html")
    page = (tmp_path / "compare.html").read_text()
    assert "8 won, 0 lost" in page and page.count("<img") == 2
    assert not re.search(r"https?://|<script", page)


def test_names_are_escaped_and_told_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    runs = [
        run_with(tmp_path / folder / "<b>x", tokenizer, [True] * 5) for folder in ("one", "two")
    ]
    comparison = compare([RunFiles.open(run) for run in runs])
    assert comparison.names == [str(run) for run in runs]
    hostile = Duel("a", "b", 1, ["\x1b]0;taken\x07\x1b[2J?"], [], 1.0)
    assert "\ufffd]0;taken\ufffd\ufffd[2J?" in comparison_text(replace(comparison, duels=[hostile]))
    write_comparison(comparison, tmp_path / "compare.html")
    assert "<b>x" not in (tmp_path / "compare.html").read_text()


def test_the_command_compares_runs_and_refuses_one(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (small_run(tmp_path / name, tokenizer) for name in "ab")
    assert cli.main(["compare", str(one), str(two), "--out", str(tmp_path / "c.html")]) == 0
    said = capsys.readouterr().out
    assert "the configurations are the same" in said and "0 won, 0 lost, 2 alike of 2" in said
    assert cli.main(["compare", str(one), str(two), "--out", str(tmp_path)]) == 2
    assert "is a directory; expected a file" in capsys.readouterr().err
    assert cli.main(["compare", str(one)]) == 2
    assert "expected two runs or more" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        compare([])
