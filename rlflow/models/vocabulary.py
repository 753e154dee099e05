"""How many ids a model's tokenizer has. Embeddings are often padded to more rows: what is sampled
there decodes to nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlflow.models.huggingface import read_object

TOKENIZER, SETTINGS, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
PLAIN = "vocab.json"
"""Of a tokenizer whose vocabulary stands in a file of its own, as GPT-2's."""
GENERATION = "generation_config.json"
FILES = (TOKENIZER, PLAIN, SETTINGS, ADDED, GENERATION)


def known_vocab(path: str | Path, rows: int) -> int:
    """How many of a model's first `rows` ids may be sampled: up to the last one that the tokenizer
    in its directory has. All, where no tokenizer there says its ids in JSON (none at all,
    tokenizer.model, tekken.json). Raises ModelError for a file that is no JSON object."""
    folder = Path(path)
    files = [folder / name for name in FILES]
    stamps = tuple(file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
    if not any(stamps[:2]):
        return rows
    count = _ids(folder, stamps)
    return min(count, rows) if count else rows


@functools.lru_cache(maxsize=8)
def _ids(folder: Path, stamps: tuple[int, ...]) -> int:
    """One more than the largest id; 0 where the files say none. stamps: when each was written."""
    there = [
        read_object(folder / name) if stamp else {}
        for name, stamp in zip(FILES, stamps, strict=True)
    ]
    whole, plain, settings, added, generation = there
    ids: dict[str, int] = {}
    ids |= _ids_of(whole.get("model"))
    ids |= {} if whole else _numbers(plain)
    ids |= {str(one.get("content")): one["id"] for one in _entries(whole.get("added_tokens"))}
    ids |= dict(_of_decoder(settings))
    ids |= _numbers(added)
    # transformers appends those that the vocabulary lacks
    lacking = {text for text in _special(settings) if text not in ids}
    if not ids:
        return 0
    ends = generation.get("eos_token_id")
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int]
    # A response must be able to end, whatever the tokenizer makes of it
    return 1 + max([max(ids.values()) + len(lacking), *ends])


def _ids_of(model: Any) -> dict[str, int]:
    """Of tokenizer.json's `model`: a vocabulary by text, or pieces in the order of their ids."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        return {str(piece): place for place, piece in enumerate(vocab)}
    return _numbers(vocab)


def _numbers(vocab: Any) -> dict[str, int]:
    if not isinstance(vocab, Mapping):
        return {}
    return {str(text): number for text, number in vocab.items() if type(number) is int}


def _entries(added: Any) -> list[dict[str, Any]]:
    listed = added if isinstance(added, list) else []
    return [one for one in listed if isinstance(one, dict) and type(one.get("id")) is int]


def _of_decoder(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Of tokenizer_config.json: tokens by their ids, which are text there."""
    decoder = settings.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if str(number).isdecimal():
            yield _text(token), int(number)


def _special(settings: Mapping[str, Any]) -> Iterator[str]:
    """The texts of tokens with a role (`eos_token`, ...)."""
    for key, value in settings.items():
        if key.endswith("_token") and isinstance(value, (str, dict)):
            yield _text(value)
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = settings.get(key)
        for token in listed.values() if isinstance(listed, dict) else listed or ():
            yield _text(token)


def _text(token: Any) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)
