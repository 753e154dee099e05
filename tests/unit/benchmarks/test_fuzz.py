"""The fuzz benchmark: what it looks for is seen, its nonsense can be repeated, and some seconds of it find nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))  # scripts, no package

from fuzzing import nonsense
from fuzzing.cases import Ended, Wrong

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "fuzz.py"


def ended(**changes: object) -> Ended:
    return Ended(**{"code": 0, "out": "", "err": "", "seconds": 1.0, "extra_mib": 0.0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (ended(code=None, err="stacks"), "no end"),
        (ended(code=1), "exit 1"),
        (ended(code=-11), "exit -11"),
        (ended(err="Traceback (most recent call last)\n ..."), "Traceback"),
        (ended(code=2, err="something"), "without a line"),
        (ended(extra_mib=4096), "4096 MiB"),
    ],
)
def test_what_may_not_happen_is_seen(end: Ended, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        end.check()


def test_a_result_and_one_line_of_why_not_are_right() -> None:
    assert ended().check() and not ended(code=2, err="rlflow: DataError: no rows\n").check()


CASES = """
import pathlib, sys, time
from fuzzing.cases import Wrong, forked

def hang():
    time.sleep(60)

folder = pathlib.Path(sys.argv[1])
late = forked(hang, folder, deadline_s=0.5)
assert late.code is None and late.seconds < 20 and "in hang" in late.err, late
raised = forked(lambda: 1 // 0, folder, deadline_s=20)
assert raised.code == 1 and "ZeroDivisionError" in raised.err, raised
try:
    raised.check()
except Wrong as problem:
    print(problem)
"""


def test_a_case_that_hangs_is_ended_with_its_stacks_and_one_that_raises_is_seen(
    tmp_path: Path,
) -> None:
    """In a process of its own: what other tests have loaded into this one may not survive a fork."""
    command = [sys.executable, "-c", CASES, str(tmp_path)]
    run = subprocess.run(
        command, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0 and "Traceback" in run.stdout, run.stderr


def test_nonsense_is_the_same_for_a_seed_and_changes_what_it_is_given(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4
    made = [
        [nonsense.damaged(data, random.Random(number)) for number in range(200)] for _ in range(2)
    ]
    assert (
        made[0] == made[1] and sum(one != data for one in made[0]) > 180 and len(set(made[0])) > 150
    )
    content = {"a": [1, {"b": "c"}], "d": None}
    values = {
        json.dumps(nonsense.damaged_json(content, random.Random(number))) for number in range(100)
    }
    assert len(values) > 50 and content == {"a": [1, {"b": "c"}], "d": None}


def fuzz(*arguments: str) -> dict:
    """The figures of a run that finds nothing."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    figures = json.loads(run.stdout.splitlines()[-1]) if run.stdout else {}
    assert run.returncode == 0 and figures["wrong"] == 0, run.stderr[-8000:]
    assert all(target["cases"] > 0 for target in figures["targets"].values())
    return figures


@pytest.mark.slow
def test_a_second_of_nonsense_rows_find_nothing() -> None:
    assert list(fuzz("--minutes", "0.017", "--only", "corpora")["targets"]) == ["corpora"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_seconds_of_nonsense_find_nothing() -> None:
    assert len(fuzz("--minutes", "0.333", "--seed", "5")["targets"]) == 8
