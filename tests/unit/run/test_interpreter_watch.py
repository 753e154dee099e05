"""A call that holds Python's interpreter is named and ended from outside; a process that was stopped is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlflow.run.checkpoints import read_state
from rlflow.run.directory import RunDirectory
from rlflow.run.interrupt import InterpreterWatch
from rlflow.run.silence import described
from tests.flow.fallible import REFERENCE
from tests.flow.letters import LEARNING, letters_config, write_config, write_letters_model
from tests.unit.run.programs import WITHOUT_TORCH

PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

HOLDING = f"""{WITHOUT_TORCH}
import re, threading
from rlflow.run import interrupt
interrupt.WORD_S = interrupt.FLOOR_S = 1.0
def hold():
    re.match("(a+)+$", "a" * 60 + "b")
with interrupt.InterpreterWatch(3.0, "the option"):
    threading.Thread(target=hold).start()
    threading.Event().wait()
"""


def test_a_call_that_holds_the_interpreter_is_named_and_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLDING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    word, _, rest = done.stderr.partition("\n")
    assert (
        word
        == "rlflow: one call holds the interpreter, nothing else has run for 1 s; it has 3 s. It is in:"
    )
    assert "in match" in rest and "in hold" in rest and "in wait" not in rest
    assert rest.splitlines()[-1].startswith(
        "rlflow: ended: one call has held the interpreter for 3 s (the option). Rel"
    )


@pytest.mark.slow
def test_a_slow_import_is_one_line_without_the_stack_of_the_import_system(tmp_path: Path) -> None:
    """A module on a slow disk: here one that holds the interpreter while it is imported."""
    packages = tmp_path / "site-packages"
    (packages / "heavy").mkdir(parents=True)
    (packages / "heavy" / "__init__.py").write_text("from heavy import inner\n")
    (packages / "heavy" / "inner.py").write_text("import re\nre.match('(a+)+$', 'a' * 60 + 'b')\n")
    code = HOLDING.replace('re.match("(a+)+$", "a" * 60 + "b")', "import heavy")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), *filter(None, sys.path)])},
    )
    assert done.returncode == -signal.SIGKILL
    first, second = done.stderr.splitlines()
    assert "importing heavy takes long: slow disk?" in first
    assert "importlib" not in done.stderr and second.startswith("rlflow: ended")


IMPORT = ("<frozen importlib._bootstrap>", "241", "_call_with_frames_removed")


def test_the_package_of_a_slow_start_is_the_one_that_rlflow_imports() -> None:
    frames = [
        IMPORT,
        ("/venv/lib/python3.11/site-packages/torch/__init__.py", "9", "<module>"),
        IMPORT,
        ("/venv/lib/python3.11/site-packages/megatron/core/__init__.py", "3", "<module>"),
        IMPORT,
        ("/home/x/rlflow/trainer/megatron/model.py", "4", "<module>"),
        ("/home/x/rlflow/run/open.py", "80", "_start"),
    ]
    text = described(frames, 10, 600)
    assert text.startswith("importing megatron takes long") and "\n" not in text


def test_a_long_stack_is_cut_to_its_innermost_frames_and_the_users() -> None:
    libraries = [
        (f"/venv/lib/python3.11/site-packages/lib{at}.py", "1", "call") for at in range(60)
    ]
    mine = ("/home/x/my_environment.py", "12", "step")
    text = described([*libraries, mine, *libraries], 10, 600)
    lines = text.splitlines()
    assert len(lines) < 12 and "lib0.py" in lines[1] and "lib59.py" not in text
    assert sum("my_environment.py" in line for line in lines) == 1


STOPPED = f"""{WITHOUT_TORCH}
import os
from rlflow.run import interrupt
interrupt.WORD_S = interrupt.FLOOR_S = 1.0
with interrupt.InterpreterWatch(2.0, "the option"):
    print("ready", flush=True)
    input()
print("ended")
"""


def test_a_process_that_was_stopped_is_not_blamed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    process.send_signal(signal.SIGCONT)
    assert process.communicate("\n", timeout=30) == ("ended\n", "")


def test_nothing_stays_behind() -> None:
    threads = threading.active_count()
    with InterpreterWatch(60.0, "the option") as watch:
        pass
    assert threading.active_count() == threads
    with pytest.raises(ProcessLookupError):
        os.kill(watch._process.pid, 0)


IN_A_RUN = """
import sys
from rlflow.run import interrupt
interrupt.WORD_S, interrupt.FLOOR_S = 2.0, 5.0
from rlflow.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_whose_environment_holds_the_interpreter_is_named_ended_and_resumed(
    tmp_path: Path,
) -> None:
    """In the middle of a step of training, after a checkpoint."""
    holds = tmp_path / "holds"
    options = ("run.steps=4", "checkpoint.every_steps=1", "checkpoint.export=false", "metrics.picture=false",
               "evaluation.at_start=false", "evaluation.every_steps=0", "evaluation.final_questions=4",
               f"environment={{name: '{REFERENCE}', holds: '{holds}'}}", "rollout.faults={call_s: 5, episode_s: 20}")  # fmt: skip
    model = write_letters_model(tmp_path / "model")
    config = write_config(
        letters_config(model, tmp_path, *LEARNING, *options), tmp_path / "config.yaml"
    )
    command = [sys.executable, "-c", IN_A_RUN, "train", "--config", str(config)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **PATHS},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "in match" in done.stderr and "rollout.faults.call_s, 60 s at the least" in done.stderr
    assert holds.exists()  # it holds once
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, **PATHS})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read_state(RunDirectory(tmp_path / "letters").saved.path(4))["step"] == 4
