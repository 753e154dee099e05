"""recipes/worlds.sh reads what the worlds' run_train.sh are given."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
FAKE = """
set -euo pipefail
. recipes/common.sh
. recipes/worlds.sh
RLFLOW_PYTHON=told
told() { echo "$@"; [ "$1" != -m ] || echo "$@" >&2; }
rlflow_read_world "--oni --labeller=" "$@"
rlflow_world_policy made world player:play --turns 2 >&2
told "$seed" "$model" "${!RLFLOW_GIVEN[@]}" \\
    "${RLFLOW_GIVEN[@]}" ${arguments[@]+"${arguments[@]}"} ${overrides[@]+"${overrides[@]}"}
"""


def read(*arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", "-c", FAKE, "run_train.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_switches_values_and_overrides_are_told_apart() -> None:
    done = read("run.seed=3", "--resume", "trainer.lr=1e-4")
    assert done.stdout == "3 runs/made-policy-3 --resume 1 --resume run.seed=3 trainer.lr=1e-4\n", (
        done.stderr
    )
    for given in (["--labeller=http://a?b=c"], ["--labeller", "http://a?b=c"]):
        assert read(*given).stdout == "0 runs/made-policy-0 --labeller http://a?b=c\n"
    assert read("--oni", "--model", "hub/name").stdout.startswith("0 hub/name ")


def test_a_dry_run_makes_no_policy_and_says_that_it_comes_later() -> None:
    made, dry = read("run.seed=3"), read("run.seed=3", "--dry-run")
    assert "-m rlflow env policy world player:play" in made.stderr
    assert not dry.stderr and not (ROOT / "runs/made-policy-3").exists()
    assert dry.stdout == (
        "3  --dry-run 1 --dry-run --model-later model.path=runs/made-policy-3 run.seed=3\n"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--onі"], "unknown option"),
        (["--ino"], "Did you mean '--oni'?"),
        (["--oni=1"], "unknown option '--oni=1'"),
        (["--labeller"], "--labeller needs a value"),
        (["oni"], "unexpected argument 'oni'"),
    ],
)
def test_what_is_no_option_is_said(given: list[str], said: str) -> None:
    done = read(*given)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_the_labeller_says_its_address_and_ends_with_its_owner(tmp_path: Path) -> None:
    script = f'read -r url < <(exec "{sys.executable}" recipes/nethack/labeller.py 0.1); echo "$url"; exec sleep 60'
    owner = subprocess.Popen(
        ["bash", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        body = b'{"messages": [{"content": "shown the message \\"You dig a pit in the floor.\\".\\n"}]}'
        asked = urllib.request.Request(f"{url}/chat/completions", body)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert "FOO" in answer.read().decode()
    finally:
        owner.kill()
        owner.wait()

    def gone() -> bool:
        try:
            urllib.request.urlopen(url, timeout=5)
        except urllib.error.HTTPError:
            return False
        except OSError:
            return True
        return False

    until(gone, 20)
