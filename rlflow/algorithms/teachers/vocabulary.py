"""Compares two tokenizers by what their ids mean, not by their names."""

from __future__ import annotations

from pathlib import Path

from rlflow.errors import ConfigError
from rlflow.rollout.tokenizer import Tokenizer

SHOWN = 3


def check_tokenizers(policy: Tokenizer, path: str | Path, where: str, template: bool) -> None:
    """Raises ConfigError where vocabulary, added tokens or, with `template`, the chat template of
    the tokenizer at `path` are not the policy's; ModelError where there is no tokenizer."""
    other = Tokenizer.from_pretrained(path)
    ours, theirs = policy.inner.get_vocab(), other.inner.get_vocab()
    differing = sorted({word for word in {*ours, *theirs} if ours.get(word) != theirs.get(word)})
    if differing:
        shown = "; ".join(
            f"{word!r} is {ours.get(word, 'nothing')} here and {theirs.get(word, 'nothing')} there"
            for word in differing[:SHOWN]
        )
        raise ConfigError(
            f"{where}: {path} has another vocabulary than the policy, so its log-probs belong to "
            f"other tokens: {len(differing)} differ: {shown}. Take a teacher with the policy's "
            "tokenizer."
        )
    added, found = _added(policy), _added(other)
    if added != found:
        number = min(key for key in {*added, *found} if added.get(key) != found.get(key))
        pair = f"expected {added.get(number, 'nothing')} as {number}"
        pair += f", found {found.get(number, 'nothing')}"
        raise ConfigError(f"{where}: {path} has other added tokens than the policy: {pair}.")
    if template and policy.inner.chat_template != other.inner.chat_template:
        raise ConfigError(
            f"{where}: {path} has another chat template than the policy, so prompts would not look "
            "to it as it was trained; take a teacher with the policy's, or set "
            f"{where}.same_template=false."
        )


def _added(tokenizer: Tokenizer) -> dict[int, tuple[str, bool]]:
    """{id: (text, special)}"""
    return {
        number: (entry.content, entry.special)
        for number, entry in tokenizer.inner.added_tokens_decoder.items()
    }
