"""Models and configurations that a command is given: the directory behind a run or a checkpoint;
of a stranger's configuration only the keys listed here, with plain values.

config.origin, beside config.yaml, holds its HMAC under a key of the user's
(~/.local/state/rlflow/origin.key, or below XDG_STATE_HOME). What was downloaded cannot have it,
whatever else is in it, and whoever owns the file."""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from rlflow.components import ENVIRONMENT
from rlflow.config.loading import to_dict
from rlflow.config.schema import AlgorithmSection, ModelSection, RunConfig, load_config
from rlflow.config.yaml_text import read_yaml
from rlflow.errors import ConfigError, ConversionError
from rlflow.models.adapter import adapter_base
from rlflow.models.hub import is_hub_name, local_model
from rlflow.models.huggingface import is_adapter, refuse_adapter
from rlflow.run.directory import RunDirectory
from rlflow.run.places import project_folder
from rlflow.storage.files import holding, leaves, write_text

logger = logging.getLogger(__name__)

ORIGIN = "config.origin"
KEY_BYTES = 32
MOST_NAMED, LONGEST_NAMED = 40, 160
USED = ("model", "data", "environment", "rollout")
"""The sections that matter to an evaluation: each key that is left out is named."""
HARMLESS = (
    *("model.dtype", "data.val_split", "data.max_prompt_tokens", "rollout.max_turns"),
    *(
        "rollout.max_response_tokens",
        "rollout.max_total_tokens",
        "rollout.max_observation_tokens",
    ),
    *("rollout.temperature", "rollout.chat_template", "rollout.history"),
)
"""Taken from a stranger's configuration, beside `Environment.harmless_options`."""
TEMPLATE_OPTION = "rollout.chat_template_options."
"""In front of an option of the chat template, which is taken too."""


def mark_own(config: Path) -> None:
    """Notes that this user made the configuration, where a key can be kept."""
    key = _key(create=True)
    if key:
        write_text(config.with_name(ORIGIN), _digest(key, config) + "\n")


def is_own(config: Path) -> bool:
    """Whether `mark_own` noted this configuration, as it is now, for this user."""
    key = _key(create=False)
    try:
        noted = config.with_name(ORIGIN).read_bytes().strip()
    except OSError:
        return False
    return key is not None and hmac.compare_digest(noted, _digest(key, config).encode())


def trusted(config: Path) -> Path | dict[str, Any]:
    """The file, where this user made it; else its harmless keys, and a warning with the others.

    Raises ConfigError for a file that is no configuration."""
    if is_own(config):
        return config
    content = read_yaml(config, aliases=False)
    if isinstance(content.get("environment"), str):
        content["environment"] = {"name": content["environment"]}
    keys = {*HARMLESS, *_environment_keys(content.get("environment"))}
    taken: dict[str, Any] = {}
    left: list[str] = []
    defaults = dict(leaves(to_dict(RunConfig())))
    for key, value in leaves(content):
        section, _, rest = key.partition(".")
        option = key.removeprefix(TEMPLATE_OPTION)
        if key in keys and _is_harmless(value):
            taken.setdefault(section, {})[rest] = value
        elif option != key and option.isidentifier() and _is_harmless(value):
            options = taken.setdefault(section, {}).setdefault("chat_template_options", {})
            options[option] = value
        elif key != "model.path" and not (key in defaults and defaults[key] == value):
            left.append(f"{key} = {value}" if section in USED else section)
    if left:
        named = [re.sub(r"[^ -~]", "?", name)[:LONGEST_NAMED] for name in dict.fromkeys(left)]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        logger.warning(
            "%s was not made by you on this machine; left out: %s. Give what you trust as "
            "section.key=value, --env NAME or --config FILE, or take it all, with the code, files "
            "and addresses that it names: --allow-code",
            config,
            ", ".join(named[:MOST_NAMED]) + more,
        )
    return taken


def starting_model(config: Path, option: str) -> str:
    """The model that a run started from. Raises ConfigError for another user's run."""
    if not is_own(config):
        advice = f"name the model that the run started from: {option} DIR"
        raise ConfigError(f"{config} was not made by you on this machine; {advice}.")
    named = load_config(config).model.path
    folder = project_folder(config)
    beside = Path(folder, named) if folder else Path(named)
    return str(beside) if beside.is_dir() else named


def _environment_keys(component: Any) -> list[str]:
    """The harmless keys of an installed environment; of another one not even the name."""
    name = component.get("name") if isinstance(component, dict) else None
    if name not in ENVIRONMENT.names():
        return []
    options = getattr(ENVIRONMENT.resolve(str(name)), "harmless_options", ())
    return [f"environment.{key}" for key in ("name", *options)]


def _is_harmless(value: Any) -> bool:
    """Whether a value is a number, true, false, nothing or one word: no code, path or address."""
    if isinstance(value, str):
        return value.isidentifier()
    return value is None or isinstance(value, int | float)


def _digest(key: bytes, config: Path) -> str:
    return hmac.new(key, config.read_bytes(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """The user's key; None where there is none, or it is not this user's alone."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home directory is known
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        file = Path(state, "rlflow", "origin.key")
        if create and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for_us = functools.partial(os.open, mode=0o600)
            with suppress(FileExistsError):  # another run of this user was faster
                with open(file, "xb", opener=for_us) as out:
                    out.write(secrets.token_bytes(KEY_BYTES))
        key, owner = file.read_bytes(), file.stat()
        if len(key) == KEY_BYTES and owner.st_uid == os.getuid() and not owner.st_mode & 0o077:
            return key
    return None


CONVERTERS = "rlflow.converters"


class Converter(Protocol):
    """An entry point of the group `rlflow.converters`: an object or a module."""

    def check(self, checkpoint: Path) -> None:
        """Raises ConversionError for a checkpoint of a format that it does not read."""

    def convert(
        self, checkpoint: Path, out: Path, reference: Path, say: Callable[[str], None]
    ) -> None:
        """Makes or updates the HuggingFace directory `out`, with config and tokenizer of
        `reference`. Raises ConversionError."""


@dataclass(frozen=True)
class ModelDirectory:
    """A HuggingFace directory at `path`. name: of its results. config: of the run it is from.
    adapter: a LoRA adapter's folder, over its weights."""

    path: Path
    name: str
    config: Path | None
    adapter: Path | None = None


def fetch_models(
    model: ModelSection, algorithm: AlgorithmSection, weights: bool = True
) -> list[str]:
    """Replaces the hub names of policy and teacher by directories; fetches what is not cached.

    weights: False fetches the small files alone, and returns a line per file that is missing.
    Raises ModelError."""
    policy = local_model(model.path, weights, code=model.trust_remote_code)
    model.path, notes = policy.path, policy.notes
    teacher = algorithm.teacher
    if teacher.get("name") == "model" and isinstance(teacher.get("path"), str):
        found = local_model(teacher["path"], weights, key="algorithm.teacher.path")
        algorithm.teacher = {**teacher, "path": found.path}
        notes = [*notes, *found.notes]
    return notes


@contextmanager
def model_directory(
    given: str | Path,
    reference: str | Path | None,
    say: Callable[[str], None],
    adapters: bool = False,
) -> Iterator[ModelDirectory]:
    """A HuggingFace directory as it is; a checkpoint, or a run's newest, after conversion.

    The converted one stays beside the checkpoint as `<name>.hf` and serves again while checkpoint
    and reference are the same; where that place cannot be written, it is temporary. reference: the
    directory with config and tokenizer; None: the model that the run started from. adapters: a LoRA
    adapter's folder is over its base, which is the reference, else the one that it names.

    Raises ConfigError where there is no model, reference or converter, ModelError for a LoRA
    adapter that is not asked for, ConversionError for a checkpoint that cannot be converted."""
    path = Path(local_model(str(given), key="--model").path)
    if not path.is_dir():
        expected = "a model directory, a run, a checkpoint, or a name on the hub"
        raise ConfigError(f"--model {path}: no such directory; expected {expected}.")
    beside = path.resolve().parent / "config.yaml"
    if adapters and is_adapter(path):
        base = Path(reference or adapter_base(path))
        name = path.resolve().parent.name if path.resolve().name == "adapter" else path.name
        yield ModelDirectory(base, name, beside if beside.is_file() else None, path.resolve())
        return
    refuse_adapter(path)
    if (path / "config.json").is_file():
        whole = path.resolve()
        name = whole.parent.name if whole.name == "export" else whole.name
        if is_hub_name(str(given)):  # the directory is called after the commit
            name = str(given).partition("@")[0].rpartition("/")[2]
        with holding(path):
            yield ModelDirectory(path, name, beside if beside.is_file() else None)
        return
    checkpoint, run = _checkpoint(path)
    if checkpoint is None:  # a run that was only exported
        yield ModelDirectory(path / "export", path.resolve().name, path / "config.yaml")
        return
    # First: for a directory that is no checkpoint a reference would not help
    converter = _converter(checkpoint)
    model = _reference(checkpoint, run, reference)
    name = checkpoint.name if run is None else f"{run.resolve().name}-{checkpoint.name}"
    config = run / "config.yaml" if run else None
    out = checkpoint.with_name(checkpoint.name + ".hf")
    with ExitStack() as stack:
        stack.enter_context(holding(checkpoint))  # a run that goes on removes it later
        if not os.access(out.parent, os.W_OK):
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlflow-"))
            out = Path(place, out.name)
        converter.convert(checkpoint, out, model, say)
        yield ModelDirectory(out, name, config)


def _checkpoint(path: Path) -> tuple[Path | None, Path | None]:
    """(checkpoint, run directory) of a run, a step of a run, or a checkpoint of another program."""
    if (path / "config.yaml").is_file():
        newest = RunDirectory.open(path).saved.latest()
        if newest is None and not (path / "export" / "config.json").is_file():
            raise ConfigError(f"--model {path}: this run has no checkpoint and no export yet.")
        return (newest[1] if newest else None), path
    step = path.resolve()
    step = step.parent if step.name == "trainer" else step
    run = step.parent.parent
    of_run = step.parent.name == "checkpoints" and (run / "config.yaml").is_file()
    return step, run if of_run else None


def _converter(checkpoint: Path) -> Converter:
    """The first installed converter that reads the checkpoint. Raises the first one's refusal."""
    refusals: list[ConversionError] = []
    for entry in metadata.entry_points(group=CONVERTERS):
        converter: Converter = entry.load()
        try:
            converter.check(checkpoint)
        except ConversionError as error:
            refusals.append(error)
        else:
            return converter
    if refusals:
        raise refusals[0]
    raise ConfigError(
        f"--model {checkpoint}: no config.json, and no installed package converts checkpoints "
        f"(entry points '{CONVERTERS}'); install one, or name a HuggingFace model directory."
    )


def _reference(checkpoint: Path, run: Path | None, given: str | Path | None) -> Path:
    """The directory with config and tokenizer for a checkpoint."""
    if given is not None:
        named, key, where = str(given), "--hf", "--hf"
    elif run is not None:
        named, key = starting_model(run / "config.yaml", "--hf"), "model.path"
        where = f"model.path of {run}/config.yaml"
    else:
        raise ConfigError(
            f"--model {checkpoint}: a Megatron checkpoint has no config.json and no tokenizer; "
            "pass --hf with the model directory that the training started from."
        )
    found = Path(local_model(named, weights=False, key=key).path)
    if not (found / "config.json").is_file():
        told = f"{found} is no model directory (no config.json); pass --hf with one"
        raise ConfigError(f"{where}: {told}.")
    return found
