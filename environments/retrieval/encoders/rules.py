"""Prefixes, pooling, normalization and length of a model family: decided in one place, for the
builder of an index and for its server alike."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from rlflow.errors import ConfigError, ModelError, did_you_mean
from rlflow.values import PositiveInt

Pooling = Literal["mean", "cls", "last"]
MAX_LENGTH = 256  # tokens, prefix and special ones included (Search-R1 and all its descendants)


@dataclass(frozen=True)
class EncoderRules:
    """What a family does around the model's last hidden states."""

    family: str
    pooling: str
    normalize: bool
    query_prefix: str = ""
    passage_prefix: str = ""
    max_length: int = MAX_LENGTH


_BGE_QUERY = "Represent this sentence for searching relevant passages: "
FAMILIES = {
    # Wang et al. 2022, model card of e5-base-v2
    "e5": EncoderRules("e5", "mean", True, "query: ", "passage: "),
    # Xiao et al. 2023, model card of bge-base-en-v1.5
    "bge-m3": EncoderRules("bge-m3", "cls", True),  # Chen et al. 2024, model card
    "bge-zh": EncoderRules("bge-zh", "cls", True, "为这个句子生成表示以用于检索相关文章："),
    "bge": EncoderRules("bge", "cls", True, _BGE_QUERY),
    "dpr": EncoderRules("dpr", "cls", False),  # Karpukhin et al. 2020
    "contriever": EncoderRules("contriever", "mean", False),  # Izacard et al. 2022
    "sentence-transformers": EncoderRules("sentence-transformers", "mean", True),
}
_WORD = r"(?<![a-z0-9]){}(?![a-z0-9])"
_BY_NAME = {
    "e5": _WORD.format("e5"),  # not `stage5`
    "bge-m3": "bge-m3",
    "bge-zh": "bge.*-zh",
    "bge": "bge",
    "dpr": "dpr",
    "contriever": "contriever",
}
"""How the last part of a model's path names its family."""
_POOLING_NAMES = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
"""Of sentence-transformers: values of `pooling_mode`, and the switches of its older form."""


def encoder_family(name: str) -> str:
    """The family of a model name or folder, a key of FAMILIES: `e5-base`, `intfloat/e5-base-v2` and
    `models/my_e5/` are e5.

    The last part of the path decides by what it contains; where it says nothing, the nearest folder
    above with the family as a word of its own does
    (`models--intfloat--e5-base-v2/snapshots/8a1b`)."""
    *folders, last = PurePath(name.lower().rstrip("/")).parts or ("",)
    for family, named in _BY_NAME.items():
        if re.search(named, last):
            return family
    for folder in reversed(folders):
        for family, named in _BY_NAME.items():
            if re.search(_WORD.format(named), folder):
                return family
    return "sentence-transformers"


def encoder_rules(
    folder: Path,
    name: str,
    *,
    family: str | None = None,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_length: PositiveInt | None = None,
) -> EncoderRules:
    """The rules of a model: its family's, but for what its modules.json states where no family is
    given; what is given wins.

    Raises ConfigError for an unknown family, ModelError for modules that are not supported."""
    chosen = encoder_family(name) if family is None else family
    if chosen not in FAMILIES:
        raise ConfigError(
            f"encoder.family: expected one of {', '.join(FAMILIES)}, found '{chosen}'."
            f"{did_you_mean(chosen, FAMILIES)}"
        )
    rules = FAMILIES[chosen]
    unnamed = family is None or chosen == "sentence-transformers"
    if unnamed and (folder / "modules.json").is_file():
        rules = _from_modules(folder, rules)
    given: dict[str, Any] = {
        "pooling": pooling,
        "normalize": normalize,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
        "max_length": max_length,
    }
    return replace(rules, **{key: value for key, value in given.items() if value is not None})


def _from_modules(folder: Path, rules: EncoderRules) -> EncoderRules:
    """The rules that a sentence-transformers folder states: modules.json, the pooling module,
    prompts where it has any, the length where no family has one."""
    rules = replace(rules, normalize=False)
    for module in _read(folder / "modules.json"):
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            place = folder / module.get("path", "") / "config.json"
            rules = replace(rules, pooling=_pooling(place))
        elif kind == "Normalize":
            rules = replace(rules, normalize=True)
        elif kind != "Transformer":
            raise ModelError(
                f"{folder}/modules.json: module '{module['type']}' is not supported; supported: "
                "Transformer, Pooling, Normalize."
            )
    prompts = _read(folder / "config_sentence_transformers.json", {}).get("prompts") or {}
    if any(prompts.values()):
        rules = replace(
            rules,
            query_prefix=prompts.get("query") or prompts.get("web_search_query") or "",
            passage_prefix=prompts.get("document") or prompts.get("passage") or "",
        )
    length = _read(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    if length and rules.family == "sentence-transformers":
        rules = replace(rules, max_length=length)
    return rules


def _pooling(path: Path) -> str:
    config = _read(path)
    switched = [key for key in config if key.startswith("pooling_mode_") and config[key]]
    modes = [config["pooling_mode"]] if config.get("pooling_mode") else switched
    if len(modes) != 1 or modes[0] not in _POOLING_NAMES:
        raise ModelError(
            f"{path}: expected one pooling of mean, cls, last, found {modes or 'none'}."
        )
    return _POOLING_NAMES[modes[0]]


def _read(path: Path, default: Any = None) -> Any:
    if not path.is_file() and default is not None:
        return default
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise ModelError(f"{path}: cannot be read as JSON ({problem}).") from None
