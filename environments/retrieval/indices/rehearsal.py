"""Looks at what a retriever would be made from, and loads nothing: name and options, packages,
files and servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
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
from rlflow.net.addresses import unreachable
from rlflow_environments.retrieval.client.servers import server_url
from rlflow_environments.retrieval.corpus import Corpus, check_beginning
from rlflow_environments.retrieval.encoders.make import ENCODER, is_model
from rlflow_environments.retrieval.indices.folder import check_encoder_given, open_folder
from rlflow_environments.retrieval.indices.make import (
    RETRIEVER,
    brings_documents,
    retriever_facts,
    without_corpus,
)
from rlflow_environments.retrieval.records import KEPT_FROM
from rlflow_environments.retrieval.server.addresses import read_addresses


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
        problems.attempt(_check_servers, RETRIEVER.component(component, where), where)
    return problems


def _read(path: str | Path) -> Corpus | None:
    """The corpus; None for one that is too large to be read for this, whose beginning is good."""
    file = Path(path).expanduser()
    if not file.is_file() or file.stat().st_size < KEPT_FROM:
        return Corpus(path)
    check_beginning(file, KEPT_FROM)
    return None


def _rehearse(
    component: str | Mapping[str, Any],
    passages: Corpus | None,
    has_corpus: bool,
    where: str,
    problems: Problems,
) -> None:
    if problems.attempt(RETRIEVER.check, component, ("corpus",), where) is None:
        return
    described = RETRIEVER.component(component, where)
    name, encoder, path = described["name"], described.get("encoder"), described.get("path")
    if not has_corpus and not brings_documents(component, where):
        problems.note(without_corpus(name, where))
    facts = retriever_facts(component, where)
    if facts.package and importlib.util.find_spec(facts.package) is None:
        command = install_command(facts.extra)
        told = f"retriever {name}: the package '{facts.package}' is not installed: {command}"
        problems.note(MissingPackageError(told))
    for option, part in facts.parts.items():
        given = described.get(option) or {}
        inner = {"name": part, **({"name": given} if isinstance(given, str) else given)}
        _rehearse(inner, passages, has_corpus, f"{where}.{option}", problems)
    if isinstance(path, str) and Path(path).expanduser().is_file():
        problems.attempt(check_encoder_given, Path(path), encoder)
    elif isinstance(path, str):
        problems.attempt(open_folder, Path(path).expanduser(), passages)
    if encoder is not None:
        problems.attempt(_check_encoder, encoder, f"{where}.encoder")


def _check_encoder(encoder: str | Mapping[str, Any], where: str) -> None:
    """Raises ConfigError for an unknown option, ModelError for a folder that is not there. Hub
    names are not asked for."""
    described = {"name": encoder} if isinstance(encoder, str) else dict(encoder)
    name = str(described.get("name"))
    if not is_model(name):
        ENCODER.check(described, ("passages",), where)
    elif not Path(name).expanduser().is_dir() and (name.count("/") != 1 or name[0] in "/.~"):
        raise ModelError(
            f"{where}: {name}: no such folder; expected that of a model, a hub name, or "
            f"{ENCODER.names()[0]}."
        )


def _check_servers(described: Mapping[str, Any], where: str) -> None:
    """Raises DataError unless one of the servers that a retriever names takes connections."""
    given, reasons = described.get("urls") or described.get("url"), []
    if not given and not isinstance(described.get("discovery"), str):
        return
    addresses = given or read_addresses(described["discovery"])
    for address in [addresses] if isinstance(addresses, str) else addresses:
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
