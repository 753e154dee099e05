"""Programs in a sandbox: results, limits, files, cells, and that none of it outlives its block. With and without confinement."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from rlflow.errors import ConfigError, PolicyError
from rlflow_environments.sandbox import (
    Confines,
    Limits,
    ProgramResult,
    Sandbox,
    SandboxError,
    SandboxKilledError,
    bubblewrap,
    make_confines,
)
from rlflow_environments.sandbox.bubblewrap import Confinement, _outermost
from rlflow_environments.sandbox.system_calls import (
    ALLOW,
    DENIED,
    NOT_PERMITTED,
    NOT_THERE,
    system_call_filter,
)
from tests.waiting import until

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)
SMALL = Limits(timeout_s=20.0, memory_mb=256, disk_mb=16, output_bytes=1_000)


@pytest.fixture(params=[pytest.param("bubblewrap", marks=needs_bubblewrap), "none"])
def kind(request: pytest.FixtureRequest) -> Confinement:
    found: Confinement = request.param
    return found


def within(
    kind: Confinement, play: Callable[[Sandbox], Awaitable[None]], limits: Limits = SMALL
) -> None:
    async def run() -> None:
        async with Sandbox(Confines(limits, kind)) as box:
            await play(box)

    asyncio.run(asyncio.wait_for(run(), 60.0))


def running(mark: str) -> bool:
    return subprocess.run(["pgrep", "-f", mark], capture_output=True, timeout=30).returncode == 0


def test_a_program_reads_writes_and_ends(kind: Confinement) -> None:
    async def play(box: Sandbox) -> None:
        result = await box.python(
            "import sys; print(sys.stdin.read()[::-1]); print('aside', file=sys.stderr)", "hello"
        )
        assert (result.code, result.stdout, result.stderr, result.limit) == (
            0,
            "olleh\n",
            "aside\n",
            "",
        )
        assert result.succeeded and 0 < result.duration_s < 20 and result.told() == "olleh\naside\n"
        failed = await box.python("1 / 0")
        assert failed.code == 1 and failed.told().endswith(
            "ZeroDivisionError: division by zero\n[exit code 1]\n"
        )
        assert (await box.run(["no-such-program"])).code == 127
        assert (await box.bash("kill -9 $$")).code == -9

    within(kind, play)


@needs_bubblewrap
def test_the_library_is_not_among_a_programs_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it lies there where it was not installed from its sources in place: it can make the hidden half of a task again."""
    folder = next(
        path
        for path in sys.path
        if path.endswith("site-packages") and (Path(path) / "yaml").is_dir()
    )
    monkeypatch.setattr(bubblewrap, "OWN", (*bubblewrap.OWN, Path(folder) / "yaml"))

    async def play(box: Sandbox) -> None:
        found = "import importlib.util as i; print([i.find_spec(n + '.__init__') is not None for n in ('numpy', 'yaml')])"
        result = await box.python(found)
        assert result.stdout == "[True, False]\n", result.told()
        assert (await box.python("import rlflow_environments.sandboxed.tables")).code == 1
        assert (await box.bash(f"touch {folder}/yaml/mine")).code == 1

    within("bubblewrap", play)


def test_files_stay_and_processes_do_not(kind: Confinement) -> None:
    async def play(box: Sandbox) -> None:
        await box.write("folder/data.txt", "kept")
        started = await box.bash("(setsid sleep 987 &) ; sleep 986 & cat folder/data.txt")
        assert started.stdout == "kept" and started.duration_s < 10
        assert not running("sleep 98[67]")
        assert await box.read("folder/data.txt") == "kept"
        with pytest.raises(FileNotFoundError, match="No such file"):
            await box.read("nothing")

    within(kind, play)


def test_names_stay_from_cell_to_cell_until_a_limit(kind: Confinement) -> None:
    async def play(box: Sandbox) -> None:
        first = await box.cell("import os\nx = 20\nx + 1")
        assert (first.code, first.stdout) == (0, "21\n")
        raised = await box.cell("print(x)\nraise ValueError('no')")
        assert (
            raised.code == 1
            and raised.stdout == "20\n"
            and raised.stderr.endswith("ValueError: no\n")
        )
        assert "kept.py" not in raised.stderr
        assert (await box.cell("x * 2")).stdout == "40\n"
        assert (await box.cell("while True: pass", timeout_s=0.3)).limit == "time"
        assert "NameError" in (await box.cell("x")).stderr
        assert (await box.cell("os = __import__('os'); os._exit(3)")).code == 3
        assert (await box.cell("1 + 1")).stdout == "2\n"

    within(kind, play)


def test_a_cell_is_the_main_module_of_a_program_of_its_own(kind: Confinement) -> None:
    async def play(box: Sandbox) -> None:
        pooled = "from multiprocessing import Pool\ndef twice(x): return 2 * x\nwith Pool(2) as pool: print(pool.map(twice, [2]))"
        assert (await box.cell(pooled)).stdout == "[4]\n"
        assert (
            await box.cell("def f(x: int): pass\nf.__annotations__")
        ).stdout == "{'x': <class 'int'>}\n"
        assert (
            await box.cell("import os\nchild = os.fork()\nif child: os.waitpid(child, 0)")
        ).code == 0
        assert (await box.cell("print('second')")).stdout == "second\n"

    within(kind, play)


def test_nothing_grows_or_computes_between_two_cells(kind: Confinement) -> None:
    burn = """import threading, time
def burn():
    while True: pass
threading.Thread(target=burn, daemon=True).start()
before = time.process_time()"""

    async def play(box: Sandbox) -> None:
        await box.cell(burn)
        await asyncio.sleep(0.6)
        assert (await box.cell("time.process_time() - before < 0.2")).stdout == "True\n"
        large = await box.cell("large = bytes([1]) * (300 << 20)")
        assert large.limit == "memory"  # at the end of the cell too

    within(kind, play)


def test_a_long_output_keeps_its_beginning_and_its_end(kind: Confinement) -> None:
    async def play(box: Sandbox) -> None:
        result = await box.python("print('first'); print('x' * 5_000_000); print('last')")
        assert result.stdout.startswith("first\nxxx") and result.stdout.endswith("xxx\nlast\n")
        assert (
            result.left_out == 5_000_012 - 1_000
            and f"[{result.left_out} bytes left out]" in result.stdout
        )
        assert len(result.told(100)) < 200

    within(kind, play)


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("import time; time.sleep(60)", "time"),
        ("kept = [bytes([1]) * (1 << 20) for _ in range(400)]", "memory"),
        (
            "import os, time\nfor _ in range(6):\n    try: os.fork()\n    except OSError: pass\ntime.sleep(60)",
            "processes",
        ),
    ],
)
def test_a_limit_ends_a_program_and_says_so(kind: Confinement, program: str, limit: str) -> None:
    async def play(box: Sandbox) -> None:
        began = time.monotonic()
        result = await box.python(program, timeout_s=1.0 if limit == "time" else 20.0)
        assert (result.code, result.limit) == (-9, limit) and result.ending.startswith(
            "killed: it "
        )
        assert time.monotonic() - began < 15
        assert (await box.python("print('usable')")).stdout == "usable\n"

    within(kind, play, Limits(timeout_s=20, memory_mb=256, disk_mb=16, processes=16))


def test_a_cancelled_call_ends_the_program(kind: Confinement) -> None:
    async def play() -> None:
        box = Sandbox(Confines(SMALL, kind))
        await box.open()
        call = asyncio.create_task(box.run(["sleep", "985"]))
        while not running("sleep 98[5]"):
            await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        until(lambda: not running("sleep 98[5]"), 5.0)
        assert box.ended
        with pytest.raises(SandboxError, match="it has ended"):
            await box.run(["true"])
        await box.close()

    asyncio.run(play())


def test_programs_end_with_who_started_them(kind: Confinement, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio\nfrom rlflow_environments.sandbox import *\n"
        "async def main():\n"
        f"    async with Sandbox(Confines(Limits(timeout_s=60), {kind!r})) as box:\n"
        "        await box.run(['sleep', '984'])\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, str(script)])
    try:
        until(lambda: running("sleep 98[4]"), 30.0)
    finally:
        owner.kill()
        owner.wait()
    until(lambda: not running("sleep 98[4]"), 5.0)


def test_many_at_once(kind: Confinement) -> None:
    async def one(number: int) -> str:
        async with Sandbox(Confines(SMALL, kind)) as box:
            return (await box.run(["cat"], str(number))).stdout

    async def play() -> list[str]:
        return await asyncio.gather(*map(one, range(16)))

    assert asyncio.run(play()) == [str(number) for number in range(16)]


@needs_bubblewrap
def test_a_confined_program_has_its_packages_and_nothing_of_ours() -> None:
    async def play(box: Sandbox) -> None:
        found = await box.python(
            "import numpy, os\nprint(numpy.arange(3).sum(), min(os.environ), os.getcwd())\nprint(*os.listdir('/'))"
        )
        told, folders = found.stdout.splitlines()
        assert told == "3 HOME /box", found
        own = {Path(path).parts[1] for path in sys.path if path}
        assert not {"root", "home", "var", "work", "mnt", "srv"} & set(folders.split()) - own

    within("bubblewrap", play, Limits(timeout_s=60))


def test_without_bubblewrap_one_line_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    async def play() -> None:
        async with Sandbox():
            pass

    with pytest.raises(
        SandboxError, match=r"apt-get install bubblewrap.*confinement=none"
    ) as raised:
        asyncio.run(play())
    assert "\n" not in str(raised.value)


def test_a_bubblewrap_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def play() -> None:
        async with Sandbox():
            pass

    with pytest.raises(
        SandboxError, match="did not start: bwrap: No permissions to create new namespace"
    ):
        asyncio.run(play())


def test_limits_are_named_and_positive() -> None:
    with pytest.raises(ConfigError, match=r"environment\.limits: no limit 'memory'.*memory_mb"):
        make_confines({"memory": 3}, SMALL)
    with pytest.raises(ConfigError, match=r"limits\.timeout_s: expected a number above 0, found 0"):
        Limits(timeout_s=0)
    with pytest.raises(ConfigError, match=r"less than half of memory_mb \(100\)"):
        Limits(memory_mb=100)
    assert (
        ProgramResult(-9, "", "", 2.0, "time", limits=Limits(timeout_s=2)).told()
        == "[killed: it ran longer than 2 s]\n"
    )


def test_folders_within_others_are_mounted_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    paths = [
        str(tmp_path / "a" / "b"),
        str(tmp_path / "a"),
        str(tmp_path / "a"),
        "/usr/lib",
        str(tmp_path / "none"),
    ]
    assert _outermost(paths) == [str(tmp_path / "a")]


def decision(number: int, first: int = 0, architecture: int = 0xC000003E, third: int = 0) -> int:
    """What the filter answers: its instructions (linux/filter.h) followed by hand."""
    data = {0: number, 4: architecture, 16: first, 32: third}
    program, place, held = system_call_filter(), 0, 0
    while True:
        code = int.from_bytes(program[place : place + 2], "little")
        operand = int.from_bytes(program[place + 4 : place + 8], "little")
        if code == 0x06:
            return operand
        if code == 0x20:
            held, jump = data[operand], 0
        else:
            true = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[code]
            jump = program[place + 2] if true else program[place + 3]
        place += 8 * (1 + jump)


def test_the_filter_refuses_what_it_lists_and_nothing_else() -> None:
    numbers = {int(call.split()[1]) for call in DENIED.split(",")}
    assert {101, 165, 272, 319, 425} <= numbers
    special = {41, 53, 56, 302, 435}
    assert all(decision(number) == NOT_PERMITTED for number in numbers)
    assert all(decision(number) == ALLOW for number in set(range(450)) - numbers - special)
    assert decision(435) == NOT_THERE
    assert (decision(56, 0x11), decision(56, 0x10000011)) == (ALLOW, NOT_PERMITTED)
    assert (decision(302, 0), decision(302, 1)) == (ALLOW, NOT_PERMITTED)
    assert (
        decision(0x40000000 + 101) == NOT_PERMITTED
        and decision(0, architecture=0x40000003) == 0x80000000
    )


def test_sockets_are_of_listed_families_alone() -> None:
    """Local, IPv4, IPv6 and the list of interfaces: not VSOCK (40), by which a virtual machine reaches its host,
    nor any other that a kernel may have."""
    refused = 0x50000 | errno.EAFNOSUPPORT
    for call in (41, 53):
        allowed = {family for family in range(1 << 10) if decision(call, family) == ALLOW}
        assert allowed == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
        assert decision(call, socket.AF_VSOCK) == decision(call, socket.AF_ALG) == refused
        assert decision(call, socket.AF_NETLINK, third=socket.NETLINK_CRYPTO) == refused
        assert decision(call, 0xFFFFFFFF) == refused


@needs_bubblewrap
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is of x86-64")
def test_a_confined_program_opens_no_other_socket() -> None:
    opened = """import socket
for family in range(64):
    try: socket.socket(family, socket.SOCK_STREAM).close()
    except OSError: continue
    print(family)
print(socket.if_nameindex())"""

    async def play(box: Sandbox) -> None:
        result = await box.python(opened)
        assert result.stdout == "1\n2\n10\n[(1, 'lo')]\n", result.told()

    within("bubblewrap", play)


def test_a_cell_that_closes_its_descriptors_does_not_make_the_supervisor_spin(
    kind: Confinement,
) -> None:
    """It goes on to sleep between its looks: a process that waits for a processor says nothing about that."""

    async def play(box: Sandbox) -> None:
        assert (await box.cell("import os, time\n1 + 1")).stdout == "2\n"
        assert box._process is not None
        main = psutil.Process(box._process.pid)
        supervisor = main.children()[0] if kind == "bubblewrap" else main
        before = supervisor.num_ctx_switches().voluntary
        await box.cell("os.closerange(0, 256)\ntime.sleep(60)", timeout_s=0.7)
        assert supervisor.num_ctx_switches().voluntary - before > 5, "14 looks in 0.7 s"
        assert (await box.cell("1 + 1")).stdout == "2\n"

    within(kind, play)


TURNS = {
    "a module in the folder": "echo 'load = lambda file: 42' > json.py; touch x.json",
    "a user's site": "folder=~/.local/lib/python{version}/site-packages; mkdir -p $folder; "
    "echo 'import json; json.load = lambda file: 42' > $folder/usercustomize.py; touch x.json",
    "a plug-in of a package": "mkdir evil-1.0.dist-info; touch x.json; "
    "echo 'import json; json.load = lambda file: 42' > evil.py; "
    "printf 'Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n' > evil-1.0.dist-info/METADATA; "
    "printf '[checks]\nevil = evil\n' > evil-1.0.dist-info/entry_points.txt",
    "a program of that name": "mkdir -p ~/.local/bin ~/bin; for n in ~/bin ~/.local/bin .; do "
    "printf '#!/bin/sh\nexit 0\n' > $n/python3; chmod +x $n/python3; done; "
    "for n in ~/.bashrc ~/.profile ~/.bash_profile; do echo 'export PATH=~/bin:$PATH' > $n; done",
    "settings": "printf '[alias]\ncheck = !true\n' > ~/.gitconfig; printf 'exit 0' > ~/.bash_login",
    "a link for the script": "rm script.sh; echo 'exit 0' > mine; chmod 444 mine; ln -s mine script.sh",
    "a folder for the script": "rm script.sh; mkdir script.sh",
    "a daemon": "(setsid sh -c 'while true; do echo exit 0 > script.sh; done' >/dev/null 2>&1 &)",
}
"""What a policy leaves behind so that a check passes without the work."""
CHECK = """test ! -e ~/.gitconfig -a ! -e ~/.bash_login && python3 -c '
import importlib.metadata, json
for one in importlib.metadata.entry_points(group="checks"):
    one.load()
assert json.load(open("x.json")) == 42'
"""


@needs_bubblewrap
def test_no_file_that_is_left_behind_turns_a_check() -> None:
    """In a sandbox only: what is tried here would reach this machine's files."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"

    async def play(box: Sandbox) -> None:
        for turn, script in TURNS.items():
            assert (await box.bash(script.replace("{version}", version))).succeeded, turn
            assert not (await box.check(CHECK)).succeeded, turn
            await box.run(["sh", "-c", "rm -rf * .[a-z]*; mkdir tmp"])
        await box.write("x.json", "42")
        assert (await box.check(CHECK)).succeeded

    within("bubblewrap", play)


def test_a_file_is_not_written_through_a_link(kind: Confinement) -> None:
    """A program that leaves one would choose what the next script overwrites."""

    async def play(box: Sandbox) -> None:
        await box.bash("rm script.sh; echo kept > mine; ln -s mine script.sh; mkfifo pipe")
        assert (await box.bash("cat mine")).stdout == "kept\n"
        assert (await box.write("pipe", "text")).succeeded and await box.read("pipe") == "text"

    within(kind, play)


def test_a_check_imports_what_the_policy_wrote_where_nothing_else_has_the_name(
    kind: Confinement,
) -> None:
    async def play(box: Sandbox) -> None:
        await box.write("solution.py", "import helper\ndef f(x): return helper.twice(x)\n")
        await box.write("helper.py", "def twice(x): return 2 * x\n")
        await box.write(
            "tools/run.py", "import beside, solution\nprint(beside.name, solution.f(3))\n"
        )
        await box.write("tools/beside.py", "name = 'beside'\n")
        await box.write("x.json", "42")
        result = await box.check(
            f"python3 -c 'import solution; print(solution.f(2))'; python3 tools/run.py\n{CHECK}"
        )
        assert (result.code, result.stdout) == (0, "4\nbeside 6\n"), result.told()
        assert (await box.bash("echo $HOME $PYTHONPATH")).stdout.strip() == box._folder

    within(kind, play)


def test_an_unconfined_program_that_ends_its_sandbox_is_to_blame() -> None:
    """It has the rights to do that; a confined one has not, and there an end is none of its fault."""

    async def play() -> None:
        async with Sandbox(Confines(SMALL, "none")) as box:
            await box.python("import os, time; os.kill(os.getppid(), 9); time.sleep(20)")

    with pytest.raises(SandboxKilledError) as caught:
        asyncio.run(play())
    assert isinstance(caught.value, PolicyError)
