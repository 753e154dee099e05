"""An index on disk: one folder, and meta.json that says what it holds.

meta.json                  kind, dimensions, count; corpus and encoder by SHA-256; measured recall
index.faiss                of every faiss kind (Flat, SQ8, IVF1024,SQ8, HNSW32, ...)
encoder.json               word counts of the built-in encoder
bm25/                      of kind `bm25`
qdrant/                    of kind `qdrant`: a shard of Qdrant's engine
progress.json, *.partial   while a build is under way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.errors import ConfigError, DataError
from rlflow.storage.integrity import SEAL, is_sealed, write_sealed
from rlflow_environments.common.text import load_json
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder, make_encoder
from rlflow_environments.retrieval.records import sample_digest, stamp_file

META, INDEX, ENCODER, PROGRESS = "meta.json", "index.faiss", "encoder.json", "progress.json"
BM25 = "bm25"
QDRANT = "qdrant"
ENCODER_RULES = ("family", "pooling", "normalize", "query_prefix", "passage_prefix", "max_length")
"""What an encoder other than the built-in one is made again from, beside its path."""
FORMAT, REMOVED = 1, ("torch", "qdrant-edge", "qdrant-local")
EncoderOption = str | Mapping[str, Any] | None
_SAME_TEXT = 0.98  # cosine of one text's vectors from one encoder in float32 and in float16
_ROUNDING = 1e-4
_COMPARED = 16  # passages


@dataclass(frozen=True)
class IndexMeta:
    """What an index folder holds.

    kind: bm25, qdrant or a faiss index_factory string. corpus: path, bytes and sha256 of the
    file. encoder: its description, None for bm25. files: {name: bytes, sha256, sample} of the
    folder's files. search: of IVF and HNSW, `nprobe` or `ef_search` to search
    with, the `target` of recall@10 that it was chosen for, how many `queries` measured it, and
    `recall` by value; None where nothing was measured."""

    kind: str
    dimensions: int
    count: int
    corpus: Mapping[str, Any]
    encoder: Mapping[str, Any] | None = None
    files: Mapping[str, Any] | None = None
    search: Mapping[str, Any] | None = None
    format: int = FORMAT


def retriever_of(meta: IndexMeta) -> str:
    """The name of the retriever that searches such an index."""
    return meta.kind if meta.kind in (BM25, QDRANT) else "faiss"


def read_meta(folder: Path) -> IndexMeta:
    """What meta.json says. Raises DataError: no index, an unfinished or damaged one, a later
    format."""
    path = folder / META
    if not path.is_file():
        unfinished = (
            any(folder.glob("*.partial"))
            or (folder / PROGRESS).is_file()
            or (folder / QDRANT).is_dir()
        )
        found = "a build that did not finish; run it again to go on"
        raise DataError(
            f"{folder}: expected an index made by `rlflow search build`, found "
            f"{found if unfinished else 'no meta.json'}."
        )
    try:
        found = load_json(path.read_bytes())
        if SEAL in found and not is_sealed(found):  # indices of earlier versions have none
            raise ValueError("its content does not agree with its checksum")
        known = {field.name for field in fields(IndexMeta)}
        meta = IndexMeta(**{key: value for key, value in found.items() if key in known})
        _check_types(meta)
        asdict(meta)  # as everything that shows it does: not for what is nested too deeply
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        reason = str(problem)[:200]
        raise DataError(f"{path}: cannot be read ({reason}). Build the index again.") from None
    if meta.format != FORMAT or meta.kind in REMOVED:
        raise DataError(
            f"{path}: kind {meta.kind}, format {meta.format}; this version reads format {FORMAT}, "
            f"and no longer {', '.join(REMOVED)}. Build the index again, as Flat for instance."
        )
    return meta


def _check_types(meta: IndexMeta) -> None:
    """Raises ValueError, TypeError or KeyError for what no build writes."""
    texts = [meta.kind, meta.corpus["path"], meta.corpus["sha256"]]
    numbers = [meta.dimensions, meta.count, meta.corpus["bytes"]]
    if meta.encoder is not None:
        texts += [meta.encoder["family"], meta.encoder["sha256"]]
        if meta.encoder["family"] != "hashed":
            texts += [meta.encoder["path"]]
            [meta.encoder[rule] for rule in ENCODER_RULES]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"expected numbers of 0 or more, found {numbers}")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("expected texts for kind, paths, family and hashes")
    if not all(isinstance(stamp["bytes"], int) for stamp in (meta.files or {}).values()):
        raise ValueError("expected sizes and hashes by file under files")
    if meta.search is not None:
        _check_search(meta.search)


def _check_search(search: Mapping[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError for a measured recall that no build writes."""
    (chosen,) = [search[name] for name in ("nprobe", "ef_search") if name in search]
    numbers = [chosen, search["queries"], *map(int, search["recall"])]
    shares = [search["target"], *search["recall"].values()]
    if not search["recall"] or not all(type(one) is int and one >= 1 for one in numbers):
        raise ValueError(f"search: expected whole numbers from 1 on, found {numbers}")
    if not all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in shares):
        raise ValueError("search: expected target and recalls between 0 and 1")


def write_meta(folder: Path, meta: IndexMeta) -> None:
    """Writes meta.json with the hashes of the files: the last step, a folder that has it is
    whole."""
    held = sorted([folder / INDEX, folder / ENCODER, *(folder / BM25).rglob("*")])
    files = {str(path.relative_to(folder)): stamp_file(path) for path in held if path.is_file()}
    write_sealed(folder / META, asdict(replace(meta, files=files)))


def check_folder(folder: Path, meta: IndexMeta, *, deep: bool = False) -> None:
    """Raises DataError where a file is not that of the build; by samples, or wholly with `deep`."""
    for name, stamp in (meta.files or {}).items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path}: is missing. Build the index again, or copy it again.")
        sampled = {"bytes": path.stat().st_size, "sample": sample_digest(path)}
        for key, value in (stamp_file(path) if deep else sampled).items():
            if stamp.get(key) != value:
                raise DataError(
                    f"{path}: is not what the build wrote ({key} {str(stamp.get(key))[:12]} then, "
                    f"{str(value)[:12]} now). Build the index again, or copy it again."
                )


def open_folder(folder: Path, corpus: Sequence[Passage] | None) -> IndexMeta:
    """What an index folder says of itself. Raises DataError where a file of it is not that of the
    build, or the corpus is another one."""
    meta = read_meta(folder)
    check_folder(folder, meta)
    if corpus is not None:
        check_corpus(folder, meta, corpus)
    return meta


def check_corpus(folder: Path, meta: IndexMeta, corpus: Sequence[Passage]) -> None:
    """Raises DataError where the index was built on another corpus."""
    built = meta.corpus
    if len(corpus) != meta.count:
        raise DataError(
            f"{folder}: the index holds {meta.count} passages, the corpus {len(corpus)}. It was "
            f"built on another corpus ({built['path']}); build it again."
        )
    if getattr(corpus, "sha256", built["sha256"]) != built["sha256"]:
        path = corpus.path  # type: ignore[attr-defined]
        raise DataError(
            f"{folder}: built on another corpus than {path} (SHA-256 "
            f"{built['sha256'][:12]}..., {built['bytes']} bytes, then at {built['path']}). Give "
            "that corpus, or build the index again."
        )


# ---------------------------------------------------------------- the encoder of an index


def encoder_of(
    encoder: EncoderOption, hashed: Mapping[str, Any], corpus: Sequence[Passage]
) -> Encoder:
    """The encoder of a retriever's options: `encoder`, or the hashed one with its own options
    beside the retriever's."""
    if encoder is None:
        return NgramEncoder(corpus, **hashed)
    if hashed:
        raise ConfigError(
            f"retriever: option '{next(iter(hashed))}' is one of the hashed encoder. Move it into "
            "retriever.encoder."
        )
    return make_encoder(encoder, corpus)


def stored_encoder(
    folder: Path, meta: IndexMeta, encoder: EncoderOption, hashed: Mapping[str, Any]
) -> Encoder:
    """The encoder that the folder names; options for how it runs (device, dtype, another place of
    the model) may be added. Raises ConfigError for others, DataError where it makes other
    vectors."""
    built = meta.encoder or {}
    if built["family"] == "hashed":
        if encoder is not None or not hashed.items() <= built.items():
            raise ConfigError(
                f"{folder}: built with the hashed encoder, whose options are stored there. Remove "
                "them."
            )
        opened: Encoder = NgramEncoder.load(folder / ENCODER)
    else:
        if hashed:
            raise ConfigError(
                f"{folder}: option '{next(iter(hashed))}' is one of the hashed encoder; this index "
                f"was built with {built['path']}."
            )
        given = {"name": encoder} if isinstance(encoder, str) else encoder or {}
        rules = {rule: built[rule] for rule in ENCODER_RULES}
        opened = make_encoder({"name": built["path"], **rules, **given})
    description = opened.description
    if built["sha256"] != description["sha256"]:
        differs = "; ".join(
            f"{key}: {value!r} then, {description.get(key)!r} now"
            for key, value in built.items()
            if key not in ("sha256", "path") and value != description.get(key)
        )
        raise DataError(
            f"{folder}: built with another encoder ({differs or 'the same rules, other weights'}; "
            f"family {built['family']}, SHA-256 {built['sha256'][:12]}... then, "
            f"{description['sha256'][:12]}... now). Give that encoder, or build the index again."
        )
    return opened


def check_encoder_given(path: Path, encoder: EncoderOption) -> None:
    """Raises ConfigError where a faiss file comes without an encoder."""
    if encoder is None:
        raise ConfigError(
            f"{path}: a faiss file does not say how it was encoded. Set retriever.encoder to the "
            "model's folder."
        )


def compared_rows(corpus: Sequence[Passage]) -> list[int]:
    """Rows spread over a corpus, those with text: what others are encoded as is not said
    anywhere."""
    spread = np.linspace(0, len(corpus) - 1, _COMPARED).astype(int)
    return [row for row in sorted(set(spread.tolist())) if corpus[row].contents]


def verify_encoder(
    where: str,
    encoder: Encoder,
    passages: Sequence[Passage],
    stored: np.ndarray,
    exact: bool = True,
) -> None:
    """Encodes passages again and compares with what is stored for them: an index may not say how it
    was built.

    stored: (len(passages), dimensions). exact: these are the vectors but for rounding; else, of
    codes that tell little of them, at least half must be nearer to their own passage than to the
    others: by chance one in sixteen is. Raises DataError where a vector differs: another model,
    prefix, pooling, length or corpus."""
    made = encoder.encode_passages(passages)
    if stored.shape != made.shape:
        raise DataError(
            f"{where}: vectors of {stored.shape[1]} dimensions; the encoder makes {made.shape[1]}. "
            "Give the encoder it has."
        )
    cosines = _unit(made) @ _unit(stored).T
    own = np.diagonal(cosines)
    expected = np.full(len(own), _SAME_TEXT)
    if not exact:
        expected = cosines.max(axis=0, initial=-1) - _ROUNDING
    missed = np.flatnonzero((own < expected) & (made.any(axis=1) | stored.any(axis=1)))
    if len(missed) > (0 if exact else len(own) // 2):
        raise DataError(
            f"{where}: passage {passages[missed[0]].id!r} of this corpus, encoded here, has cosine "
            f"{own[missed[0]]:.3f} to the stored vector; expected at least "
            f"{expected[missed[0]]:.3f}. Another model, prefix, pooling, length or corpus was "
            "used; set verify: false to go on."
        )


def _unit(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float64)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-30)
