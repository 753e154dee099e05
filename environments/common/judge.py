"""A language model as a judge behind any OpenAI-compatible endpoint: its verdicts are kept, its
failures abort episodes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rlflow.components import check_options
from rlflow.errors import ConfigError, PolicyError, RLFlowError
from rlflow.storage.files import write_text
from rlflow.values import NonNegativeFloat, PositiveFloat, PositiveInt
from rlflow_environments.common.chat_endpoint import (
    ChatEndpoint,
    EndpointError,
    EndpointRefusedError,
    PromptRefusedError,
    UnreadableReplyError,
)

PAUSE_S = 0.5  # before the second attempt, at the most
MAX_REPLY_TOKENS = 1024

T = TypeVar("T")


class JudgeError(RLFlowError):
    """The judge's endpoint failed, after all attempts: the episode is aborted, neither right nor
    wrong."""


class UnreadableVerdictError(JudgeError):
    """The judge replied, but no reply could be read: no verdict."""


class RefusedVerdictError(UnreadableVerdictError, PolicyError):
    """The judge, which gave verdicts on others, refuses what the policy wrote: too long, or
    filtered. Unhandled, the episode counts as wrong."""


KINDS: dict[type, type[RLFlowError]] = {
    UnreadableReplyError: UnreadableVerdictError,
    PromptRefusedError: RefusedVerdictError,
    EndpointRefusedError: ConfigError,
}
"""Error of an endpoint -> what it is to those who ask a judge; else JudgeError."""


class JudgeEndpoint:
    """Asks for verdicts, each of them once: what was asked before is remembered, with a cache
    between runs too.

    Its keywords are the options of every component that `takes(JudgeEndpoint)`."""

    def __init__(
        self,
        where: str = "environment.judge",
        *,
        url: str,
        model: str,
        api_key_variable: str = "OPENAI_API_KEY",
        timeout_s: PositiveFloat = 60.0,
        tries: PositiveInt = 5,
        concurrency: PositiveInt = 32,
        temperature: NonNegativeFloat = 0.0,
        cache: str | Path | None = None,
    ) -> None:
        """where: the options' place in the configuration. url: of the API, such as
        http://localhost:8000/v1. api_key_variable: the environment variable with the key; none is
        sent where it is not set. timeout_s: of one request. tries: requests per verdict, replies
        that cannot be read included. concurrency: requests at a time. cache: a folder of verdicts,
        kept between runs (default: in memory). Raises ConfigError, MissingPackageError.
        """
        self._endpoint = ChatEndpoint(
            url,
            model,
            api_key=os.environ.get(api_key_variable),
            concurrency=concurrency,
            timeout_s=timeout_s,
            tries=tries,
            pause_s=PAUSE_S,
            temperature=temperature,
            max_tokens=MAX_REPLY_TOKENS,
            name_of=f"{where}.{{}}".format,
        )
        self._where = where
        self._identity = [self._endpoint.url, model, temperature]
        self._folder = None if cache is None else Path(cache).expanduser()
        self._known: dict[str, Any] = {}
        self._asked: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()

    async def verdict(self, prompt: str, read: Callable[[str], T]) -> tuple[T, bool]:
        """(what `read` makes of the model's reply, whether it was known): plain data, of which JSON
        can be made. `read` raises UnreadableReply.

        Raises UnreadableVerdictError where no reply could be read, RefusedVerdictError where this
        prompt is refused, JudgeError where no reply came, ConfigError where the endpoint refuses
        whatever it is asked.
        """
        key = hashlib.sha256(json.dumps([*self._identity, prompt]).encode()).hexdigest()
        file = None if self._folder is None else self._folder / f"{key}.json"
        known = self._known.get(key)
        if known is None and file is not None:
            known = await asyncio.to_thread(_recall, file)
        if known is not None:
            return known, True
        with self._lock:
            asked = self._asked.get(key)
            shared = asked is not None
            if asked is None:
                asked = self._asked[key] = self._endpoint.submit(prompt, read)
        if not shared:
            asked.add_done_callback(lambda ended: self._note(key, ended))
        try:  # whoever asks no more leaves the request to the others
            verdict = await asyncio.shield(asyncio.wrap_future(asked))
        except EndpointError as problem:
            kind = KINDS.get(type(problem), JudgeError)
            raise kind(f"{self._where}: {problem}") from None
        if not shared and file is not None:
            text = json.dumps({"verdict": verdict}) + "\n"
            await asyncio.to_thread(write_text, file, text, durable=False)
        return verdict, shared

    def close(self) -> None:
        """Drops what waits for the judge and closes the connections."""
        self._endpoint.close()

    def _note(self, key: str, ended: Future[Any]) -> None:
        if not ended.cancelled() and not ended.exception():
            self._known[key] = ended.result()
        self._asked.pop(key, None)


def _recall(file: Path) -> Any:
    """The verdict of a file; None without one."""
    try:
        return json.loads(file.read_bytes())["verdict"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def make_judge(options: Mapping[str, Any], where: str) -> JudgeEndpoint:
    """The judge of a mapping in the configuration, checked. Raises ConfigError,
    MissingPackageError."""
    return JudgeEndpoint(
        where, **check_options(options, JudgeEndpoint, where=where, reserved=("where",))
    )
