"""Where vLLM runs, as an engine sees it: messages to it, and their replies."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlflow.errors import RolloutError

CALL_S = 600.0  # of a call that is no generation: a step under way is waited for, and a bucket of weights is loaded


@dataclass(frozen=True)
class Sent:
    """A message that was sent, by its number, and its reply, or a RolloutError where nobody will reply."""

    call: int
    reply: Future[dict[str, Any]]


class VLLMBackend(ABC):
    """vLLM somewhere else. Used from any thread and loop. The operations are those of `worker.VLLMServer`."""

    name = "vLLM"
    """How errors call it."""

    failure: str = ""
    """How it ended by itself, where it did and can be started again."""

    heard: float
    """When it last said something, by time.monotonic."""

    @abstractmethod
    def send(self, operation: str, **fields: Any) -> Sent:
        """Sends a message."""

    @abstractmethod
    def wait_until_ready(self, limit_s: float) -> dict[str, Any]:
        """What it says of itself: `vllm` (its version) and `max_tokens`. Raises RolloutError where it fails, or is not ready in
        time."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once."""

    @abstractmethod
    def close(self) -> None:
        """Ends it."""

    @abstractmethod
    def checked(self, operation: str, reply: dict[str, Any]) -> dict[str, Any]:
        """The reply. Raises RolloutError for one that tells of an error."""

    @abstractmethod
    def last_words(self) -> str:
        """What is known about why it is silent, to end a sentence."""

    async def ask(
        self, operation: str, limit_s: float = CALL_S, may_be_silent: Callable[[], bool] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The reply to a message. may_be_silent: whether it has nothing to do now; a silence counts only where it has.

        Raises RolloutError: it has ended, has failed at this, or was silent for limit_s seconds."""
        return await self.reply(operation, self.send(operation, **fields), limit_s, may_be_silent)

    async def reply(
        self,
        operation: str,
        sent: Sent,
        limit_s: float = CALL_S,
        may_be_silent: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """The reply to a message that was sent; see `ask`."""
        since = time.monotonic()
        waited = asyncio.wrap_future(sent.reply)
        while True:
            done, _ = await asyncio.wait({waited}, timeout=min(limit_s, 5.0))
            if done:
                return self.checked(operation, waited.result())
            if may_be_silent is not None and may_be_silent():
                since = time.monotonic()
            silent_s = time.monotonic() - max(since, self.heard)
            if silent_s >= limit_s:
                raise RolloutError(
                    f"{self.name} has been silent for {silent_s:.0f} s, with '{operation}' unanswered; {self.last_words()}"
                )
