"""Every error that rlflow raises on purpose, and the suggestions and commands that they carry."""

from __future__ import annotations

import difflib
import enum
import functools
import json
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rlflow.texts import one_line

T = TypeVar("T")


class RLFlowError(Exception):
    """A problem that the user can fix. The text says what, where, expected, found and how to fix
    it, in one line."""

    exit_code: int = 2
    """What a command ends with."""


class ConfigError(RLFlowError):
    """A configuration value is missing, misspelled, of the wrong type, or contradicts another."""

    option: str | None = None
    """The option of a component whose value is wrong."""


class DataError(RLFlowError):
    """A data file is missing or holds rows that cannot be read."""


class ModelError(RLFlowError):
    """A model directory cannot be loaded: unknown family, missing file, shapes that do not fit the
    layout."""


class CheckpointError(RLFlowError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, or its content is not what was written; an earlier
    checkpoint may be whole."""


class StorageError(RLFlowError):
    """Something cannot be written, because the disk is full for one; what was complete before is
    untouched."""


class DirectoryLostError(StorageError):
    """A run's directory is gone, or another process has taken it over: this one writes nothing
    more."""


class ExitCode(enum.IntEnum):
    """Exit codes of checkpoint conversion, so that scripts can tell the problems apart; 2 is any
    other RLFlowError."""

    MISSING = 3  # a file of the checkpoint is not there
    DAMAGED = 4  # truncated or corrupt; a verification that failed
    OTHER_LAYOUT = 5  # a size that was asserted is another in the checkpoint, or its parts disagree
    UNKNOWN_MODEL = 6  # a model family or a tensor that has no mapping
    OTHER_MODEL = 7  # checkpoint and config.json disagree
    DISK_FULL = 8
    OUTPUT_EXISTS = 9
    UNSUPPORTED = 10  # a format that is not read, or no weights in it
    HOSTILE = 11  # a pickle that names what could run code


class ConversionError(CheckpointError):
    """A checkpoint cannot be converted or a conversion does not verify; `exit_code` says which kind
    of problem."""

    def __init__(self, text: str, exit_code: ExitCode) -> None:
        super().__init__(text)
        self.exit_code = int(exit_code)


class EnvironmentContractError(RLFlowError):
    """An environment broke the contract of `rlflow.Environment`, or what it said cannot be
    tokenized exactly."""


class PolicyError(RLFlowError):
    """What the policy wrote cannot be carried out or scored. Raised by `step` or `overflow` of an
    environment, it ends the episode as a wrong one, which counts in every mean; any other error is
    one of infrastructure: that episode is left out, and counted as aborted.

    reward, metrics, rewards: of this last step, what a wrong answer has; a score that the episode
    has not reported is 0."""

    def __init__(
        self,
        text: str,
        reward: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(text)
        self.reward = reward
        self.metrics = dict(metrics or {})
        self.rewards = dict(rewards or {})


class RolloutError(RLFlowError):
    """Too many episodes were aborted, or an engine failed."""


class MissingPackageError(RLFlowError):
    """An optional package is needed for what was asked."""


def closest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The closest known word, or None where none is as alike as `likeness` of 1. Of equally close
    ones it is that with the same letters: gpro is grpo."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=likeness)
    close.sort(key=lambda known_word: sorted(known_word) != sorted(word))
    return close[0] if close else None


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Returns `" Did you mean 'x'?"` for the `closest` known word, or `""` without one."""
    meant = closest(word, known, likeness)
    return f" Did you mean '{meant}'?" if meant is not None else ""


def described(error: BaseException) -> str:
    """`Type: text` in one line, whatever the text of others' errors holds or does: its length is
    bounded, and it has no control characters."""
    try:
        text = one_line(str(error))
    except Exception:  # noqa: BLE001 -- an error whose __str__ raises
        text = ""
    return f"{type(error).__name__}: {text or 'no reason given'}"


def raised_at(error: BaseException, *besides: str) -> str:
    """`file:line in function`, of the innermost frame outside of Python, rlflow and the folders
    `besides`, other packages last; "" without one."""
    ours, pythons = os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep
    for source in filter(None, (error, error.__cause__)):
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(source.__traceback__)]
        frames = [
            place
            for place in frames
            if not place[0].co_filename.startswith((ours, "<frozen", *besides))
        ]
        packages = [place for place in frames if "site-packages" in place[0].co_filename]
        own = [
            place
            for place in frames
            if place not in packages and not place[0].co_filename.startswith(pythons)
        ]
        for code, line in (own or packages)[-1:]:
            return f"{code.co_filename}:{line} in {code.co_name}"
    return ""


class Problems(list[RLFlowError]):
    """What is wrong, all of it: what is tried goes on after each problem."""

    def attempt(self, action: Callable[..., T], *arguments: Any, **keywords: Any) -> T | None:
        """What the action returns; None where it raised an RLFlowError, which is noted, each text
        once."""
        try:
            return action(*arguments, **keywords)
        except RLFlowError as problem:
            self.note(problem)
            return None

    def note(self, *problems: RLFlowError) -> None:
        """Adds those whose text is not there yet."""
        for problem in problems:
            if str(problem) not in map(str, self):
                self.append(problem)


@contextmanager
def needing(where: str, command: str) -> Iterator[None]:
    """An import within that fails becomes a MissingPackageError: `where` asked for the package,
    `command` installs it."""
    try:
        yield
    except ImportError as problem:
        raise MissingPackageError(
            f"{where}: the package '{problem.name or problem}' is not installed: {command}"
        ) from None


def install_command(extra: str = "") -> str:
    """`pip install 'SOURCE[extra]'` with the source that this rlflow comes from: its checkout, else
    the URL it was installed from. Never the bare name: in the public package index it belongs to
    another project. For `gpu` with what Transformer Engine needs to be built (docs/gpu.md)."""
    checkout = Path(__file__).resolve().parents[1]
    wanted = f"[{extra}]" if extra else ""
    pip = BUILDING if extra == "gpu" else "pip install"
    if not (checkout / "setup.py").is_file():
        return f"{pip} 'rlflow{wanted} @ {_installed_from()}'"
    versions = f" -c '{checkout}/constraints/gpu.txt'" if extra == "gpu" else ""
    return f"{pip} -e '{checkout}{wanted}'{versions}"


def imports_triton() -> bool:
    """Whether the installed megatron-core imports triton: from 0.18 on it does, without declaring
    it, and CPU builds of torch do not bring it."""
    try:
        major, minor = metadata.version("megatron-core").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (0, 18)


BUILDING = (
    "pip install 'cuda-toolkit[crt,cccl]' setuptools wheel ninja && "
    "NVTE_BUILD_USE_NVIDIA_WHEELS=1 pip install --no-build-isolation"
)
"""Installs what is compiled against the installed torch and the headers of its CUDA wheels."""


def _installed_from() -> str:
    """What pip noted of the installation (PEP 610); a placeholder where it came from an index or by
    hand."""
    try:
        noted = json.loads(metadata.distribution("rlflow").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        noted = {}
    control = noted.get("vcs_info", {}).get("vcs", "")
    return f"{control}+{noted['url']}" if control else noted.get("url", "PATH_OR_GIT_URL")


CALLED_IN = "RLFLOW_CALLED_IN"
"""Environment variable with the directory of a shell whose script changed it before it called
rlflow."""
COMMAND_PLUG_INS = "rlflow.commands"
"""Entry-point group of commands beside those of the core."""
_COMMANDS = "train|serve|eval|merge|config|doctor"


def command(name: str = "rlflow") -> str:
    """What the user's shell calls a script of this installation: its bare name where the shell
    finds it, else its path."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return f"{command('python')} -m {name}" if name != "python" else shlex.quote(sys.executable)
    found = shutil.which(name)
    if found is not None and Path(found).samefile(beside):
        spelled = name
    else:
        shortest = min(str(beside), os.path.relpath(beside), key=len)
        spelled = shlex.quote(shortest if os.sep in shortest else f"./{shortest}")
    shell = os.environ.get(CALLED_IN)
    return (
        spelled if shell in (None, os.getcwd()) else f"cd {shlex.quote(os.getcwd())} && {spelled}"
    )


def as_called(text: str) -> str:
    """The text with its commands (`rlflow show RUN`, `pip install x`) as they can be pasted into
    the user's shell."""
    return _printed_command().sub(lambda found: command(found[0]), text)


@functools.cache
def _printed_command() -> re.Pattern[str]:
    names = "|".join(
        [_COMMANDS, *(entry.name for entry in metadata.entry_points(group=COMMAND_PLUG_INS))]
    )
    return re.compile(
        rf"(?<![\w/.'-])(?:pip(?= install )|python(?= -[cm] )|rlflow(?= (?:{names})\b))"
    )
