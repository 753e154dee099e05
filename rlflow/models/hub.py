"""A model by its name on the HuggingFace hub: fetched into huggingface_hub's cache, only the files
that are needed."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.errors import ModelError
from rlflow.models.huggingface import COPIED_FILES, INDEX_FILE, weight_files

HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?")
"""OWNER/NAME, or OWNER/NAME@REVISION: a branch, a tag or a commit."""
SMALL_FILES = ("config.json", INDEX_FILE, *COPIED_FILES, "*.jinja")


@dataclass(frozen=True)
class LocalModel:
    """path: the model's directory. notes: what is still to be fetched."""

    path: str
    notes: list[str] = field(default_factory=list)


def is_hub_name(given: str) -> bool:
    """Whether a text has the form of a name on the hub and is no path of this machine."""
    return HUB_NAME.fullmatch(given) is not None and not Path(given).exists()


def local_model(
    given: str, weights: bool = True, code: bool = False, key: str = "model.path"
) -> LocalModel:
    """The directory of a model that is given as one, or by its name on the hub:
    Qwen/Qwen2.5-3B-Instruct, Qwen/...@REVISION.

    What is not in the cache is fetched, with a progress bar: config, tokenizer, and with `weights`
    the safetensors files that the index lists; with `code` its Python files. HF_HOME, HF_ENDPOINT
    (a mirror), HF_TOKEN and HF_HUB_OFFLINE (the cache alone) count. Any other text is handed back
    as it is. key: what gave it, for messages. Raises ModelError."""
    match = HUB_NAME.fullmatch(given)
    if match is None or Path(given).exists():
        return LocalModel(given)
    name, revision = match["name"], match["revision"]
    folder = _fetched(key, name, revision, [*SMALL_FILES, *(["*.py"] if code else [])])
    wanted = weight_files(folder)
    # The commit of the first call: a push between the two calls must not mix two models.
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing and weights:
        folder = _fetched(key, name, folder.name, missing)
        missing = [file for file in wanted if not (folder / file).is_file()]
        if missing:
            raise ModelError(
                f"{key}: {name} has no {missing[0]}: only models with safetensors weights can be "
                "read."
            )
    notes = (
        [
            f"{key}: {len(missing)} weight file(s) of {name} are not in the cache yet; the run "
            "fetches them"
        ]
        if missing
        else []
    )
    return LocalModel(str(folder), notes)


def _fetched(key: str, name: str, revision: str | None, files: list[str]) -> Path:
    """The model's folder in the cache. Raises ModelError in one line, with the ways out."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as problem:
        gated = isinstance(problem, errors.GatedRepoError)
        why = (
            "asks for an agreement first"
            if gated
            else "does not have it, or shows it to some accounts only"
        )
        raise ModelError(
            f"{key}: {name}: no directory of that name here, and {constants.ENDPOINT} {why}; "
            "correct the name, or set HF_TOKEN to a token of an account that may read it."
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(
            f"{key}: {name}: {constants.ENDPOINT} has the model, but not this revision of it."
        ) from None
    except transport_errors() as problem:
        offline = bool(constants.HF_HUB_OFFLINE)
        reason = (
            "HF_HUB_OFFLINE is set"
            if offline
            else " ".join(str(problem).split())[:200] or type(problem).__name__
        )
        raise ModelError(
            f"{key}: {name}: no directory of that name here, not whole in the cache "
            f"{constants.HF_HUB_CACHE}, and {constants.ENDPOINT} was not reached ({reason}). "
            "Either give a directory with config.json, *.safetensors and the tokenizer (--model "
            "DIR), or let the hub be found: a network or a mirror (HF_ENDPOINT=https://...), or "
            "a cache that was filled elsewhere (HF_HOME=..., HF_HUB_OFFLINE=1)."
        ) from None


def transport_errors() -> tuple[type[BaseException], ...]:
    """What a transfer ends with. The errors of huggingface_hub's HTTP library, which changes
    between its versions, share no base with OSError; ValueError: a name that is none."""
    found: list[type[BaseException]] = [OSError, ValueError]
    for package in ("httpx", "httpx2"):
        try:
            found.append(importlib.import_module(package).HTTPError)
        except ImportError:
            continue
    return tuple(found)
