"""Opening what is on disk: index folders and the faiss files of others, checked against the corpus
and the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlflow.errors import ConfigError, DataError
from rlflow_environments.retrieval.corpus import Passage
from rlflow_environments.retrieval.encoders import Encoder, NgramEncoder, make_encoder
from rlflow_environments.retrieval.indices.folder import (
    ENCODER,
    ENCODER_RULES,
    INDEX,
    IndexMeta,
    check_corpus,
    check_encoder,
    check_folder,
    open_embeddings,
    open_flat_file,
    read_meta,
)

EncoderOption = str | Mapping[str, Any] | None
_SAME_TEXT = 0.98  # cosine of one text's vectors from one encoder in float32 and in float16
_ROUNDING = 1e-4
_COMPARED, _COMPARED_CODES = 3, 16  # passages


@dataclass(frozen=True)
class OpenedIndex:
    """The parts of an index on disk. index: where the faiss file is. meta: None for a faiss file of
    others."""

    index: Path
    meta: IndexMeta | None
    encoder: Encoder
    embeddings: np.ndarray | None


def open_folder(folder: Path, corpus: Sequence[Passage] | None) -> IndexMeta:
    """What an index folder says of itself, its files checked, and its corpus. Raises DataError."""
    meta = read_meta(folder)
    check_folder(folder, meta)
    if corpus is not None:
        check_corpus(folder, meta, corpus)
    return meta


def open_index(
    path: Path, encoder: EncoderOption, hashed: Mapping[str, Any], corpus: Sequence[Passage]
) -> OpenedIndex:
    """An index folder or a faiss file, checked against the corpus and the encoder. encoder, hashed:
    options of the retriever.

    Raises ConfigError, DataError: not an index, or built on another corpus or with another encoder.
    """
    path = path.expanduser()
    if path.is_file():
        check_encoder_given(path, encoder)
        try:
            embeddings = open_flat_file(path)
        except DataError:
            embeddings = None
        return OpenedIndex(path, None, encoder_of(encoder, hashed, corpus), embeddings)
    meta = open_folder(path, corpus)
    if meta.encoder is None:
        raise ConfigError(
            f"{path}: an index of kind {meta.kind}. Set retriever.name to {meta.kind}."
        )
    opened = stored_encoder(path, meta, encoder, hashed)
    check_encoder(path, meta, opened.description)
    return OpenedIndex(path / INDEX, meta, opened, open_embeddings(path, meta))


def check_encoder_given(path: Path, encoder: EncoderOption) -> None:
    """Raises ConfigError where a faiss file comes without an encoder."""
    if encoder is None:
        raise ConfigError(
            f"{path}: a faiss file does not say how it was encoded. Set retriever.encoder to the "
            "model's folder."
        )


def stored_encoder(
    folder: Path, meta: IndexMeta, encoder: EncoderOption, hashed: Mapping[str, Any]
) -> Encoder:
    """The encoder that the folder names; options for how it runs (device, dtype, another place of
    the model) may be added."""
    built = meta.encoder or {}
    if built["family"] == "hashed":
        if hashed or encoder is not None:
            raise ConfigError(
                f"{folder}: built with the hashed encoder, whose options are stored there. Remove "
                "them."
            )
        return NgramEncoder.load(folder / ENCODER)
    if hashed:
        raise ConfigError(
            f"{folder}: option '{next(iter(hashed))}' is one of the hashed encoder; this index was "
            f"built with {built['path']}."
        )
    given = {"name": encoder} if isinstance(encoder, str) else encoder or {}
    rules = {rule: built[rule] for rule in ENCODER_RULES}
    return make_encoder({"name": built["path"], **rules, **given})


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


def verify_encoder(
    where: str,
    encoder: Encoder,
    corpus: Sequence[Passage],
    stored: Callable[[int, np.ndarray], np.ndarray | None],
    rows: Sequence[int] | None = None,
    *,
    exact: bool = True,
) -> None:
    """Encodes a few passages and compares with what is stored: an index may not say how it was
    built.

    stored: called with a row and the vector that it should hold; None where it is not found. exact:
    it is that vector, but for rounding; else, of codes that tell little of it, at least half must
    be nearer to their own passage than to the others: by chance one in sixteen is. Raises DataError
    where a vector differs: another model, prefix, pooling, length or corpus.
    """
    spread = np.linspace(0, len(corpus) - 1, _COMPARED if exact else _COMPARED_CODES)
    rows = sorted(set(spread.astype(int).tolist())) if rows is None else rows
    # What a row without text is encoded as is not said anywhere.
    rows = [row for row in rows if corpus[row].contents]
    made = encoder.encode_passages([corpus[row] for row in rows])
    missed: list[str] = []
    for row, vector in zip(rows, made, strict=True):
        held = stored(row, vector)
        found = np.zeros_like(vector) if held is None else np.asarray(held, np.float32)
        if found.shape != vector.shape:
            raise DataError(
                f"{where}: vectors of {len(found)} dimensions; the encoder makes {len(vector)}. "
                "Give the encoder it has."
            )
        cosine = 0.0 if held is None else _cosine(found, vector)
        expected = _SAME_TEXT
        if not exact:
            expected = max(_cosine(found, other) for other in made) - _ROUNDING
        if cosine < expected or held is None:
            missed.append(
                f"passage {row} of this corpus, encoded here, has cosine {cosine:.3f} to the "
                f"stored vector; expected at least {expected:.3f}"
            )
    if len(missed) > (0 if exact else len(rows) // 2):
        raise DataError(
            f"{where}: {missed[0]}. Another model, prefix, pooling, length or corpus was used; set "
            "verify: false to go on."
        )


def _cosine(found: np.ndarray, vector: np.ndarray) -> float:
    lengths = float(np.linalg.norm(found) * np.linalg.norm(vector))
    return float(found @ vector) / lengths if lengths else float(found.any() == vector.any())


def check_count(path: Path, found: int, corpus: Sequence[Passage]) -> None:
    """Raises DataError where an index does not hold one vector per passage."""
    if found != len(corpus):
        raise DataError(
            f"{path}: holds {found} vectors, the corpus {len(corpus)} passages. Give the corpus "
            "that it was built on."
        )
