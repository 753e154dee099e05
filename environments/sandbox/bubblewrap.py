"""The command that starts a sandbox: bubblewrap's, or none.

A user's programs run in a user namespace, as that user alone. Those of root run without one, as a
user of which there is no other process: the kernel holds root to no number of processes, and files
that only root may read stay closed."""

from __future__ import annotations

import inspect
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlflow.errors import ConfigError, PolicyError, RLFlowError, did_you_mean
from rlflow_environments.sandbox.limits import Limits

Confinement = Literal["bubblewrap", "none"]
FOLDER = "/box"
"""The one writable folder of a confined program."""
HERE = Path(__file__).parent
CHECKING = "checking"
"""Folder with what Python in a check begins with."""
OWN = (Path(inspect.getfile(RLFlowError)).parent, HERE.parent)
"""Which no program finds among its packages: who can make a task again has its answer."""
UIDS = range(1_900_000_000, 2_100_000_000)  # given to nobody (systemd: UIDS-GIDS.md)
SPACES = ("ipc", "pid", "uts", "cgroup-try", "net")
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class SandboxError(RLFlowError):
    """A sandbox cannot be started, or ended by no fault of its programs."""


class SandboxKilledError(PolicyError):
    """A program without confinement ended its sandbox."""


@dataclass(frozen=True)
class Confines:
    """What surrounds programs. readable: folders and files that they may read, beside the system's
    and this interpreter's. places: further writable folders, as programs of an image expect them;
    bubblewrap alone has them."""

    limits: Limits = field(default_factory=Limits)
    confinement: Confinement = "bubblewrap"
    readable: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def make_confines(
    limits: Mapping[str, Any] | None, defaults: Limits, confinement: Confinement = "bubblewrap"
) -> Confines:
    """Those of an environment's options. limits: in place of the defaults. Raises ConfigError,
    SandboxError where bubblewrap is missing."""
    known = asdict(defaults)
    for name in limits or ():
        if name not in known:
            told = f"no limit '{name}'; expected {', '.join(known)}.{did_you_mean(name, known)}"
            raise ConfigError(f"environment.limits: {told}")
    confines = Confines(replace(defaults, **(limits or {})), confinement)
    command(confines, FOLDER, -1)
    return confines


def command(confines: Confines, folder: str, filter_fd: int) -> list[str]:
    """What starts the supervisor. folder: where programs run. filter_fd: of the system calls.

    Raises SandboxError where bubblewrap is missing."""
    root = os.geteuid() == 0
    confined = confines.confinement == "bubblewrap"
    uid = UIDS.start + secrets.randbelow(len(UIDS)) if root and confined else None
    settings = {
        "limits": asdict(confines.limits),
        "confined": confined,
        "folder": folder,
        "places": confines.places if confined else (),
        "uid": uid,
    }
    own = [sys.executable, "-I", "-S", "-B"]
    if not confined:
        return [*own, str(HERE / "supervisor.py"), json.dumps(settings)]
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "sandbox: bubblewrap is missing (no bwrap on PATH): apt-get install bubblewrap, 0.8 or "
            "newer. confinement=none runs programs without it, with all your rights."
        )
    words = [program, *(f"--unshare-{name}" for name in SPACES)]
    if root:
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    words += ["--seccomp", str(filter_fd)] if filter_fd >= 0 else []
    words += _file_system(confines)
    return [*words, "--", *own, "/run/supervisor.py", json.dumps(settings)]


def variables(confines: Confines, folder: str) -> dict[str, str]:
    """The environment of programs: nothing of this process's."""
    path = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    threads = str(max(1, round(confines.limits.cpus)))
    return {
        "PATH": os.pathsep.join(path),
        "HOME": folder,
        "TMPDIR": f"{folder}/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        **dict.fromkeys(THREADS, threads),
    }


def _file_system(confines: Confines) -> list[str]:
    """Mounts: the system and Python read-only, and two small file systems in memory."""
    space = ["--perms", "1777", "--size", str(confines.limits.disk_mb << 20), "--tmpfs"]
    words = ["--proc", "/proc", "--dev", "/dev", *space, "/dev/shm", *space, FOLDER]
    words += _parents(confines.places)
    for place in confines.places:
        words += [*space, place]
    words += ["--perms", "1777", "--dir", f"{FOLDER}/tmp", "--symlink", f"{FOLDER[1:]}/tmp", "/tmp"]
    words += ["--ro-bind", "/usr", "/usr"]
    for path in (Path("/", name) for name in SYSTEM):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    folders = _outermost([*_python_folders(), *confines.readable])
    words += _parents(["/etc/x", "/run/x", *folders])
    for name in SETTINGS:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for folder in folders:
        words += ["--ro-bind", folder, folder]
    for name in ("supervisor.py", "kept.py", CHECKING):
        words += ["--ro-bind", str(HERE / name), f"/run/{name}"]
    for folder in ("/usr", *folders):
        for package in (one for one in OWN if one.is_relative_to(folder)):
            words += ["--tmpfs", str(package), "--remount-ro", str(package)]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]


def _parents(paths: Sequence[str]) -> list[str]:
    """The folders above them, which bubblewrap would make for root alone."""
    above = {str(parent) for path in paths for parent in Path(path).parents} - {"/"}
    return [word for folder in sorted(above) for word in ("--perms", "0755", "--dir", folder)]


def _python_folders() -> list[str]:
    """Those of this interpreter and of the packages that it finds."""
    home = Path(os.path.realpath(sys.executable)).parents[1]
    packages = [path for path in sys.path if path.endswith("-packages")]
    return [sys.prefix, sys.base_prefix, str(home), *packages]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Absolute, each once, without those within another one or the system's."""
    found: list[Path] = [Path("/usr")]
    for path in sorted({Path(os.path.abspath(path)) for path in paths}):
        if path.exists() and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [str(path) for path in found[1:]]
