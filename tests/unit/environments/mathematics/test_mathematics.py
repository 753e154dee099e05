"""Problems of mathematics: made by rule and read from files; answers that are right, wrong, or cannot be checked."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from rlflow import check_environment
from rlflow.errors import ConfigError, DataError, MissingPackageError, PolicyError
from rlflow.report.reductions import rollout_metrics
from rlflow.rollout import Rollout
from rlflow.run.evaluate import evaluate
from rlflow.types import Episode, Step, Task
from rlflow_environments.mathematics import verifier as verifying
from rlflow_environments.mathematics.answers import boxed, number, on_last_line
from rlflow_environments.mathematics.environment import Mathematics
from rlflow_environments.mathematics.player import play
from rlflow_environments.mathematics.problems import FAMILIES
from rlflow_environments.mathematics.verifier import Verifier, VerifierError, check_parser
from tests.saying import Saying, byte_tokenizer

NAMES = [family.name for family in FAMILIES]


def said(environment: Mathematics, answer: str, task: Task) -> Step:
    return environment.step(Episode(task), f"Well, \\boxed{{{answer}}}.")


# ------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}} and {more", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"}} \boxed {4}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{1} so \fbox{2}", "2"),
        (r"\boxed{1}, that is $\boxed 7$.", "7"),
        (r"\boxed 1,234.", "1,234"),
        (r"\boxed7 or \boxed x", "x"),
        (r"\boxedx \boxed answer", None),
        ("no box {5}", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text: str, content: str | None) -> None:
    assert boxed(text) == content


def test_a_megabyte_of_boxes_takes_time_in_proportion() -> None:
    def seconds(text: str) -> float:
        began = time.perf_counter()
        boxed(text)
        return time.perf_counter() - began

    for piece in (r"\boxed{", "{", r"\boxed{}", "}", "\\", r"\boxed 1,", r"\boxed   "):
        once, tenfold = (min(seconds(piece * count) for _ in range(3)) for count in (3_000, 30_000))
        assert tenfold < 40 * once + 0.01, piece
    assert boxed(r"\boxed{" * 100_000 + "1" + "}" * 100_000) == "1"
    assert seconds(r"\boxed{" * 150_000) < 5


def test_plain_numbers_are_exact() -> None:
    wanted = {
        "-1,234": -1234,
        "0.50": Fraction(1, 2),
        "6/8": Fraction(3, 4),
        "+7.": 7,
        "\N{MINUS SIGN}2": -2,
    }
    half = {"-.5": -Fraction(1, 2), r"\tfrac{1}{2}": Fraction(1, 2), r"\frac12": Fraction(1, 2)}
    for text, value in {**wanted, **half, r"-\dfrac{1}{3}": Fraction(-1, 3)}.items():
        assert number(text) == value
    for text in ("1,23", "1/0", "1e3", "", "٣", "9" * 31, "2^3", "--1", ".", "/2", r"\frac123"):
        assert number(text) is None, text
    assert on_last_line("Answer: 1\nanswer: $-2$ \nso") == "-2" and on_last_line("none") is None
    assert on_last_line("İİ\nAnswer: **$32$.**") == "32" and on_last_line("answer: .\n") is None
    environment = Mathematics()
    environment._verifier = object()  # type: ignore[assignment]  # two numbers need none
    assert not environment._equal(r"\frac{1}{3}", "0.3333333")


# ------------------------------------------------------------ made problems


def test_every_answer_follows_from_its_question() -> None:
    """By Python's own arithmetic on the question's text, for the families that are expressions."""
    environment = Mathematics(families=NAMES, highest=30, tasks_per_split=400)
    for task in environment.tasks("train"):
        question = str(task.prompt).removeprefix("Find ").split(". Answer")[0]
        expression = question.replace("mod", "%").replace("% of ", "/100*")
        if question[0] == "x":
            left, right = (
                question.removeprefix("x with ").replace("x", f"*{task.answer}").split("=")
            )
            assert eval(left) == int(right)  # noqa: S307
        elif question[0] != "t":
            assert eval(expression) == pytest.approx(float(number(task.answer))), question  # noqa: S307
        assert said(environment, task.answer, task).reward == 1.0
        assert said(environment, f"{task.answer}1", task).reward == 0.0


def test_questions_are_held_out_and_no_answer_is_right_often() -> None:
    environment = Mathematics(families=NAMES, tasks_per_split=4000)
    train, val = environment.tasks("train"), environment.tasks("val")
    assert not {task.prompt for task in train} & {task.prompt for task in val}
    guess = Counter(task.answer for task in train).most_common(1)[0][0]
    assert sum(task.answer == guess for task in val) / len(val) < 0.06
    for name in NAMES:
        known = Counter(task.answer for task in train if task.metadata["family"] == name)
        mine = [task.answer for task in val if task.metadata["family"] == name]
        assert sum(answer == known.most_common(1)[0][0] for answer in mine) / len(mine) < 0.12, name
    assert (
        Mathematics(seed=1).tasks("train")
        != Mathematics().tasks("train")
        == Mathematics().tasks("train")
    )


def test_the_player_solves_all_and_a_clumsy_one_few() -> None:
    environment = Mathematics(families=NAMES, tasks_per_split=400)
    for clumsy, low, high in ((False, 1.0, 1.0), (True, 0.1, 0.35)):
        drawn = random.Random(0)
        rewards = [environment.step(Episode(task), play(str(task.prompt), [], drawn, clumsy)).reward
                   for task in environment.tasks("train")]  # fmt: skip
        assert low <= sum(rewards) / 400 <= high


def test_the_contract_holds_for_64_episodes_at_once() -> None:
    report = check_environment(Mathematics(), episodes=64, player=play)
    assert report.passed and "the player: 64 episodes, 64 terminated, mean return 1" in str(report)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"families": ["sums"]}, "Did you mean 'sum'"),
        ({"families": []}, "found none"),
        ({"families": ["sum"], "highest": 1}, "highest: expected more than 1, of which 'sum'"),
        ({"prompt": "Go!"}, "expected a text with {question}"),
    ],
)
def test_options_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Mathematics(**options)


# ------------------------------------------------------------ files

GSM8K = {
    "question": "Tom has 3 apples and buys 1,231 more. How many?",
    "answer": "3+1231 = <<3+1231=1234>>1234\n#### 1,234",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "content": "Solve it. The last line should be of the form Answer: $Answer.\n\n2^5?",
            "role": "user",
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "32", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_files_in_the_formats_of_gsm8k_and_dapo(tmp_path: Path) -> None:
    files = {
        "train": written(tmp_path / "a.jsonl", GSM8K),
        "val": written(tmp_path / "b.jsonl", DAPO, DAPO),
    }
    environment = Mathematics(**files, checks="numbers")
    [first], [second] = (
        environment.tasks("train"),
        environment.tasks("val"),
    )  # a repeated problem counts once
    assert (first.answer, second.answer) == ("1234", "32") and "in \\boxed{}" in first.prompt
    assert second.prompt[0]["content"].endswith("2^5?") and environment.stop == ()
    assert said(environment, "1,234", first).reward == 1.0
    for response, reward in (
        ("So\nAnswer: 32", 1.0),
        ("Answer: 31", 0.0),
        (r"\boxed{32}. Answer: 31", 1.0),
    ):
        assert environment.step(Episode(second), response).reward == reward
    assert environment.step(Episode(first), "Answer: 1234").reward == 0.0  # it asked for a box
    assert environment.evaluation_options("x.jsonl") == {"val": "x.jsonl"}
    assert environment.task_from_text("1+1?").answer is None


HASHES = 'Work it out, then write the number alone behind four hashes, like "#### 7".'


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12 x 6 = 72.\n#### 72", 1.0),
        ("#### Step 1\n72\n#### $72$.\nDone.", 1.0),
        ("so #### 72", 1.0),
        (r"\boxed{72}", 1.0),
        ("#### \\boxed{72}", 1.0),
        ("#### 72\n#### 18", 0.0),
        ("#### 18 72", 0.0),
        (r"\boxed{72}. #### 18", 0.0),
        ("##### 72", 0.0),
        ("Answer: 72", 0.0),
        ("72", 0.0),
    ],
)
def test_the_form_that_a_row_asks_for_is_read(response: str, reward: float, tmp_path: Path) -> None:
    """The layout of verl's and SkyRL's GSM8K; one answer is looked at, the last."""
    row = {
        "prompt": [{"role": "user", "content": f"6 x 12? {HASHES}"}],
        "reward_model": {"ground_truth": "72"},
    }
    environment = Mathematics(val=written(tmp_path / "a.jsonl", row), checks="numbers")
    (task,) = environment.tasks("val")
    assert environment.step(Episode(task), response).reward == reward
    assert environment.task_problem(task) == ""


def test_tags_count_where_they_are_asked_for_and_hashes_beside_a_box_only_without_one(
    tmp_path: Path,
) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "1? <answer>...</answer>"}],
            "reward_model": {"ground_truth": "5"},
        },
        {"problem": "#### Part a\n2?", "answer": 5},
    ]
    environment = Mathematics(val=written(tmp_path / "a.jsonl", *rows), checks="numbers")
    tags, heading = environment.tasks("val")
    for task, response, reward in (
        (tags, "<answer>4</answer><answer> 5 </answer>", 1.0),
        (tags, r"<answer>\boxed{5}</answer>", 1.0),
        (tags, r"<answer>4</answer> \boxed{5}", 0.0),
        (heading, "\\boxed{5}\n#### Remark", 1.0),
        (heading, "<answer>5</answer>", 0.0),
    ):
        assert environment.step(Episode(task), response).reward == reward, response


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [(204, "204"), (7.0, "7"), (0.5, "0.5"), (-3, "-3"), ("08", "08")],
)
def test_numbers_are_answers_too(answer: Any, wanted: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"problem": "a", "answer": answer})
    dapo = written(tmp_path / "b.jsonl", {"prompt": "a", "reward_model": {"ground_truth": answer}})
    for file in (path, dapo):
        (task,) = Mathematics(val=file, checks="numbers").tasks("val")
        assert task.answer == wanted


def test_answers_that_could_not_be_right_and_prompts_without_a_form_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"problem": "fine?", "answer": "7"},
        {"problem": "open?", "answer": "{7"},
        {"prompt": [{"role": "user", "content": "Plain?"}], "reward_model": {"ground_truth": "1"}},
    ]
    environment = Mathematics(val=written(tmp_path / "a.jsonl", *rows), checks="numbers")
    problems = [environment.task_problem(task) for task in environment.tasks("val")]
    assert problems[0] == problems[2] == "" and "is read as" in problems[1]
    assert "1 of 3 prompts ask for no form" in caplog.text


def test_parquet_and_every_tenth_problem_for_validation(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table
    rows = [{**DAPO, "prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(25)]
    parquet.write_table(table.from_pylist(rows), tmp_path / "dapo.parquet")
    environment = Mathematics(train=str(tmp_path / "dapo.parquet"), checks="numbers")
    assert (len(environment.tasks("train")), len(environment.tasks("val"))) == (22, 3)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("so #### (3,4)", "(3,4)"),
        ("so #### 1,234", "1234"),
        ("#### Conclusion\nIt is \\boxed{(1,2)}.", "(1,2)"),
        ("It is \\boxed{7}.\n#### Check\nFine.", "7"),
    ],
)
def test_what_stands_behind_the_mark_of_gsm8k(answer: str, wanted: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"question": "a", "answer": answer})
    assert Mathematics(val=path, checks="numbers").tasks("val")[0].answer == wanted


def test_a_question_of_both_files_is_held_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, val = written(tmp_path / "a.jsonl", GSM8K, DAPO), written(tmp_path / "b.jsonl", DAPO)
    [task] = Mathematics(train, val, checks="numbers").tasks("train")
    assert task.answer == "1234" and "left out 1 problems that" in caplog.text
    with pytest.raises(DataError, match=r"expected two problems or more.*found 1"):
        Mathematics(val, checks="numbers")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"question": "a"}, "line 1: 'solution': expected text, found nothing"),
        ({"question": "a", "answer": "so ####  "}, "expected '#### NUMBER' at its end"),
        (
            {"prompt": [], "reward_model": {"ground_truth": "1"}},
            "'prompt': expected text or messages, found a list",
        ),
        (
            {"prompt": "a", "reward_model": {"ground_truth": True}},
            "'ground_truth': expected text, found true/false",
        ),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        Mathematics(train=written(tmp_path / "bad.jsonl", row))


# ------------------------------------------------------------ checks in processes


def fake(tmp_path: Path, body: str) -> Path:
    """A worker whose answer to each line is `body`; one that it is asked `ok` it knows."""
    path = tmp_path / "worker.py"
    path.write_text("import json, os, sys, time\nprint('{\"ready\": 1}', flush=True)\nfor line in sys.stdin:\n"
                    "    if json.loads(line)['found'] != 'ok':\n"
                    f"        {body}\n        continue\n    print('{{\"same\": true}}', flush=True)\n")  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("body", "told", "kind"),
    [
        ("time.sleep(60)", "did not end within", VerifierError),
        ("os.kill(os.getpid(), 9)", "ended with code -9", VerifierError),
        ("os.kill(os.getpid(), 11)", "ended with code -11", PolicyError),
        ("os.kill(os.getpid(), 27)", "too much time", PolicyError),
        ("print('no json', flush=True)", "process failed", VerifierError),
        ('print(\'{"failed": "MemoryError"}\', flush=True)', "MemoryError", PolicyError),
    ],
    ids=["waits", "killed", "crashes", "computes", "babbles", "memory"],
)
def test_a_check_tells_what_the_answer_caused_from_what_it_did_not(
    body: str, told: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error escapes, and its kind says whether the episode counts as wrong or is left out; the next check is served."""
    monkeypatch.setattr(verifying.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(verifying, "GRACE_S", 0.1)
    monkeypatch.setattr(verifying, "MOST_WAITS", 1)
    environment, task = Mathematics(), Task("a", "?", "x + 1")
    environment._verifier = Verifier(2, 0.2, 512, program=fake(tmp_path, body))
    with pytest.raises(kind, match=told):
        said(environment, "bad", task)
    assert said(environment, "ok", task).reward == 1.0
    assert environment.report() == {"mathematics/checks": 1.0, "mathematics/unchecked": 1.0}
    assert environment.report() == {"mathematics/checks": 0.0, "mathematics/unchecked": 0.0}
    environment.shutdown()


def test_what_a_policy_makes_unscorable_counts_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One box in three holds more than is looked at: 2 of 3 attempts are right, in evaluation and in training."""
    rows = [{"problem": f"{number}?", "answer": f"x_{number}"} for number in range(3)]
    environment = Mathematics(
        val=written(tmp_path / "a.jsonl", *rows), checks="numbers", prompt="{question}\\boxed"
    )
    monkeypatch.setattr(verifying, "MOST_CHARACTERS", 20)
    environment._verifier = object.__new__(Verifier)
    environment._verifier._counts, environment._verifier._lock = Counter(), threading.Lock()
    tokenizer = byte_tokenizer()

    def answer(prompt: str) -> str:
        number = prompt[0]
        return rf"\boxed{{x_{number}}}" if number != "1" else r"\boxed{" + "1+" * 10 + "1}"

    limits = {"max_response_tokens": 60, "max_total_tokens": 100, "max_turns": 1}
    with Rollout(Saying(tokenizer, answer), environment, tokenizer, **limits) as rollout:
        metrics = evaluate(rollout, environment.tasks("val")).metrics
        groups = rollout.collect(environment.tasks("val"), samples_per_prompt=2)
    assert metrics["eval/solved"] == pytest.approx(2 / 3)
    assert (metrics["eval/asked"], metrics["eval/failed"], metrics["eval/unscorable"]) == (3, 0, 1)
    attempts = [one for group in groups for one in group.trajectories]
    assert [one.reward for one in attempts] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert [one.unscorable for one in attempts] == [False, False, True, True, False, False]
    told = attempts[2].error
    assert "21 characters" in told and attempts[2].metrics["answered"] == 1.0
    assert rollout_metrics(attempts, environment.metrics)["rollout/unscorable"] == pytest.approx(
        1 / 3
    )


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"'math-verify' is not installed: pip install .*\[mathematics\]"
    ):
        Mathematics(checks="math-verify")


CASES = [
    (r"\frac{1}{2}", "1/2", r"\frac{1}{3}"),
    ("0.5", r"50\%", "5"),
    ("[1,2)", "[1,2)", "[1,2]"),
    (r"(-\infty,2)\cup(3,4]", r"(3,4]\cup(-\infty,2)", r"(-\infty,2)"),
    ("5", r"5\text{ cm}", "5 or 6"),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        r"\begin{bmatrix}1&2\\3&5\end{bmatrix}",
    ),
    ("x^2+2x+1", "(x+1)^2", "(x-1)^2"),
    (r"2\sqrt{2}", r"\sqrt{8}", r"\sqrt{7}"),
    (r"\{1,2,3\}", r"\{3,2,1\}", r"\{1,2\}"),
    ("18", r"\$18.00.", "81"),
]


def test_a_parser_that_reads_percents_wrongly_is_refused() -> None:
    check_parser("4.13.2")
    check_parser("4.14.0rc1")
    with pytest.raises(ConfigError, match=r"4\.13\.2 or newer, found 4\.9\.3"):
        check_parser("4.9.3")


def test_a_parser_that_is_missing_is_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify can be installed without one."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    monkeypatch.setattr(verifying, "PARSER", "a-parser-that-is-not-there")
    with pytest.raises(MissingPackageError, match="a-parser-that-is-not-there"):
        Verifier(1, 1.0, 512)


@pytest.mark.slow
def test_math_verify_on_hard_and_hostile_answers() -> None:
    pytest.importorskip(
        "math_verify", reason="math-verify is not installed: pip install math-verify"
    )
    environment = Mathematics(checks="math-verify", timeout_s=30, at_once=2)
    for wanted, right, wrong in CASES:
        task = Task("a", "?", wanted)
        assert (said(environment, right, task).reward, said(environment, wrong, task).reward) == (
            1.0,
            0.0,
        ), wanted
    environment._verifier._timeout_s = 1.0  # type: ignore[union-attr]
    hostile, task = ("9**9**9**9", "9^{9^{9^9}}!", "1" * 1_000_000), Task("a", "?", "7")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(said, environment, text, task) for text in hostile]
        for one in asked:
            try:
                assert (
                    one.result(60).reward == 0.0
                )  # what the library itself refuses in time is wrong
            except PolicyError as told:
                assert "too much time" in str(told) or "1,000,000 characters" in str(told)
    assert environment.report()["mathematics/unchecked"] >= 1
    environment.shutdown()
