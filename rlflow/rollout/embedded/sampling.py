"""Sampling over a batch: reproducible randomness per request, log-probs at the sampling
temperature, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlflow.errors import RolloutError
from rlflow.rollout.tokenizer import Tokenizer

CHUNK = 128
KEPT_ROWS = 64
"""Of the stop table, beyond which those that no request needs are used again."""
END_TOKEN = 1
"""Flag of a token that ends the completion by itself."""
MAY_END_STRING = 2
"""Flag of a token whose text may complete a stop string: the text must be looked at."""


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """(B,) float64 in [0, 1): one number per (seed, counter), (B,) int64 each, whatever else is in
    the batch.

    The 32 high bits of splitmix64 (Steele, Lea, Flood 2014) after two rounds; int64 arithmetic
    wraps as uint64 would."""
    state = _splitmix(_splitmix(seeds) + counters)
    return ((state >> 32) & 0xFFFFFFFF).double() * 2.0**-32


def _splitmix(state: Tensor) -> Tensor:
    state = state + -7046029254386353131
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


def sample(logits: Tensor, temperatures: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sampled ids (B,) and their log-probs (B,), nats, from float32 logits (B, V) at temperatures
    (B,).

    Temperature 0 is greedy, with the log-prob at temperature 1. uniform: (B,) float64 in [0, 1);
    None if all rows are greedy. By inversion of the cumulative distribution in float64, so that no
    token's share is rounded away."""
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
    if uniform is None:
        tokens = logprobs.argmax(-1)
    else:
        tokens = _invert(logprobs.exp(), uniform)
        if logits.is_cuda or bool(greedy.any()):  # a look at the value would wait for the GPU
            tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _invert(shares: Tensor, uniform: Tensor) -> Tensor:
    """(B,) where the cumulative sum of `shares` (B, V) passes the share `uniform` (B,) of its
    total.

    In float64, first over sums of CHUNK shares, then within one of them: a cumulative sum over all
    of a large vocabulary costs more than a small model's forward pass."""
    rows, vocab = shares.shape
    whole = shares if vocab % CHUNK == 0 else torch.nn.functional.pad(shares, (0, -vocab % CHUNK))
    chunks = whole.view(rows, -1, CHUNK)
    upto = chunks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform[:, None] * upto[:, -1:]
    # Only NaN exceeds it
    chunk = torch.searchsorted(upto, target, right=True).clamp_(max=chunks.shape[1] - 1)
    before = torch.where(chunk > 0, upto.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    within = chunks[torch.arange(rows, device=shares.device), chunk[:, 0]].cumsum(
        -1, dtype=torch.float64
    )
    # Rounding must not lead beyond the chunk
    last = torch.nextafter(within[:, -1:], torch.zeros_like(target))
    place = torch.searchsorted(within, torch.minimum(target - before, last), right=True).clamp_(
        max=CHUNK - 1
    )
    return (chunk * CHUNK + place)[:, 0].clamp_(max=vocab - 1)


class StopTable:
    """Which tokens can end a completion, (rows, V) uint8 flags: a row for every distinct pair of
    stop strings and ids.

    Most tokens cannot complete any of the strings, so text is decoded only for those whose own text
    holds a string's last character (or, where that is not ASCII, an incomplete character)."""

    def __init__(
        self, vocab: int, tokenizer: Callable[[], Tokenizer], device: torch.device
    ) -> None:
        self.flags = torch.zeros(0, vocab, dtype=torch.uint8, device=device)
        self._tokenizer = tokenizer
        self._rows: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        self._texts: list[str] | None = None
        self._with: dict[str, Tensor] = {}

    def row(
        self,
        strings: tuple[str, ...],
        token_ids: tuple[int, ...],
        used: Callable[[], set[int]] = set,
    ) -> int:
        """The row of a pair, made where it is new; beyond KEPT_ROWS in place of the oldest that is
        none of `used`. Raises RolloutError for an empty string or an id outside the vocabulary."""
        key = (tuple(strings), tuple(token_ids))
        if key not in self._rows:
            made = self._make_row(*key).to(self.flags.device)
            taken = used() if len(self._rows) >= KEPT_ROWS else set(self._rows.values())
            old = next((old for old, row in self._rows.items() if row not in taken), None)
            if old is None:
                self.flags = torch.cat((self.flags, made[None]))
                self._rows[key] = len(self._rows)
            else:
                self._rows[key] = self._rows.pop(old)
                self.flags[self._rows[key]] = made
        return self._rows[key]

    def completes(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the last of `tokens` completes one of the strings, across token boundaries.
        Special tokens have no text. The completion must have held none of them before."""
        tokenizer = self._tokenizer()
        # A token has a byte or more; 8 for safe boundaries
        longest = max(len(text.encode()) for text in strings) + 8
        window: list[int] = []
        for token in reversed(tokens):
            if token not in tokenizer.special_ids:
                window.append(token)
            if len(window) == longest:
                break
        text = tokenizer.decode(window[::-1])
        return any(string in text for string in strings)

    def _make_row(self, strings: tuple[str, ...], token_ids: tuple[int, ...]) -> Tensor:
        vocab = self.flags.shape[1]
        row = torch.zeros(vocab, dtype=torch.uint8)
        if any(not string for string in strings):
            raise RolloutError(
                "sampling.stop: a stop string is empty; every completion would end at once."
            )
        if strings:
            ends = {string[-1] for string in strings}
            if any(not end.isascii() for end in ends):
                ends.add("\ufffd")  # part of a character: several tokens may make the last one
            tokenizer = self._tokenizer()
            special = {  # a tokenizer may know more ids than the model
                token: tokenizer.decode([token], skip_special_tokens=False)
                for token in tokenizer.special_ids
                if token < vocab
            }
            for end in ends:
                row[self._tokens_with(end)] = MAY_END_STRING
            for string in strings:  # a stop string that is one special token has no text of its own
                row[[token for token, text in special.items() if text == string]] = END_TOKEN
        outside = [token for token in token_ids if not 0 <= token < vocab]
        if outside:
            raise RolloutError(
                f"sampling.stop_token_ids: {outside[0]} is outside the model's vocabulary of "
                f"{vocab}."
            )
        row[list(token_ids)] = END_TOKEN
        return row

    def _tokens_with(self, character: str) -> Tensor:
        """Ids of the tokens whose text holds it."""
        if character not in self._with:
            texts = enumerate(self._token_texts())
            ids = [token for token, text in texts if character in text]
            self._with[character] = torch.tensor(ids, dtype=torch.int64)
        return self._with[character]

    def _token_texts(self) -> list[str]:
        if self._texts is None:
            tokenizer, tokens = self._tokenizer(), range(self.flags.shape[1])
            alone = (tokenizer.decode([token], skip_special_tokens=False) for token in tokens)
            # Metaspace tokenizers leave out the space that a text begins with, so the token is
            # looked at behind a letter.
            letter = next(
                ([token] for token, text in enumerate(alone) if len(text) == 1 and text.isalpha()),
                [],
            )
            before = len(tokenizer.decode(letter, skip_special_tokens=False)) if letter else 0
            self._texts = [
                tokenizer.decode([*letter, token], skip_special_tokens=False)[before:]
                for token in tokens
            ]
        return self._texts
