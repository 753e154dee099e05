"""Jobs of `rlflow doctor` for the environments that need more than the core: packages, and programs
of the system. Imports nothing heavy."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial

from rlflow.commands.doctor import Job
from rlflow.errors import described, install_command
from rlflow_environments.browser.chromium import PROGRAMS

ANSWER_S = 10.0


def missing_program(name: str, *programs: str) -> list[str]:
    """The name, where none of the programs is on PATH."""
    return [] if any(map(shutil.which, programs)) else [name]


def missing_sandbox() -> list[str]:
    """What keeps bubblewrap from starting a program: it is not there, or the kernel forbids it."""
    program = shutil.which("bwrap")
    if program is None:
        return ["bubblewrap"]
    try:
        subprocess.run(
            [program, "--ro-bind", "/", "/", "--unshare-pid", "true"],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())[:120]
        return [f"bubblewrap starts nothing here ({said or error.returncode})"]
    except (OSError, subprocess.SubprocessError) as error:
        return [f"bubblewrap starts nothing here ({described(error)[:120]})"]
    return []


JOBS = (
    Job("agents of one's own", ("starlette", "uvicorn", "openai"), install_command("agents")),
    Job("sandbox for programs", (), "apt-get install bubblewrap", lacking=missing_sandbox),
    Job(
        "browser tasks",
        ("miniwob",),
        f"apt-get install chromium; {install_command('miniwob')}",
        lacking=partial(missing_program, "chromium", *PROGRAMS),
    ),
    Job("NetHack", ("nle",), install_command("nethack")),
    Job("mathematics", ("math-verify",), install_command("mathematics")),
)
