"""Whether this user made a run's configuration, and the code that a configuration names: files, modules, a model's own.

config.origin, beside config.yaml, holds its HMAC under a key of the user's (~/.local/state/rlflow/origin.key, or below
XDG_STATE_HOME). What was downloaded cannot have it, whatever else is in it, and whoever owns the file."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rlflow.components import names_code
from rlflow.config.loading import to_dict
from rlflow.config.schema import RunConfig, load_config
from rlflow.storage.files import leaves, write_text

ORIGIN = "config.origin"
KEY_BYTES = 32


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


def code_of_others(path: Path, config: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """{key: value} of what names code in `config`, stands in the file `path`, and was not given by an override too."""
    theirs = dict(_code(to_dict(load_config(path))))
    own: dict[str, Any] = {}
    for override in overrides:
        key, _, written = override.partition("=")
        for name, value in leaves(yaml.safe_load(written), key.strip()):
            own[name] = own[f"{name}.name"] = value
    used = dict(_code(to_dict(config)))
    return {key: value for key, value in used.items() if theirs.get(key) == value and own.get(key) != value}


def _code(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What would run when the configuration is used: references, and `trust_remote_code`."""
    for key, value in leaves(config):
        trusted = key.split(".")[-1] == "trust_remote_code" and bool(value)
        if trusted or (isinstance(value, str) and names_code(value)):
            yield key, value


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
