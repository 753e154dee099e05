"""Evaluation of a model behind an OpenAI-compatible chat server. It takes and gives text: what
stands for tokens here are pieces of text, so that limits in tokens hold roughly and log-probs are
not known. Never for training."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import ConfigError, ModelError, RolloutError
from rlflow.models.calls.reader import CallReader
from rlflow.net.http import GaveUp, Retryable, RetryPolicy, model_client
from rlflow.rollout.engine import Completion, FixedEngine, Sampling
from rlflow.rollout.tokenizer import NextTurn, Speech, as_messages
from rlflow.types import Message, Observation

ROUTE = "/chat/completions"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
MOST_STOPS = 4  # that OpenAI's interface takes
PIECE = 4  # characters of English per token, about
MESSAGE, CONTENT, BEGIN, END = "\ue000", "\ue001", "\ue002", "\ue003"
"""Private characters that set messages apart, their roles and contents, and what the model said;
taken out of everybody's text."""
_PRIVATE = str.maketrans(dict.fromkeys((MESSAGE, CONTENT, BEGIN, END)))
_OPENING = re.compile(r"</([^<>/\s]+)>$")
WARNING = (
    "a chat server takes and gives text: what was sampled is not known token by token, limits in "
    "tokens hold roughly, and scores may differ from those of the same model as --model DIR"
)


class PiecedText:
    """Text in pieces of a few characters, with a number for each: what a rollout needs of a
    tokenizer, exact in both directions."""

    eos_ids: tuple[int, ...] = ()
    call_reader = CallReader()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """options: of the chat template, which the server renders."""
        self.options = dict(options or {})
        self._pieces: list[str] = [BEGIN, END]
        self._numbers = {piece: number for number, piece in enumerate(self._pieces)}

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> Any:
        """Raises ConfigError: a server answers with calls in a form of its own, not with text."""
        raise ConfigError(
            f"--server: this environment presents {len(tools)} tool(s) in the chat template, and a "
            "server would answer with calls instead of text; take a protocol without tools, or "
            "--model DIR."
        )

    def with_options(self, options: Mapping[str, Any]) -> PiecedText:
        """This text. Raises ModelError for options that the server is not asked for."""
        if {**self.options, **options} != self.options:
            raise ModelError(
                "chat_template_kwargs: a chat server is sent rollout.chat_template_options alone, "
                f"found {dict(options)!r:.80}; set them there."
            )
        return self

    def encode_prompt(self, prompt: Observation, chat_template: bool = False) -> list[int]:
        """The prompt as messages: text is one of the user."""
        told = [
            f"{MESSAGE}{_own(one['role'])}{CONTENT}{_own(one['content'])}"
            for one in as_messages(prompt)
        ]
        return self._numbered("".join(told))

    def encode_text(self, text: str) -> list[int]:
        return self._numbered(_own(text))

    def encode_turn(
        self,
        history: Sequence[Message],
        response: str,
        answer: Sequence[Message],
        closing: int | None,
        exact: bool = False,
    ) -> NextTurn:
        """The answer: what becomes of earlier turns is the server's affair."""
        return NextTurn(self.encode_prompt(list(answer)))

    def without_control(self, text: str) -> str:
        """The text without the marks."""
        return _own(text)

    def response_text(self, response: Sequence[int]) -> str:
        """What the model said."""
        return self.decode(response)

    def speech(self, response: Sequence[int]) -> Speech:
        """What a response says: text, as a server gives it."""
        return (self.decode(response),)

    def own_words(self, speech: Speech) -> str:
        return _own("".join(map(str, speech)))

    def recognise(self, content: str, said: Mapping[str, Speech]) -> str:
        """The content: text has no control tokens."""
        return content

    def encode_response(self, text: str) -> list[int]:
        """What the model said, between marks: it is recognised in the conversation again."""
        return [0, *self._numbered(_own(text)), 1]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(
            self._pieces[token] for token in tokens if token > 1 or not skip_special_tokens
        )

    def _numbered(self, text: str) -> list[int]:
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        for piece in pieces:
            if piece not in self._numbers:
                self._numbers[piece] = len(self._pieces)
                self._pieces.append(piece)
        return [self._numbers[piece] for piece in pieces]


def _own(text: str) -> str:
    return text.translate(_PRIVATE)


def messages_of(text: str) -> list[Message]:
    """The conversation behind what a rollout has of it: the prompt's messages, the model's
    responses, and as the user's what the environment said in between."""
    messages: list[Message] = []
    for part in re.split(f"({BEGIN}[^{END}]*{END}|{MESSAGE}[^{CONTENT}]*{CONTENT})", text):
        if part.startswith(MESSAGE):
            messages.append({"role": part[1:-1], "content": ""})
        elif part.startswith(BEGIN):
            messages.append({"role": "assistant", "content": part[1:-1]})
        elif messages and messages[-1]["role"] != "assistant":
            messages[-1]["content"] += part
        elif part:
            messages.append({"role": "user", "content": part})
    return messages


class ChatEngine(FixedEngine):
    """POST {url}/chat/completions with the conversation so far. Log-probs are NaN."""

    def __init__(
        self,
        url: str,
        text: PiecedText,
        *,
        model: str | None = None,
        api_key_variable: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        timeout_s: float = 600.0,
        tries: int = 5,
    ) -> None:
        """url: of the API, such as http://localhost:8000/v1. model: None takes the only one that
        the server lists. api_key_variable: the environment variable with the key; none is sent
        where it is not set. timeout_s: of an attempt.

        Raises ConfigError."""
        key = os.environ.get(api_key_variable)
        self._base, self._client = model_client("--server", url, ROUTE, key, concurrency, timeout_s)
        self._text = text
        self._policy = RetryPolicy(tries, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.max_concurrency = concurrency
        try:
            self.model = model or self._only_model()
        except BaseException:
            self.hang_up()
            raise

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """The server's reply. Raises RolloutError where it gives none, ConfigError where it refuses
        all requests."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages_of(self._text.decode(tokens, skip_special_tokens=False)),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if self._text.options:  # as vLLM and SGLang name them
            body["chat_template_kwargs"] = dict(self._text.options)
        if sampling.stop:
            body["stop"] = list(sampling.stop[:MOST_STOPS])
        if sampling.seed is not None and sampling.temperature > 0:
            body["seed"] = sampling.seed % 2**31
        said, cut = await asyncio.wrap_future(self._client.submit(self._reply, body, sampling.stop))
        made = self._text.encode_response(said)
        return Completion(
            made, [float("nan")] * len(made), [0] * len(made), "length" if cut else "stop"
        )

    async def _reply(self, body: dict[str, Any], stops: Sequence[str]) -> tuple[str, bool]:
        async def attempt(deadline: float) -> dict[str, Any]:
            return await self._post(body)

        try:
            choice = await self._policy.call_async(attempt, random.Random(len(body["messages"])))
        except GaveUp as end:
            raise RolloutError(
                f"{self._base}: no answer after {end.attempts} attempts; last: {end.last}."
            ) from None
        text = choice["message"].get("content")
        text = text if isinstance(text, str) else ""
        if choice.get("finish_reason") == "length":
            return text, True
        return with_stop(text, choice.get("stop_reason", choice.get("matched_stop")), stops), False

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        url = self._base + ROUTE
        reply = (await self._client.session.ask("POST", url, body)).checked()
        if reply.status in (401, 403, 404):
            raise ConfigError(
                f"--server {self._base}: status {reply.status}: {reply.excerpt}. Correct the "
                "address, --server-model, or the key in the variable of --api-key-variable."
            )
        if reply.status != 200:  # this conversation alone, which may be too long for the model
            raise RolloutError(f"{self._base}: status {reply.status}: {reply.excerpt}")
        try:
            choice = reply.json()["choices"][0]
            if not isinstance(choice["message"], dict):
                raise TypeError("a message that is no object")
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            told = f"expected a chat completion, found {reply.excerpt}"
            raise Retryable(told, at_once=True) from None
        return choice

    async def _models(self, deadline: float) -> list[str]:
        reply = (await self._client.session.ask("GET", f"{self._base}/models")).checked()
        try:
            return [str(one["id"]) for one in reply.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return []

    def _only_model(self) -> str:
        try:
            found = self._client.call(self._policy.call_async, self._models, random.Random(0))
        except GaveUp as end:
            raise ConfigError(
                f"--server {self._base}: no answer after {end.attempts} attempts; last: {end.last}."
            ) from None
        if len(found) != 1:
            listed = ", ".join(found[:8]) or "none that it tells"
            raise ConfigError(f"--server {self._base}: give --server-model; its models: {listed}.")
        return found[0]

    async def close(self) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Closes the connections."""
        self._client.close()


def with_stop(text: str, told: Any, stops: Sequence[str]) -> str:
    """The reply with the stop string that servers leave out: the one that the server names, else
    the closing tag of an element that the reply opened last and did not close; nothing where the
    model ended by itself."""
    if isinstance(told, str) and told in stops:
        return text if text.endswith(told) else text + told
    if told is not None or any(stop in text for stop in stops):
        return text
    opened = {text.rfind(f"<{tag[1]}>"): stop for stop in stops if (tag := _OPENING.search(stop))}
    last = max(opened, default=-1)
    return text + opened[last] if last >= 0 else text
