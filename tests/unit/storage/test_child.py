"""Child processes: told of in one line, ended as a whole, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlflow.errors import ConfigError
from rlflow.storage.child import Child, last_said, start_answering
from tests.waiting import until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
ROOT = Path(__file__).resolve().parents[3]
SLEEP = "import time; time.sleep(60)"
# Starts a child of its own, says its number, and does what the argument says.
FAMILY = """
import signal, subprocess, sys, time
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(own.pid, flush=True)
if "fails" in sys.argv:
    print("ValueError: no such model", flush=True)
    print("bye", flush=True)
    sys.exit(3)
time.sleep(60)
"""


def child_of(tmp_path: Path, code: str, *arguments: str) -> Child:
    command = [sys.executable, "-c", code, *arguments]
    return Child("a.key: the server", command, tmp_path / "log", error=ConfigError)


def first_number(child: Child) -> int | None:
    said = child.log.read_text().split()
    return int(said[0]) if said else None


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("how", ["willing", "stubborn"])
def test_a_stopped_child_and_what_it_started_are_gone(tmp_path: Path, how: str) -> None:
    child = child_of(tmp_path, FAMILY, how)
    grandchild = child.wait_until(lambda: first_number(child), 20, "start_s")
    begun = time.monotonic()
    child.stop(0.5 if how == "stubborn" else 10)
    assert child.ended.result(0) == -(signal.SIGKILL if how == "stubborn" else signal.SIGTERM)
    assert time.monotonic() - begun < 5
    until(lambda: gone(child.pid) and gone(grandchild), 5)
    child.stop()


def test_a_child_that_is_forgotten_ends(tmp_path: Path) -> None:
    child = child_of(tmp_path, SLEEP)
    pid, ended = child.pid, child.ended
    del child
    assert ended.result(5) == -signal.SIGTERM and gone(pid)


def test_a_child_that_ends_by_itself_is_named_with_its_error_and_takes_its_own_along(
    tmp_path: Path,
) -> None:
    child = child_of(tmp_path, FAMILY, "fails")
    told = r"^a\.key: the server ended with code 3: ValueError: no such model \(its log: .*log\)$"
    with pytest.raises(ConfigError, match=told):
        child.wait_until(lambda: None, 20, "start_s")
    grandchild = first_number(child)
    assert grandchild is not None
    until(lambda: gone(grandchild), 5)


def test_a_child_that_is_killed_says_so(tmp_path: Path) -> None:
    child = child_of(tmp_path, SLEEP)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"was killed by SIGKILL; was memory used up\?: it said"):
        child.wait_until(lambda: None, 20, "start_s")


def test_a_child_that_is_not_ready_in_time_is_named_with_the_option_and_its_state(
    tmp_path: Path,
) -> None:
    child = child_of(tmp_path, SLEEP)
    with pytest.raises(
        ConfigError, match=r"the server is not ready after 0\.1 s \(start_s\): loading\.$"
    ):
        child.wait_until(lambda: None, 0.1, "start_s", lambda: "loading")
    child.stop()


def test_a_program_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^a: /no/program cannot be started \(No such file"):
        Child("a", ["/no/program"], tmp_path / "log", error=ConfigError)


OWNER = """
import os, sys, time
from pathlib import Path
from rlflow.storage import child
child.GRACE_S = 0.3
code, log, fork = sys.argv[1:]
kept = child.Child("a", [sys.executable, "-c", code, "stubborn"], Path(log))
if fork == "forked" and os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print(kept.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("fork", ["alone", "forked"])
def test_a_child_and_its_own_end_when_their_owner_is_killed(tmp_path: Path, fork: str) -> None:
    """Also where a process that was forked from the owner holds all its pipes open."""
    log = tmp_path / "log"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, FAMILY, str(log), fork],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    grandchild = until(lambda: log.read_text() and int(log.read_text()))
    forked = [one for one in psutil.Process(owner.pid).children() if one.cmdline()[2:3] == [OWNER]]
    owner.kill()
    owner.wait()
    until(lambda: gone(child) and gone(grandchild), 10)
    for one in forked:
        one.kill()
    assert len(forked) == (fork == "forked")


GUARDED = """
import os, subprocess, sys, time
from rlflow.storage import child
child.GRACE_S = 0.3
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
os.environ["MARK"] = mine = sys.argv[1]  # the guard starts with it too; of this test alone
ours = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
ours.stdout.readline()
other = subprocess.Popen(sleep, env={**os.environ, "MARK": mine + " too"})
kept = child.Guard("MARK=" + mine)
del os.environ["MARK"]
if "closed" in sys.argv:
    kept.close()
print(ours.pid, other.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["open", "closed"])
def test_a_guard_ends_those_with_its_mark_alone_unless_it_is_closed(how: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", GUARDED, how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    ours, other = map(int, owner.stdout.readline().split())
    owner.kill()
    owner.wait()
    if how == "open":
        until(lambda: gone(ours), 10)
    else:
        time.sleep(1.5)
    assert not gone(other) and gone(ours) == (how == "open")
    for pid in (ours, other):
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_one_that_answers_has_the_packages_of_this_process_and_none_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of PYTHONPATH and of `pip install --user`; why it ended is told."""
    script, packages, here = (tmp_path / name for name in ("script", "packages", "here"))
    for folder, name in ((packages, "mine"), (here, "other")):
        folder.mkdir()
        (folder / f"{name}.py").touch()
    script.write_text("import mine\nprint(flush=True)\nimport other\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.chdir(here)
    with start_answering(str(script)) as process:
        assert process.wait(20) == 1 and process.stdout and process.stdout.read() == b"\n"
        assert last_said(process) == "ModuleNotFoundError: No module named 'other'"
