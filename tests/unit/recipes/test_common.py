"""recipes/common.sh finds or makes the Python environment. A scripted stand-in for the base Python records what pip is asked."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VERSION = re.search(r"^torch==(.*)$", (ROOT / "constraints" / "cpu.txt").read_text(), flags=re.M)[1]

FAKE_PYTHON = """#!/bin/bash
echo "$*" >> "$FAKE_LOG"
case "$*" in
*"-m venv"*) for place; do :; done; mkdir -p "$place/bin"; cp "$0" "$place/bin/python"; touch "$place/pyvenv.cfg" ;;
*importlib.metadata*) exit 1 ;;
*urllib*) [ "$FAKE_NETWORK" = yes ] ;;
*"pip install"*--index-url*) ;;
*"pip install"*torch==*+cpu*) [ "$FAKE_CPU_BUILD" = yes ] || { printf "${FAKE_NONE:-No matching distribution found\\n}"; exit 1; } ;;
*"pip install -e"*) printf "${FAKE_SAYS:-}"; sleep "${FAKE_SECONDS:-0}"
    for _ in {1..300}; do grep -q "${FAKE_UNTIL:-}" "$FAKE_SEEN"/std* && break; sleep 0.1; done
    [ "${FAKE_BROKEN:-}" != silently ] || exit 1
    [ "${FAKE_BROKEN:-}" != yes ] || { echo "ERROR: disk full"; exit 1; } ;;
esac
"""

Shell = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs a bash command after sourcing common.sh, with a base Python that only pretends. Variables by keyword: FAKE_UNTIL
    is what it waits for among the words that a person sees."""
    tools = tmp_path / "tools"
    tools.mkdir()
    python = tools / "python3"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)

    def run(command: str, **variables: str) -> subprocess.CompletedProcess:
        environment = {
            "PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "FAKE_LOG": str(tmp_path / "log"), "FAKE_CPU_BUILD": "yes",
            "FAKE_SEEN": str(tmp_path),
            "RLFLOW_BASE_PYTHON": str(python), "RLFLOW_VENV": str(tmp_path / "venv"), **variables,
        }  # fmt: skip
        program = f'set -euo pipefail; . "{ROOT}/recipes/common.sh"; {command}'
        shown = tmp_path / "stdout", tmp_path / "stderr"
        with shown[0].open("w") as out, shown[1].open("w") as err:
            done = subprocess.run(
                ["bash", "-c", program], env=environment, stdout=out, stderr=err, timeout=60
            )
        return subprocess.CompletedProcess(
            done.args, done.returncode, *(path.read_text() for path in shown)
        )

    return run


def installs(tmp_path: Path) -> list[str]:
    """The torch and rlflow requirements that pip was asked for, in order, with the index if one was named."""
    lines = (tmp_path / "log").read_text().splitlines()
    found = [
        re.search(r"(--index-url \S+ )?(torch==\S+|-e \S+)", line)
        for line in lines
        if "pip install" in line
    ]
    return [match[0] for match in found if match]


def test_a_set_up_says_package_and_size_while_it_goes_on(shell: Shell, tmp_path: Path) -> None:
    downloading = "Collecting numpy>=1.26\\n  Downloading https://host/numpy-2.4.6-cp311-cp311-linux.whl (16.9 MB)\\n"
    done = shell(
        "rlflow_setup run", FAKE_SAYS=downloading, FAKE_UNTIL="numpy", RLFLOW_PROGRESS_S="1"
    )
    assert re.search(
        r"^\[rlflow\]   [0-9]+ s: downloading numpy 2\.4\.6 \(16\.9 MB\)$", done.stderr, flags=re.M
    ), done.stderr
    shutil.rmtree(tmp_path / "venv")
    installing = "  Downloading a-1-b.whl (1 kB)\\nInstalling collected packages: a, b, c\\n"
    done = shell(
        "rlflow_setup run",
        FAKE_SAYS=installing,
        FAKE_UNTIL="installing packages",
        RLFLOW_PROGRESS_S="1",
    )
    assert "s: installing packages: 0 of 3\n" in done.stderr
    shutil.rmtree(tmp_path / "venv")
    typed = f"script -qec 'bash -c \". {ROOT}/recipes/common.sh; rlflow_setup run\"' /dev/null"
    done = shell(typed, FAKE_SAYS=downloading, FAKE_UNTIL="numpy")
    lines = re.findall(
        r"\n\x1b\[K\[rlflow\]   \d+ s: (.+)", done.stdout
    )  # text mode reads \r as \n
    assert "downloading numpy 2.4.6 (16.9 MB)" in lines, "in a terminal one line that moves"


def test_cpu_build_comes_from_pips_configuration_first(shell: Shell, tmp_path: Path) -> None:
    done = shell('rlflow_setup run; echo "$RLFLOW_PYTHON $OMP_WAIT_POLICY"')
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "venv" / "bin" / "python"), "passive"]
    assert installs(tmp_path) == [f"torch=={VERSION}+cpu", f"-e {ROOT}[search]"]


def test_cpu_build_comes_from_pytorchs_index_where_pip_has_none(
    shell: Shell, tmp_path: Path
) -> None:
    assert shell("rlflow_setup run", FAKE_CPU_BUILD="no", FAKE_NETWORK="yes").returncode == 0
    index = "--index-url https://download.pytorch.org/whl/cpu"
    assert installs(tmp_path) == [
        f"torch=={VERSION}+cpu",
        f"{index} torch=={VERSION}+cpu",
        f"-e {ROOT}[search]",
    ]


def test_plain_torch_is_the_last_resort(shell: Shell, tmp_path: Path) -> None:
    assert shell("rlflow_setup run", FAKE_CPU_BUILD="no", FAKE_NETWORK="no").returncode == 0
    assert installs(tmp_path) == [
        f"torch=={VERSION}+cpu",
        f"torch=={VERSION}",
        f"-e {ROOT}[search]",
    ]


def test_a_constraint_of_the_machines_own_hides_no_other_build(
    shell: Shell, tmp_path: Path
) -> None:
    """pip 25 then says that versions exclude each other, not that there is none."""
    said = (
        f"ERROR: Cannot install torch=={VERSION}+cpu because these package versions have conflicting dependencies.\\n\\n"
        f"The conflict is caused by:\\n    The user requested torch=={VERSION}+cpu\\n    The user requested (constraint) torch<=9\\n\\n"
        "To fix this you could try to:\\n1. loosen\\n2. remove\\n\\nERROR: ResolutionImpossible: for help visit a page\\n"
    )
    done = shell("rlflow_setup run", FAKE_CPU_BUILD="no", FAKE_NETWORK="no", FAKE_NONE=said)
    assert done.returncode == 0, done.stderr
    assert installs(tmp_path)[1:] == [f"torch=={VERSION}", f"-e {ROOT}[search]"]


def test_plain_torch_is_installed_where_there_is_a_gpu(shell: Shell, tmp_path: Path) -> None:
    smi = tmp_path / "tools" / "nvidia-smi"
    smi.write_text("#!/bin/bash\necho 'GPU 0: NVIDIA'\n")
    smi.chmod(0o755)
    assert shell("rlflow_setup run").returncode == 0
    assert installs(tmp_path) == [f"torch=={VERSION}", f"-e {ROOT}[search]"]


def test_second_start_does_nothing_and_a_set_up_for_tests_covers_runs(
    shell: Shell, tmp_path: Path
) -> None:
    assert shell("rlflow_setup test").returncode == 0
    assert installs(tmp_path)[-1] == f"-e {ROOT}[test]"
    (tmp_path / "log").write_text("")
    start = time.perf_counter()
    done = shell("rlflow_setup run; rlflow_setup test")
    assert (done.returncode, done.stderr, (tmp_path / "log").read_text()) == (0, "", "")
    assert time.perf_counter() - start < 3


def test_a_changed_requirement_installs_again(shell: Shell, tmp_path: Path) -> None:
    assert shell("rlflow_setup run").returncode == 0
    (tmp_path / "venv" / ".rlflow-run").write_text("another hash")
    (tmp_path / "log").write_text("")
    assert shell("rlflow_setup run").returncode == 0
    assert installs(tmp_path)[-1] == f"-e {ROOT}[search]"


def test_a_failed_step_is_said_with_its_reason_and_the_next_start_goes_on(
    shell: Shell, tmp_path: Path
) -> None:
    done = shell("rlflow_setup run", FAKE_BROKEN="yes")
    assert done.returncode == 2
    assert "disk full" in done.stderr
    (tmp_path / "log").write_text("")
    assert shell("rlflow_setup run").returncode == 0
    assert "-m venv" not in (tmp_path / "log").read_text()


PIP_SAYS = {
    "conflict": (
        "Collecting x\\nERROR: Cannot install soupsieve because these package versions have conflicting dependencies.\\n"
        "\\nThe conflict is caused by:\\n    beautifulsoup4 4.15.0 depends on soupsieve>=1.6.1\\n"
        "    The user requested (constraint) soupsieve==4.1.1\\n\\nTo fix this you could try to:\\n1. loosen\\n"
        "ERROR: ResolutionImpossible: for help visit a page\\n",
        ("The user requested (constraint) soupsieve==4.1.1", "exclude each other"),
    ),
    "python": (
        "ERROR: Ignored the following versions that require a different python version: 4.1.1 Requires-Python >=3.11.5\\n"
        "ERROR: No matching distribution found for soupsieve==4.1.1\\n",
        ("Requires-Python >=3.11.5", "needs another Python"),
    ),
    "disk": (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\\n",
        ("[Errno 28]", "no disk space is left"),
    ),
    "network": (
        "WARNING: Retrying: NewConnectionError: Failed to establish a new connection\\nERROR: No matching distribution\\n",
        ("No matching distribution", "does not reach its package index"),
    ),
    "compiler": (
        "  error: command 'gcc' failed: No such file or directory\\nERROR: Failed building wheel for pycosat\\n",
        ("Failed building wheel for pycosat", "cannot be compiled here"),
    ),
}


@pytest.mark.parametrize("kind", PIP_SAYS)
def test_a_failed_installation_gives_pips_reason_and_what_to_do(
    shell: Shell, tmp_path: Path, kind: str
) -> None:
    said, expected = PIP_SAYS[kind]
    done = shell("rlflow_setup run", FAKE_BROKEN="silently", FAKE_SAYS=said)
    assert done.returncode == 2
    assert [words for words in expected if words not in done.stderr] == [], done.stderr
    assert "ResolutionImpossible" not in done.stderr, "this word says nothing to a newcomer"


def test_an_interrupted_set_up_is_made_anew(shell: Shell, tmp_path: Path) -> None:
    killed = shell("rlflow_step_or_fail() { kill -9 $$; }; rlflow_setup run")
    assert killed.returncode == -9
    leftover = tmp_path / "venv" / "half-installed"
    leftover.parent.mkdir(exist_ok=True)
    leftover.touch()
    done = shell("rlflow_setup run")
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stderr
    assert not leftover.exists()


def test_of_two_set_ups_at_once_one_waits(shell: Shell, tmp_path: Path) -> None:
    both = "(rlflow_setup run) & (sleep 0.2; rlflow_setup run) & wait"
    done = shell(both, FAKE_SECONDS="2")
    assert done.returncode == 0
    assert "waiting for it" in done.stderr
    assert sum("-m venv" in line for line in (tmp_path / "log").read_text().splitlines()) == 1


def test_a_directory_that_is_no_environment_is_left_alone(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").touch()
    done = shell("rlflow_setup run")
    assert done.returncode == 2
    assert "not a virtual environment" in done.stderr
    assert (tmp_path / "venv" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("system", "machine", "hint"),
    [("Darwin", "arm64", "macOS"), ("Linux", "aarch64", "aarch64"), ("MSYS_NT", "x86_64", "WSL2")],
)
def test_other_platforms_get_a_clear_message(
    shell: Shell, system: str, machine: str, hint: str
) -> None:
    fake = f"uname() {{ case $1 in -s) echo {system} ;; -m) echo {machine} ;; esac; }}; rlflow_setup run"
    done = shell(fake)
    assert done.returncode == 2
    assert hint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_no_python_gets_a_clear_message(shell: Shell) -> None:
    done = shell("rlflow_setup run", RLFLOW_BASE_PYTHON="no-such-python")
    assert done.returncode == 2
    assert "Python >= 3.11" in done.stderr


def test_an_active_environment_that_has_everything_is_used_as_it_is(tmp_path: Path) -> None:
    """Needs the environment of this test run, which has everything unless the repository is only on PYTHONPATH."""
    active = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
    }
    program = f'. "{ROOT}/recipes/common.sh"; RLFLOW_ROOT=$1; rlflow_use_active run; echo "$RLFLOW_PYTHON"'
    done = subprocess.run(
        ["bash", "-c", program, "-", str(tmp_path)],
        env=active,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == str(Path(sys.executable).parent / "python"), done.stderr


def test_help_needs_no_python() -> None:
    for script in ("run_train.sh", "run_eval.sh"):
        done = subprocess.run(
            ["bash", ROOT / "recipes" / "searchr1" / script, "--help"],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0
        assert "Examples" in done.stdout


@pytest.mark.parametrize("recipe", ["searchr1", "asearcher"])
def test_the_program_of_a_warm_up_starts(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script's last line, with this interpreter, from where the script has gone."""
    last = (ROOT / "recipes" / recipe / "warm_up.sh").read_text().splitlines()[-1]
    assert last.startswith("exec ")
    command = ["env", "RLFLOW_PYTHON=echo", "bash", "-c", last, "-", "--help"]
    option, module, *words = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(module, run_name="__main__")
    assert option == "-m" and "--save-every" in capsys.readouterr().out


def test_an_export_is_evaluated_with_the_configuration_of_its_run(
    shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "run" / "export").mkdir(parents=True)
    script = f"bash {ROOT}/recipes/searchr1/run_eval.sh"
    for place, config in (
        ("run/export", ""),
        ("elsewhere", f"--config {ROOT}/recipes/searchr1/config/demo.yaml "),
    ):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / "run" / "config.yaml").touch()
        shell(f"{script} --model {tmp_path}/{place} --samples=2 a.b=c")
        expected = f"-m rlflow eval --samples=2 {config}--model {tmp_path}/{place} a.b=c"
        assert (tmp_path / "log").read_text().splitlines()[-1] == expected


@pytest.mark.parametrize(
    "script, given, meant",
    [("run_train", "--shrot", "--short"), ("run_train", "--resum", "--resume"), ("run_eval", "--ouput", "--out"),
     ("run_eval", "--quick", "")],
)  # fmt: skip
def test_an_option_that_is_none_is_refused_with_the_help_that_lists_it(
    script: str, given: str, meant: str
) -> None:
    path = ROOT / "recipes" / "searchr1" / f"{script}.sh"
    options = ["--model", "m"] if script == "run_eval" else []
    done = subprocess.run(
        ["bash", path, *options, given],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"unknown option '{given}'" in done.stderr and f"bash {path} --help" in done.stderr
    assert (f"Did you mean '{meant}'?" in done.stderr) is bool(meant), done.stderr
    shown = subprocess.run(
        ["bash", path, "--help"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    ).stdout
    assert not meant or meant in shown


def test_a_name_on_the_hub_reaches_the_commands_as_it_is(shell: Shell, tmp_path: Path) -> None:
    shell(f"bash {ROOT}/recipes/searchr1/run_train.sh --model Someone/Tiny-1B --dry-run")
    assert "--model Someone/Tiny-1B --dry-run" in (tmp_path / "log").read_text().splitlines()[-1]
    shell(f"bash {ROOT}/recipes/searchr1/run_eval.sh --model Someone/Tiny-1B")
    assert (
        (tmp_path / "log")
        .read_text()
        .splitlines()[-1]
        .endswith("demo.yaml --model Someone/Tiny-1B")
    )
    shell(f"bash {ROOT}/recipes/searchr1/run_eval.sh --server http://localhost:8000/v1")
    assert (
        "-m rlflow eval --server=http://localhost:8000/v1 --config"
        in (tmp_path / "log").read_text().splitlines()[-1]
    )
