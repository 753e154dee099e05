"""Task folders of Harbor (Terminal-Bench 2), read: instruction, times, and what their Dockerfile
lays out, as far as no image is needed for it.

A folder is a download: whatever it names is followed to where it lies, and must lie in the folder.

Source: harbor 0.25, `models/task/config.py`, `models/task/paths.py`, `verifier/verifier.py`."""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlflow.errors import DataError

PLAIN = ("ubuntu", "debian", "python", "buildpack-deps", "scratch")
"""Base images for which this machine's system stands in."""
SAYING_NOTHING = ("LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "SHELL", "USER")
INSTALLS = re.compile(
    r"\b(apt|apt-get|apk|yum|dnf|pip|pip3|uv|uvx|pipx|npm|conda|curl|wget|git clone)\b"
)
CLOSED = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "proc", "dev", "run", "sys", "box")
TESTS, LOGS = "/tests", "/logs"
NEEDS = {
    "docker_image": "an image (docker_image)",
    "gpus": "GPUs",
    "mcp_servers": "MCP servers",
    "healthcheck": "a service (healthcheck)",
}
"""Key of [environment] -> what it asks for."""
NEEDING = {
    "docker-compose.yaml": "services",
    "docker-compose.yml": "services",
    ".dockerignore": "an image (.dockerignore)",
    "Dockerfile.dockerignore": "an image (.dockerignore)",
}
"""File -> what it asks for."""
ROOTS = ("/tmp", "/opt", "/srv", "/home", "/root", "/mnt", "/media", "/var")


Files = list[tuple[Path, str]]
"""(path in the task's folder, path in the sandbox)."""
Layer = tuple[str, str, Files]
"""(where it stands, shell script, files)."""


@dataclass
class TaskFolder:
    """What a folder asks for. layers: in the order of the Dockerfile. agent_s, tests_s: limits."""

    name: str
    path: Path
    instruction: str
    agent_s: float
    tests_s: float
    workdir: str = "/app"
    layers: list[Layer] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    tests_variables: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> Files:
        return [file for _, _, files in self.layers for file in files]

    @property
    def places(self) -> tuple[str, ...]:
        """The outermost folders that must be writable."""
        tops = {str(Path("/", *Path(name).parts[1:2])) for _, name in self.files}
        tops |= {str(Path("/", *Path(self.workdir).parts[1:2])), TESTS, LOGS, "/app"}
        return tuple(sorted(tops - {"/", "/tmp"}))


def read_folders(path: str, installed: bool, own_tests: bool) -> list[TaskFolder]:
    """The folders with a task.toml at or below a path. installed: lines of a Dockerfile that
    install something are left out. own_tests: tests/test.sh decides. Raises DataError."""
    root = Path(path).expanduser()
    found = sorted(_within(file.parent, root) for file in root.rglob("task.toml"))
    if not found:
        old = (
            " (task.yaml is Terminal-Bench 1: harbor task migrate)"
            if any(root.rglob("task.yaml"))
            else ""
        )
        raise DataError(f"{root}: expected folders with a task.toml, found none{old}.")
    return [_read(folder, installed, own_tests) for folder in found]


def packed(files: Files) -> bytes:
    """An archive of the files under their paths in the sandbox."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file, name in files:
            archive.add(file, name.lstrip("/"), recursive=False)
    return buffer.getvalue()


def files_below(folder: Path, target: str) -> Files:
    """Every file below a folder, with its path below the target. Raises DataError for a link that
    leads out of the folder, whose own place is not looked at."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    start = target.rstrip("/")
    return [
        (_within(path, folder), f"{start}/{path.relative_to(folder).as_posix()}") for path in paths
    ]


def files_of_tests(task: TaskFolder) -> Files:
    """The files of its tests. Raises DataError."""
    return files_below(_within(task.path / "tests", task.path), TESTS)


def _within(path: Path, root: Path) -> Path:
    """Where a path lies, links followed. Raises DataError where that is not below the root."""
    place = path.resolve()
    if not place.is_relative_to(root.resolve()):
        raise DataError(f"{path}: expected a file of the task, found a link out of it.")
    return place


def entering(workdir: str, variables: dict[str, str]) -> str:
    """How a shell's script begins that runs there."""
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in variables.items())
    return f"{exports}cd {shlex.quote(workdir)}\n"


def _read(folder: Path, installed: bool, own_tests: bool) -> TaskFolder:
    toml, instruction = folder / "task.toml", folder / "instruction.md"
    try:
        config = tomllib.loads(_within(toml, folder).read_text(encoding="utf-8"))
        text = _within(instruction, folder).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise DataError(f"{folder}: expected a task of Harbor: {problem}.") from None
    agent, tests, world = (
        _table(config, name, toml) for name in ("agent", "verifier", "environment")
    )
    system = str(world.get("os", "linux")).lower()
    apart = tests.get("environment") or tests.get("environment_mode") == "separate"
    allowed = world.get("network_mode") == "allowlist"
    asked = {
        "several steps": config.get("steps"),
        **{what: world.get(key) for key, what in NEEDS.items()},
        "another system (os)": system != "linux",
        "tests in an image": apart,
        "a network (network_mode)": allowed,
    }
    for what in filter(asked.get, asked):
        raise _needs(toml, what)
    task = TaskFolder(
        folder.name, folder, text, _seconds(agent, 900.0, toml), _seconds(tests, 600.0, toml)
    )
    task.variables = _plain_variables(world, toml)
    task.tests_variables = _plain_variables(tests, toml)
    for name, what in NEEDING.items():
        if (folder / "environment" / name).exists():
            raise _needs(folder / "environment" / name, what)
    _lay_out(task, installed)
    task.workdir = str(world.get("workdir") or task.workdir)
    if own_tests:
        _check_tests(_within(folder / "tests" / "test.sh", folder))
    for name in (task.workdir, *(name for _, name in task.files)):
        if PurePosixPath(name).parts[1:2] and PurePosixPath(name).parts[1] in CLOSED:
            raise _needs(folder / "environment" / "Dockerfile", f"an image ({name})")
    return task


def _lay_out(task: TaskFolder, installed: bool) -> None:
    """Reads environment/Dockerfile; without one, the folder's files are in the working folder."""
    context = _within(task.path / "environment", task.path)
    file = _within(task.path / "environment" / "Dockerfile", context)
    if not file.exists():
        if context.is_dir():
            task.layers = [(str(context), "true", files_below(context, task.workdir))]
        return
    stages, task.workdir = 0, "/"
    arguments: dict[str, str] = {}  # of the build: the policy does not see them
    for number, kind, rest in _instructions(file.read_text(encoding="utf-8", errors="replace")):
        where = f"{file}:{number}"
        if kind == "FROM":
            words = [word for word in rest.split() if not word.startswith("--")]
            if not words:
                raise DataError(f"{where}: expected the image that FROM names, found {rest!r}.")
            base = words[0].rpartition("/")[2].partition(":")[0].partition("@")[0]
            stages += 1
            if stages > 1 or base not in PLAIN:
                raise _needs(where, f"an image ({rest})")
        elif kind == "WORKDIR" and "$" not in rest:
            task.workdir = str(PurePosixPath(task.workdir, rest.strip('"')))
        elif kind == "ENV":
            task.variables |= _assignments(kind, rest, where)
        elif kind == "ARG":
            arguments |= _assignments(kind, rest, where)
        elif kind in ("COPY", "ADD"):
            task.layers += _copied(kind, rest, context, task, where)
        elif kind == "RUN" and not INSTALLS.search(rest):
            rest = re.sub(r"^(--\S+\s+)+", "", rest)
            script = shlex.join(_words(rest, where)) if rest.startswith("[") else rest
            entered = entering(task.workdir, {**arguments, **task.variables})
            made = f"mkdir -p {shlex.quote(task.workdir)}\n"
            task.layers.append((where, made + entered + script, []))
        elif kind == "RUN" and not installed:
            raise _needs(where, f"an image ({rest[:60]}); installed=true says that it is here")
        elif kind not in ("RUN", *SAYING_NOTHING):
            raise _needs(where, f"an image ({kind} {rest[:60]})")


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, instruction, the rest) of a Dockerfile."""
    said, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        first = first if said else number
        said += line
        if said.rstrip().endswith("\\"):
            said = said.rstrip()[:-1] + " "
            continue
        kind, _, rest = said.strip().partition(" ")
        yield first, kind.upper(), rest.strip()
        said = ""


def _words(rest: str, where: str) -> list[str]:
    """The words of an instruction, in either form. Raises DataError."""
    try:
        return [*map(str, json.loads(rest))] if rest.startswith("[") else shlex.split(rest)
    except ValueError as problem:
        raise DataError(f"{where}: {rest[:60]}: {problem}.") from None


def _copied(kind: str, rest: str, context: Path, task: TaskFolder, where: str) -> list[Layer]:
    words = _words(rest, where)
    flags = [word for word in words if word.startswith("--")]
    if any("://" in word or "$" in word for word in words) or any(
        flag.partition("=")[0] not in ("--chown", "--chmod", "--link") for flag in flags
    ):
        raise _needs(where, f"an image ({rest})")
    *sources, target = [word for word in words if word not in flags]
    into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    target = str(PurePosixPath(task.workdir, target))
    into = into or target in _there(task)
    found: Files = []
    for source in sources:
        paths = [context] if source in (".", "./") else sorted(context.glob(source.lstrip("/")))
        if not paths:
            raise DataError(f"{where}: {source}: expected a file below {context}, found none.")
        for path in (path.resolve() for path in paths):
            if not path.is_relative_to(context):
                raise DataError(f"{where}: {source}: expected a file of the task, found {path}.")
            if path.is_dir():
                found += files_below(path, target)
            elif kind == "ADD" and tarfile.is_tarfile(path):
                raise _needs(where, f"an image ({kind} {rest}: an archive)")
            else:
                found.append((path, f"{target}/{path.name}" if into or len(paths) > 1 else target))
    for _, name in found:
        if PurePosixPath(name).parent == PurePosixPath("/"):
            raise _needs(where, f"a file in / ({name})")
    files = [
        (path, name) for path, name in found if path.name != "Dockerfile" or path.parent != context
    ]
    named = shlex.join(name for _, name in files)
    modes = [flag.partition("=")[2] for flag in flags if flag.startswith("--chmod")]
    changes = [(where, f"chmod {shlex.quote(mode)} {named}", []) for mode in modes if named]
    return [(where, "true", files), *changes]


def _there(task: TaskFolder) -> set[str]:
    """Folders that are known to exist where the next file is copied."""
    below = [task.workdir, *(str(PurePosixPath(name).parent) for _, name in task.files)]
    parents = {str(parent) for name in below for parent in PurePosixPath(name).parents}
    return {*below, *parents, *ROOTS, TESTS, LOGS, "/app"}


def _assignments(kind: str, rest: str, where: str) -> dict[str, str]:
    words = _words(rest, where)
    if "$" in rest:
        raise _needs(where, f"an image ({kind} {rest})")
    if kind == "ENV" and words and "=" not in words[0]:
        return {words[0]: rest.partition(" ")[2]}
    pairs = [word.partition("=") for word in words]
    return {name: value for name, given, value in pairs if given}


def _check_tests(script: Path) -> None:
    if not script.is_file():
        raise DataError(f"{script}: expected the tests of the task, found nothing.")
    for number, line in enumerate(
        script.read_text(encoding="utf-8", errors="replace").splitlines(), 1
    ):
        if INSTALLS.search(line.partition("#")[0]):
            told = f"an image or a network ({line.strip()[:60]}); tests=COMMAND runs what is here"
            raise _needs(f"{script}:{number}", told)


def _table(config: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise DataError(f"{file}: [{name}]: expected a table, found {table!r}.")
    return table


def _seconds(table: dict[str, Any], default: float, file: Path) -> float:
    value = table.get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise DataError(f"{file}: timeout_sec: expected seconds, found {value!r}.")
    return float(value)


def _plain_variables(table: dict[str, Any], file: Path) -> dict[str, str]:
    found = table.get("env", {})
    if not isinstance(found, dict) or any("${" in str(text) for text in found.values()):
        raise _needs(file, "variables of yours (env)")
    return {str(name): str(text) for name, text in found.items()}


def _needs(where: Path | str, what: str) -> DataError:
    return DataError(f"{where}: the task needs {what}, which the sandbox does not have.")
