"""Serves an index over HTTP, in the wire format that Search-R1, RLinf, ASearcher, AstraFlow, verl,
slime and SkyRL share.

  rlflow search serve --index indices/wiki --pages pages.jsonl --save-address-to addresses/
  rlflow search serve --corpus corpus.jsonl --retriever bm25 --port 0
  rlflow search serve --index_path e5_Flat.index --corpus_path wiki-18.jsonl \\
      --retriever_name e5 --retriever_model e5-base-v2

The port answers at once; GET /health tells how far loading is, GET /ready when it is done, and a
browser at / what the server is doing. SIGHUP, or POST /admin/reload with the token, loads the index
again without a gap. SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import ConfigError, install_command, needing
from rlflow.storage.memory_folders import OwnedFolder
from rlflow_environments.common.commands import add_option, log_to_stderr
from rlflow_environments.retrieval.commands.source_arguments import (
    add_source_arguments,
    read_source,
)
from rlflow_environments.retrieval.server.addresses import DiscoveryFile, bind

if TYPE_CHECKING:
    from rlflow_environments.retrieval.server.loading import ServedSource

DEFAULT_PORT = 8000
LEAST_TOKEN = 16  # characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is served, where, and how much is taken at a time; the flags of the field's servers
    under their own names."""
    served = parser.add_argument_group("what is served")
    add_source_arguments(served)
    add = partial(add_option, served)
    add("--pages --pages_path FILE", "whole pages for POST /access")
    add("--topk --top-k N", "where a request has none", 3)
    add = partial(add_option, parser.add_argument_group("where"))
    add("--host HOST", "address to bind; 0.0.0.0 for other machines", "127.0.0.1")
    add("--port PORT", "0 picks a free one", DEFAULT_PORT)
    add("--save-address-to DIR", "write Host{ip}_IP{port}.txt there while the server can answer")
    add("--admin-token FILE", "with the token of /admin/reload (default: a new one, in a new file)")
    add = partial(add_option, parser.add_argument_group("load"))
    add("--processes N", "that answer; the files of an index folder are in memory once", 1)
    add("--max-batch N", "queries searched together at most", 256)
    add("--max-queue N", "waiting queries before 429", 8192)
    add("--max-wait-s S", "before a request is given up, 503", 60.0)
    add("--cache-mb MB", "answers kept in memory; 0 turns it off", 64)
    log = "append one line of JSON per request: trace id, times, ids found"
    add("--query-log FILE", log)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns 0."""
    _check(args)
    # Idle threads that spin would take the cores from rollouts.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    log_to_stderr()
    listener = bind(args.host, args.port)
    folder = OwnedFolder("search")
    if args.processes > 1:  # counted together; prometheus_client has to know before it is imported
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder.path)
    token_file, token = _admin_token(args.admin_token, folder)
    with needing("rlflow search serve", install_command("search")):
        from rlflow_environments.retrieval.server.process import (
            ServerSetup,
            serve,
            serve_by_workers,
        )
        from rlflow_environments.retrieval.server.service import ServiceLimits
    host, port = listener.getsockname()[:2]
    discovery = DiscoveryFile(args.save_address_to, host, port) if args.save_address_to else None
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    told = f"loading; progress: {url}/health; admin token in {token_file}"
    print(f"serving on {url} ({told})", flush=True)

    def on_ready() -> None:
        if discovery is not None:
            discovery.write()
        print(f"ready: {url}", flush=True)

    on_stop = (lambda: None) if discovery is None else discovery.remove
    with contextlib.closing(folder):
        limits = ServiceLimits(top_k=args.topk, max_wait_s=args.max_wait_s)
        source, processes = make_source(args), args.processes
        setup = ServerSetup(source, limits, args.query_log, token, folder.path, processes)
        if processes > 1:
            serve_by_workers(setup, listener, on_ready=on_ready, on_stop=on_stop)
        else:
            serve(setup.service(), listener, on_ready=on_ready, on_stop=on_stop)
    sys.stdout.flush()
    logging.shutdown()
    os._exit(0)  # a search that cannot be interrupted must not keep the process


def _admin_token(given: str | None, folder: OwnedFolder) -> tuple[Path, str]:
    """(file, token) of requests that change the server. Raises ConfigError."""
    if given is None:
        file, token = folder.path / "admin.token", secrets.token_urlsafe()
        file.touch(0o600)
        file.write_text(token, encoding="ascii")
        return file, token
    try:
        token = Path(given).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--admin-token {given}: cannot be read ({problem}).") from None
    if len(token) < LEAST_TOKEN:
        raise ConfigError(
            f"--admin-token {given}: expected {LEAST_TOKEN} characters or more, found {len(token)}."
        )
    return Path(given), token


def make_source(args: argparse.Namespace) -> ServedSource:
    """What the flags say is to be served. What waits and what is cached is shared out among the
    processes."""
    from rlflow_environments.retrieval.server.loading import ServedSource

    options = {
        "max_batch": args.max_batch,
        "max_waiting": -(-args.max_queue // args.processes),
        "cache_bytes": -(-(args.cache_mb << 20) // args.processes),
    }
    component, corpus = read_source(args)
    return ServedSource(component, corpus, args.pages, options)


def _check(args: argparse.Namespace) -> None:
    for option in ("topk", "processes", "max_batch", "max_queue"):
        if getattr(args, option) < 1:
            raise ConfigError(
                f"--{option.replace('_', '-')}: expected at least 1, found {getattr(args, option)}."
            )
    if args.max_wait_s <= 0 or args.cache_mb < 0:
        raise ConfigError(
            "--max-wait-s and --cache-mb: expected more than 0 and at least 0, found "
            f"{args.max_wait_s}, {args.cache_mb}."
        )
