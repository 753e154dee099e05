"""Which ids may be sampled: those that transformers' tokenizer of the same directory has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import tiny_tokenizer

from rlflow.errors import ModelError
from rlflow.models.vocabulary import known_vocab

ROWS = 1000


def write(path: Path, model: Any, **settings: Any) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **settings)
    fast.save_pretrained(str(path))


def by_transformers(path: Path) -> int:
    from transformers import PreTrainedTokenizerFast

    return 1 + max(PreTrainedTokenizerFast.from_pretrained(str(path)).get_vocab().values())


def test_as_many_as_transformers_has_of_every_kind_of_vocabulary(tmp_path: Path) -> None:
    from tokenizers import models

    tiny_tokenizer(tmp_path / "bpe")
    words = {word: place for place, word in enumerate(("<unk>", "a", "b"))}
    write(tmp_path / "words", models.WordLevel(words, "<unk>"), eos_token="b")
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("c", -3.0)]
    write(tmp_path / "pieces", models.Unigram(pieces, 0), pad_token="<pad>")
    for name, least in (("bpe", 259), ("words", 3), ("pieces", 5)):
        folder = tmp_path / name
        assert known_vocab(folder, ROWS) == by_transformers(folder) >= least
        assert known_vocab(folder, 2) == 2  # a tokenizer may have more than the model


def test_tokens_that_only_the_settings_name_count(tmp_path: Path) -> None:
    """transformers appends them, and a policy may have to end with one."""
    folder = tiny_tokenizer(tmp_path)
    before = known_vocab(folder, ROWS)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "eos_token": "<|done|>", "bos_token": "<|begin|>"}))
    assert known_vocab(folder, ROWS) == by_transformers(folder) == before + 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ROWS),
        ({"tokenizer.model": "sentencepiece"}, ROWS),
        ({"tokenizer.json": "{}"}, ROWS),
        ({"tokenizer.json": '{"model": {"vocab": [["a"], ["b"]]}, "added_tokens": [3, {}]}'}, 2),
        ({"vocab.json": '{"a": 0, "b": 1}'}, 2),
        ({"vocab.json": '{"a": 0}', "generation_config.json": '{"eos_token_id": [4, 2]}'}, 5),
        ({"vocab.json": '{"a": 0}', "generation_config.json": '{"eos_token_id": null}'}, 1),
        ({"vocab.json": '{"a": 0}', "added_tokens.json": '{"<x>": 6}'}, 7),
    ],
    ids=str,
)
def test_files_of_other_kinds(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert known_vocab(tmp_path, ROWS) == expected


def test_a_changed_file_is_read_again_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for text, expected in (('{"a": 0}', 1), ('{"a": 0, "b": 1}', 2)):
        file.write_text(f'{{"model": {{"vocab": {text}}}}}')
        assert known_vocab(tmp_path, ROWS) == expected
    file.write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer\.json: expected a JSON object"):
        known_vocab(tmp_path, ROWS)
