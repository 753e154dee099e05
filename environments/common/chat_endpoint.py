"""A language model behind any OpenAI-compatible endpoint: many requests at once, retries, answers
that are kept on disk.

Not the package openai: that retries by a policy of its own, which would multiply with ours, and
brings a dozen packages for what is one POST here."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from rlflow.errors import RLFlowError
from rlflow.net.http import GaveUp, Retryable, RetryPolicy, model_client
from rlflow.values import PositiveFloat, checked
from rlflow_environments.common.jsonl import BadRow, parse_object, records
from rlflow_environments.common.text import well_formed

ROUTE = "/chat/completions"
LONGEST_PAUSE_S = 30.0
OF_A_PROMPT = (400, 413, 422)
"""What endpoints answer to a prompt that is too long for the model, among others."""

T = TypeVar("T")


class EndpointError(RLFlowError):
    """The endpoint gave no answer after all attempts."""


class EndpointRefusedError(EndpointError):
    """The endpoint refuses the request, as it would any other attempt at it: a wrong address, model
    or key."""


class UnreadableReply(Retryable):
    """The model replied, but not what was asked for: another sample may be readable, at once."""

    def __init__(self, text: str) -> None:
        super().__init__(text, at_once=True)


class UnreadableReplyError(EndpointError):
    """The last of all attempts brought a reply, but none that could be read."""


class PromptRefusedError(UnreadableReplyError):
    """The endpoint, which answered others, refuses this prompt: it is too long, or filtered."""


class ChatEndpoint:
    """POST {url}/chat/completions with one user message per prompt, `concurrency` at a time, from a
    thread of its own.

    Connection errors, timeouts, 429 and 5xx are tried again, see RetryPolicy; so are replies that
    the reader of a prompt refuses. Anything else is an error at once, of a single prompt where the
    endpoint has answered others."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        concurrency: int = 8,
        timeout_s: float = 120.0,
        tries: int = 5,
        pause_s: float = 1.0,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        cache: Path | None = None,
        name_of: Callable[[str], str] = str,
    ) -> None:
        """timeout_s: of one attempt. pause_s: before the second attempt, at the most. cache: a file
        of answers that `complete` does not ask for again. name_of: what the user calls an option,
        for messages.

        Raises ConfigError.
        """
        for name, value in (
            ("timeout_s", timeout_s),
            ("tries", tries),
            ("concurrency", concurrency),
        ):
            checked(PositiveFloat, value, name_of(name))
        self._body = {
            "model": model,
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        self._policy = RetryPolicy(int(tries), pause_s, LONGEST_PAUSE_S)
        self._generator = random.Random()
        self._fix = (
            f"Fix {name_of('url')}, {name_of('model')} or the key in {name_of('api_key_variable')}."
        )
        self._answers = _Answers(cache)
        self._has_answered = False
        address, self._client = model_client(
            name_of("url"), str(url), ROUTE, api_key, int(concurrency), timeout_s
        )
        self.url = address + ROUTE

    def submit(self, prompt: str, read: Callable[[str], T]) -> Future[T]:
        """What `read` makes of the model's reply, to come; `read` raises UnreadableReply for a
        reply that is of no use.

        The result raises EndpointError, EndpointRefusedError, UnreadableReplyError.
        """
        return self._client.submit(self._ask, prompt, read)

    async def ask(self, prompt: str, read: Callable[[str], T]) -> T:
        """As `submit`, awaited in any event loop."""
        return await asyncio.wrap_future(self.submit(prompt, read))

    def complete(
        self,
        prompts: Sequence[str],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[str]:
        """The model's answers, in order. With a cache, what was answered before an error or a kill
        is not asked for again.

        Raises EndpointError.
        """
        missing = [
            prompt
            for prompt in dict.fromkeys(prompts)
            if self._key(prompt) not in self._answers.known
        ]
        done = len(prompts) - len(missing)
        over = threading.Event()
        futures = [self._client.submit(self._ask_and_keep, prompt, over) for prompt in missing]
        try:
            for future in futures:
                future.result()
                done += 1
                progress(done, len(prompts))
        except EndpointRefusedError:
            raise
        except EndpointError as problem:
            again = "Give the command again when the endpoint is back: it resumes where it stopped."
            raise EndpointError(f"{problem} {again}") from None
        finally:  # after an error or Ctrl-C: what waits is dropped, answers under way are kept
            over.set()
            wait(futures)
        return [self._answers.known[self._key(prompt)] for prompt in prompts]

    def close(self) -> None:
        """Drops what waits for the model and closes the connections."""
        self._client.close()

    def _key(self, prompt: str) -> str:
        """What an answer depends on; not the address, which may change between runs."""
        return hashlib.sha256(json.dumps([self._body, prompt], sort_keys=True).encode()).hexdigest()

    async def _ask_and_keep(self, prompt: str, over: threading.Event) -> None:
        if not over.is_set():
            self._answers.put(self._key(prompt), await self._ask(prompt, str, whole=False))

    async def _ask(self, prompt: str, read: Callable[[str], T], *, whole: bool = True) -> T:
        """whole: a reply that was cut off cannot be read."""

        async def attempt(deadline: float) -> T:
            return read(await self._post(prompt, whole))

        try:
            return await self._policy.call_async(attempt, self._generator)
        except GaveUp as end:
            kind = UnreadableReplyError if isinstance(end.last, UnreadableReply) else EndpointError
            raise kind(
                f"{self.url}: no answer after {end.attempts} attempts; last: {end.last}."
            ) from None

    async def _post(self, prompt: str, whole: bool) -> str:
        """The reply without its thought, empty where the model gave none. Raises Retryable,
        EndpointRefusedError, PromptRefusedError."""
        body = {
            **self._body,
            "messages": [{"role": "user", "content": well_formed(prompt)}],
        }
        reply = (await self._client.session.ask("POST", self.url, body)).checked()
        if reply.status != 200:
            told = f"{self.url}: status {reply.status}: {reply.excerpt}"
            if whole and self._has_answered and reply.status in OF_A_PROMPT:
                raise PromptRefusedError(f"{told}, for a prompt of {len(prompt):,} characters.")
            raise EndpointRefusedError(f"{told}. {self._fix}")
        self._has_answered = True
        try:
            choice = reply.json()["choices"][0]
            content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise UnreadableReply(f"expected a chat completion, found {reply.excerpt}") from None
        # null where the model only thought, or called a tool
        said = content.rpartition("</think>")[2] if isinstance(content, str) else ""
        if whole and (cut or said.lstrip().startswith("<think>")):
            raise UnreadableReply(
                f"expected a whole reply, found one of {self._body['max_tokens']} tokens that was "
                f"cut off: {said[-100:]!r}"
            )
        return said


class _Answers:
    """{key: answer}, and with a path a file to which each answer is appended at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.known: dict[str, str] = {}
        if path is not None and path.is_file():
            for _, _, record in records(path.read_bytes()):
                try:
                    row = parse_object(record)
                    self.known[str(row["key"])] = str(row["answer"])
                except (BadRow, KeyError):  # the line that a kill cut off
                    continue

    def put(self, key: str, answer: str) -> None:
        """Called in the client's thread alone."""
        self.known[key] = answer
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            row = json.dumps({"key": key, "answer": answer}, ensure_ascii=False)
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                # A newline first as well, so that a line that a kill cut off spoils none but itself
                file.write(f"\n{row}\n")
