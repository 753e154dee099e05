"""Whether this user made a run's configuration, and what of a stranger's is used: keys that are listed here, with plain values.

config.origin, beside config.yaml, holds its HMAC under a key of the user's (~/.local/state/rlflow/origin.key, or below
XDG_STATE_HOME). What was downloaded cannot have it, whatever else is in it, and whoever owns the file."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlflow.components import ENVIRONMENT
from rlflow.config.loading import read_yaml, to_dict
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.storage.files import leaves, write_text

logger = logging.getLogger(__name__)

ORIGIN = "config.origin"
KEY_BYTES = 32
MOST_NAMED, LONGEST_NAMED = 40, 160
USED = ("model", "data", "environment", "rollout")
"""The sections whose keys matter to an evaluation: each one that is left out is named."""
_ROLLOUT = ("max_turns", "max_response_tokens", "max_total_tokens", "max_observation_tokens", "temperature", "chat_template")
HARMLESS = ("model.dtype", "data.val_split", "data.max_prompt_tokens", *(f"rollout.{key}" for key in _ROLLOUT))
"""Taken from a stranger's configuration, beside `Environment.harmless_options`."""


def mark_own(config: Path) -> None:
    """Notes that this user made the configuration. Where no key can be kept, nothing is noted: a flag is needed later."""
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
    """What of a run's configuration an evaluation may use: the file, where this user made it; else the harmless keys in it.

    The others are named in a warning. Raises ConfigError for a file that is no configuration."""
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
        if key in keys and _is_harmless(value):
            taken.setdefault(section, {})[rest] = value
        elif key != "model.path" and not (key in defaults and defaults[key] == value):
            left.append(f"{key} = {value}" if section in USED else section)
    if left:
        named = [re.sub(r"[^ -~]", "?", name)[:LONGEST_NAMED] for name in dict.fromkeys(left)]
        logger.warning(
            "%s was not made by you on this machine; left out: %s. Give what you trust as section.key=value, --env NAME or "
            "--config FILE, or take it all, with the code, files and addresses that it names: --allow-code",
            config,
            ", ".join(named[:MOST_NAMED]) + (f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""),
        )
    return taken


def starting_model(config: Path, option: str) -> str:
    """The model that a run started from. Raises ConfigError where this user did not make the run: it could be any path."""
    if not is_own(config):
        raise ConfigError(
            f"{config} was not made by you on this machine; name the model that the run started from: {option} DIR."
        )
    return load_config(config).model.path


def _environment_keys(component: Any) -> list[str]:
    """The harmless keys of an installed environment. One that is not installed has none, not even its name."""
    name = component.get("name") if isinstance(component, dict) else None
    if name not in ENVIRONMENT.names():
        return []
    options = getattr(ENVIRONMENT.resolve(str(name)), "harmless_options", ())
    return [f"environment.{key}" for key in ("name", *options)]


def _is_harmless(value: Any) -> bool:
    """Whether a value is a number, true, false, nothing, or one word: no reference to code, no path and no address."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and value.isidentifier())


def _digest(key: bytes, config: Path) -> str:
    return hmac.new(key, config.read_bytes(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """The user's key; None where there is none, or it is not this user's alone."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home directory is known
        state = os.environ.get("XDG_STATE_HOME")
        file = (Path(state) if state else Path.home() / ".local" / "state") / "rlflow" / "origin.key"
        if create and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileExistsError):  # another run of this user was faster
                with open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
                    out.write(secrets.token_bytes(KEY_BYTES))
        key, owner = file.read_bytes(), file.stat()
        if len(key) == KEY_BYTES and owner.st_uid == os.getuid() and not owner.st_mode & 0o077:
            return key
    return None
