"""The flags that say what is searched, for `serve` and `query`: ours, and those of the field's
servers under their own names."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from rlflow.errors import ConfigError, did_you_mean
from rlflow_environments.common.commands import add_option
from rlflow_environments.retrieval.encoders.rules import FAMILIES
from rlflow_environments.retrieval.indices.folder import read_meta, retriever_of

FIELD_ENCODER = "intfloat/e5-base-v2"
_QDRANT_PARAMS = ("hnsw_ef", "exact", "quantization")


def add_source_arguments(parser: argparse._ActionsContainer) -> None:
    """What `read_source` reads."""
    add = partial(add_option, parser)
    add("--corpus --corpus_path FILE", "passages, one JSON object per line")
    add(
        "--index --index_path PATH",
        "an index folder of `rlflow search build`, or a faiss file as Search-R1 builds it",
    )
    add(
        "--retriever NAME|{...}",
        "bm25, faiss, hybrid, qdrant, ..., or {name: ..., option: ...} (YAML), or @FILE with that",
    )
    add(
        "--retriever_name NAME",
        "of a faiss file: the encoder's family (e5, bge, ...); or bm25 (default e5)",
    )
    encoder = f"of a faiss file or Qdrant: the encoder (default {FIELD_ENCODER})"
    add("--retriever_model PATH", encoder)
    add("--faiss_gpu", "copy the index to all visible GPUs, in float16")
    lists = "of an IVF index: lists to search (default: what the build measured)"
    add("--nprobe N", lists, kind=int)
    if isinstance(parser, argparse.ArgumentParser):
        add = partial(add_option, parser.add_argument_group("Qdrant"))
    add("--qdrant_url URL", "e.g. http://localhost:6333")
    add("--qdrant_collection_name NAME", "the collection to search")
    add("--qdrant_search_param JSON", 'e.g. {"hnsw_ef": 256}', kind=_json)
    add("--qdrant_search_quant_param JSON", 'e.g. {"rescore": true}', kind=_json)


def read_source(args: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """(retriever component, corpus) of the flags. Raises ConfigError for flags that contradict each
    other, DataError."""
    corpus = args.corpus
    if args.retriever is not None:
        component = read_component(args.retriever)
        if args.index is not None:
            component.setdefault("path", args.index)
    elif args.qdrant_url is not None or args.qdrant_collection_name is not None:
        component = _qdrant(args)
    elif args.index is not None:
        component, remembered = _indexed(Path(args.index).expanduser(), args)
        corpus = corpus or remembered
    else:
        component = {"name": "bm25" if _is_bm25(args) else "dense"}
    if args.faiss_gpu:
        component["gpu"] = True
    if args.nprobe is not None:
        component["nprobe"] = args.nprobe
    return component, corpus


def read_component(text: str) -> dict[str, Any]:
    """A retriever by name, or by name and options in YAML (of which JSON is a part); @FILE: what
    stands in the file, where a key is nobody else's to read. Raises ConfigError."""
    import yaml

    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"--retriever: {text[1:]} cannot be read ({problem}).") from None
    try:
        component = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ConfigError(
            f"--retriever: expected a name or {{name: ..., option: ...}}, found {text!r} "
            f"({problem})."
        ) from None
    if isinstance(component, str):
        return {"name": component}
    if not isinstance(component, dict) or "name" not in component:
        raise ConfigError(
            f"--retriever: expected a name or {{name: ..., option: ...}}, found "
            f"{json.dumps(component)}."
        )
    return component


def _is_bm25(args: argparse.Namespace) -> bool:
    return (args.retriever_name or "").lower() == "bm25"


def _indexed(path: Path, args: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """(the retriever of an index on disk: what its meta.json says, or a faiss file and the encoder
    of the flags; where the corpus of a folder was when it was built, if it is still there). Raises
    ConfigError where neither is there."""
    if not path.exists() and args.corpus is None:
        raise ConfigError(
            f"--index: {path}: nothing there; expected a folder of `rlflow search build` with a "
            "meta.json, or a faiss file."
        )
    if not path.is_dir():
        encoder = {} if _is_bm25(args) else {"encoder": _encoder(args)}
        return {"name": "bm25" if _is_bm25(args) else "faiss", "path": str(path), **encoder}, None
    meta = read_meta(path)
    name = "bm25" if _is_bm25(args) else retriever_of(meta)
    corpus = meta.corpus["path"]
    return {"name": name, "path": str(path)}, corpus if Path(corpus).is_file() else None


def _qdrant(args: argparse.Namespace) -> dict[str, Any]:
    """The retriever of Qdrant's flags. Raises ConfigError for a search parameter that is not
    known."""
    if args.qdrant_collection_name is None:
        raise ConfigError(
            "--qdrant_collection_name: expected the collection to search, found nothing."
        )
    params = dict(args.qdrant_search_param or {})
    if args.qdrant_search_quant_param is not None:
        params["quantization"] = args.qdrant_search_quant_param
    for key in params:
        if key not in _QDRANT_PARAMS:
            known = ", ".join(_QDRANT_PARAMS)
            raise ConfigError(
                f"--qdrant_search_param: unknown key '{key}'; known: "
                f"{known}.{did_you_mean(key, _QDRANT_PARAMS)}"
            )
    return {
        "name": "qdrant",
        "url": args.qdrant_url or "http://localhost:6333",
        "collection": args.qdrant_collection_name,
        "encoder": _encoder(args),
        **params,
    }


def _encoder(args: argparse.Namespace) -> dict[str, Any]:
    """The encoder of --retriever_model; --retriever_name says its family where the name of the
    model does not."""
    encoder = {"name": args.retriever_model or FIELD_ENCODER}
    if args.retriever_name is None:
        return encoder
    name = args.retriever_name.lower()
    # As the field's servers do: `e5-base` and `e5-base-v2` are of the family e5.
    return {**encoder, "family": next((family for family in FAMILIES if family in name), name)}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"expected JSON, found {text!r} ({problem})") from None
