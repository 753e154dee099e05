"""An engine that tells its text while it is sampled: for a person who waits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from rlflow.rollout.embedded.block_manager import common_prefix
from rlflow.rollout.engine import Completion, Engine, PauseMode, Sampling, Weights
from rlflow.rollout.tokenizer import Tokenizer

PIECE_TOKENS = 4
UNFINISHED = "\ufffd"


class Listener(Protocol):
    """Told, in the engine's event loop, of one episode at a time."""

    def shown(self, text: str) -> None:
        """What the policy reads before it responds: the prompt, then each observation, as they were
        tokenized."""

    def said(self, text: str, ended: bool) -> None:
        """The response so far, special tokens left out."""


class StreamingEngine(Engine):
    """Another engine, asked for a few tokens at a time. Greedy completions are the same as in one
    request; others have seeds of their own per piece. Stop strings are looked for across pieces."""

    def __init__(self, inner: Engine, tokenizer: Tokenizer, listener: Listener) -> None:
        self.inner, self.listener = inner, listener
        self.max_tokens, self.max_concurrency = inner.max_tokens, 1
        self._tokenizer = tokenizer
        self._known: list[int] = []  # what the last completion ended with, its prompt included

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        self.listener.shown(self._tokenizer.decode(self._new(list(tokens))))
        whole = Completion([], [], [], "length")
        while whole.stop == "length" and len(whole.tokens) < sampling.max_tokens:
            count = len(whole.tokens)
            seed = None if sampling.seed is None else sampling.seed + count
            asked = dataclasses.replace(
                sampling, max_tokens=min(PIECE_TOKENS, sampling.max_tokens - count), seed=seed
            )
            piece = await self.inner.generate([*tokens, *whole.tokens], asked, request_id, priority)
            whole = self._joined(whole, piece, sampling.stop)
            ended = whole.stop != "length" or len(whole.tokens) >= sampling.max_tokens
            self.listener.said(self._text(whole.tokens, ended), ended)
        self._known = [*tokens, *whole.tokens]
        return whole

    def _new(self, tokens: list[int]) -> list[int]:
        """The tokens behind those that the last completion had in common: from where an earlier
        turn was rewritten, all of another episode's."""
        return tokens[common_prefix(tokens, self._known) :]

    def _joined(self, whole: Completion, piece: Completion, stop: Sequence[str]) -> Completion:
        """Both, up to the token that completes a stop string, which may have begun in an earlier
        piece."""
        tokens, end, ended = whole.tokens + piece.tokens, len(whole.tokens), piece.stop
        for end in range(len(whole.tokens) + 1, len(tokens) + 1):
            text = self._tokenizer.decode(tokens[:end], skip_special_tokens=False)
            if any(string in text for string in stop):
                ended = "stop"
                break
        kept = end - len(whole.tokens)
        return Completion(
            tokens[:end],
            whole.logprobs + piece.logprobs[:kept],
            whole.versions + piece.versions[:kept],
            ended,
            piece.routes,
            piece.routes_version,
        )

    def _text(self, tokens: list[int], ended: bool) -> str:
        text = self._tokenizer.decode(tokens)
        return text if ended else text.rstrip(UNFINISHED)

    async def load_weights(self, weights: Weights, version: int) -> None:
        await self.inner.load_weights(weights, version)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self.inner.pause(mode)

    async def resume(self) -> None:
        await self.inner.resume()

    async def abort(self, request_id: str) -> None:
        await self.inner.abort(request_id)

    async def close(self) -> None:
        await self.inner.close()

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)
