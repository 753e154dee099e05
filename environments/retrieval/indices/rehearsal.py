"""Whether a retriever could be made: its name and options, packages, files and servers, looked at
and not loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlflow.errors import (
    DataError,
    MissingPackageError,
    ModelError,
    Problems,
    RLFlowError,
    install_command,
)
from rlflow.http import unreachable
from rlflow_environments.retrieval.client.servers import server_url
from rlflow_environments.retrieval.corpus import Corpus, check_beginning
from rlflow_environments.retrieval.encoders.make import ENCODER, is_model
from rlflow_environments.retrieval.indices.make import RETRIEVER, brings_documents, without_corpus
from rlflow_environments.retrieval.indices.opening import check_encoder_given, open_folder
from rlflow_environments.retrieval.server.discovery import read_addresses

WHOLE_BYTES = 256 * 2**20
"""A larger corpus is looked at in its beginning only; a run reads all of it."""
PACKAGES = {
    "bm25": "bm25s",
    "dense": "faiss",
    "faiss": "faiss",
    "qdrant": "qdrant_client",
    "http": "aiohttp",
}
"""What the built-in retrievers import when they are made."""
PARTS = {"hybrid": {"bm25": "bm25", "dense": "dense"}}
"""Of a retriever that is made from others: option -> what it is called where the option does not
say it."""


def rehearse_retriever(
    component: str | Mapping[str, Any],
    corpus: str | Path | None,
    where: str = "retriever",
    *,
    alone: bool = True,
) -> list[RLFlowError]:
    """All problems that making the retriever over the corpus would meet, as far as they show
    without an index in memory.

    alone: no server of its own is started, so that the addresses that it names must answer."""
    problems = Problems()
    passages = None if corpus is None else problems.attempt(_read, corpus)
    _rehearse(component, passages, corpus is not None, where, problems)
    if not problems and alone:
        _servers(RETRIEVER.component(component, where), where, problems)
    return problems


def _rehearse(
    component: str | Mapping[str, Any],
    passages: Corpus | None,
    has_corpus: bool,
    where: str,
    problems: Problems,
) -> None:
    checked = problems.attempt(RETRIEVER.check, component, ("corpus",), where)
    if checked is None:
        return
    described = RETRIEVER.component(component, where)
    name = described["name"]
    if not has_corpus and not brings_documents(component, where):
        problems.note(without_corpus(name, where))
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        command = install_command("qdrant" if name == "qdrant" else "search")
        problems.note(
            MissingPackageError(
                f"retriever {name}: the package '{PACKAGES[name]}' is not installed: {command}"
            )
        )
    for option, part in PARTS.get(name, {}).items():
        given = described.get(option) or {}
        inner = {"name": part, **({"name": given} if isinstance(given, str) else given)}
        _rehearse(inner, passages, has_corpus, f"{where}.{option}", problems)
    if isinstance(described.get("path"), str):
        problems.attempt(_check_index, Path(described["path"]).expanduser(), passages, described)
    if described.get("encoder") is not None:
        problems.attempt(_check_encoder, described["encoder"], where)


def _read(path: str | Path) -> Corpus | None:
    """The corpus; None for one that is too large to be read for this, whose beginning is good."""
    file = Path(path).expanduser()
    if not file.is_file() or file.stat().st_size <= WHOLE_BYTES:
        return Corpus(path)
    check_beginning(file, WHOLE_BYTES)
    return None


def _check_index(path: Path, passages: Corpus | None, described: Mapping[str, Any]) -> None:
    """Raises DataError where there is no whole index of this corpus, ConfigError where it needs an
    option that is not there."""
    if path.is_file():
        check_encoder_given(path, described.get("encoder"))
        return
    if described["name"] == "qdrant" and not path.exists():
        return  # it is made from the corpus
    open_folder(path, passages)


def _check_encoder(encoder: str | Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for an unknown option, ModelError for a folder that is not there. Hub
    names are not asked for."""
    described = {"name": encoder} if isinstance(encoder, str) else dict(encoder)
    name = str(described.get("name"))
    if not is_model(name):
        ENCODER.check(described, ("passages",), f"{where}.encoder")
        return
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.count("/") != 1 or name[0] in "/.~"):
        raise ModelError(
            f"{where}.encoder: {name}: no such folder; expected that of a model, a hub name, or "
            f"{ENCODER.names()[0]}."
        )


def _servers(described: Mapping[str, Any], where: str, problems: Problems) -> None:
    """One of the servers that a retriever names must take connections."""
    given = described.get("urls") or described.get("url")
    addresses: Callable[[], list[str]] | None = None
    if given:
        addresses = partial(list, [given] if isinstance(given, str) else given)
    elif isinstance(described.get("discovery"), str):
        addresses = partial(read_addresses, described["discovery"])
    if addresses is not None:
        problems.attempt(_check_servers, addresses, where)


def _check_servers(addresses: Callable[[], list[str]], where: str) -> None:
    reasons = []
    for address in addresses():
        parts = urlsplit(server_url(address))
        port = parts.port or (443 if parts.scheme == "https" else 80)
        reason = unreachable(parts.hostname or "", port)
        if reason is None:
            return
        reasons.append(f"{parts.hostname}:{port} ({reason})")
    told = ", ".join(reasons) or "no server is listed"
    raise DataError(
        f"{where}: no retrieval server answers: {told}. Start one (rlflow search serve), or "
        "correct the address."
    )
