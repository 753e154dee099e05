"""Hostile programs in the sandbox, as root and as a user: none leaves it, none outlives it, none holds up its neighbours."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow_environments.sandbox import Confines, Limits, Sandbox
from tests.unit.environments.sandbox.hostile import LIMITS, PROGRAMS, Hostile, play

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = Path(__file__).parent / "hostile.py"
NOBODY = 65534
needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)
BY_NAME = {hostile.name: hostile for hostile in PROGRAMS}
FAST = [
    "fork bomb of bash",
    "memory",
    "the secret",
    "network",
    "a daemon",
    "writes outside",
    "kills its parent",
]
GREEDY = [
    "fork bomb",
    "threads",
    "memory",
    "memory of ten processes",
    "disk",
    "files",
    "a gigabyte of output",
    "all processors",
]


@pytest.fixture(scope="module")
def outside() -> Iterator[tuple[Path, int]]:
    """(a file that only its owner may read, the port of somebody who answers): what programs are after."""
    folder = Path(tempfile.mkdtemp(prefix="rlflow-hostile-"))
    secret = folder / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0rlflow-{server.getsockname()[1]}")
        local.listen()
        folder.chmod(0o755)
        yield secret, server.getsockname()[1]
    shutil.rmtree(folder)


def as_somebody(uid: int | None) -> tuple[list[str], dict[str, str]]:
    """(how to call this project's Python as somebody, with which variables). Skips the test where that cannot be."""
    if uid is None:
        return [sys.executable], {**os.environ, "PYTHONPATH": str(ROOT)}
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or python is None or shutil.which("setpriv") is None:
        pytest.skip("only root becomes another user, by setpriv, with the system's Python")
    packages = Path(tempfile.mkdtemp(prefix="rlflow-packages-"))
    packages.chmod(0o755)
    for name, folder in (("rlflow", "rlflow"), ("rlflow_environments", "environments")):
        (packages / name).symlink_to(ROOT / folder)
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", python]
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [*words, "-c", "import rlflow_environments.sandbox"]
    tried = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"another user cannot read this checkout: {tried.stderr.splitlines()[-1]}")
    return words, variables


@pytest.fixture(scope="module", params=[None, NOBODY], ids=["own user", "nobody"])
def played(request: pytest.FixtureRequest, outside: tuple[Path, int]) -> dict[str, dict[str, Any]]:
    words, variables = as_somebody(request.param)
    secret, port = outside
    done = subprocess.run(
        [*words, str(SCRIPT), str(secret), str(port)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


def check(hostile: Hostile, found: dict[str, Any]) -> None:
    assert "LEFT" not in found["output"], found
    assert hostile.says in found["output"] and found["limit"] in hostile.limit.split(" or "), found
    assert hostile.code is None or found["code"] == hostile.code, found
    # Nothing is left but the first process, and who asks: bash and its pipe of two
    assert (
        "it has ended" in found["usable"] if hostile.limit == "files" else int(found["usable"]) <= 4
    ), found
    most_s = (
        LIMITS.timeout_s
        if hostile.limit in ("time", "cpu or time", "files")
        or hostile.name.startswith("a gigabyte")
        else 2.0
    )
    assert found["duration_s"] <= most_s + 0.5, found


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_hostile_program_gets_nothing_and_leaves_nothing(
    name: str, played: dict[str, dict[str, Any]], outside: tuple[Path, int]
) -> None:
    check(BY_NAME[name], played[name])
    assert outside[0].read_text() == "secret"


@needs_bubblewrap
@pytest.mark.parametrize("name", FAST)
def test_the_worst_of_them(name: str, outside: tuple[Path, int]) -> None:
    given = f"SECRET, PORT = {str(outside[0])!r}, {outside[1]}"
    check(BY_NAME[name], asyncio.run(play(BY_NAME[name], Confines(LIMITS), given)))


@pytest.mark.parametrize(
    "name", ["the secret", "network", "other processes", "its own environment"]
)
def test_unconfined_they_get_it(
    name: str, outside: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the programs above can fail. (Not the environment: that is not handed on without confinement either. That of the
    first process is readable where it is the same user's, as in a container.)"""
    monkeypatch.setenv("HOSTILE_SECRET", "secret")
    given = f"SECRET, PORT = {str(outside[0])!r}, {outside[1]}"
    found = asyncio.run(play(BY_NAME[name], Confines(LIMITS, "none"), given))
    if name == "its own environment":
        assert found["output"].startswith("nothing\n"), found
    else:
        assert "LEFT" in found["output"], found


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_neighbour_is_never_held_up_for_two_seconds(outside: tuple[Path, int]) -> None:
    """An episode that starts a small program over and over, beside each of those that take all they can."""

    async def beside(hostile: Hostile) -> tuple[float, list[float]]:
        async with Sandbox(Confines(Limits(timeout_s=60.0))) as box:
            alone = [(await box.run(["true"])).duration_s for _ in range(20)]
            other = asyncio.create_task(play(hostile, Confines(LIMITS), "SECRET = PORT = None"))
            waits = []
            while not other.done():
                began = time.monotonic()
                await box.run(["true"])
                waits.append(time.monotonic() - began)
            await other
        return statistics.median(alone), waits

    for name in GREEDY:
        alone, waits = asyncio.run(beside(BY_NAME[name]))
        assert max(waits) <= 2.0, (name, alone, max(waits))
        beside_it = (
            f"{1e3 * statistics.median(waits):.1f} ms (at most {1e3 * max(waits):.0f}) beside it"
        )
        print(f"{name}: {1e3 * alone:.1f} ms alone, {beside_it}")
