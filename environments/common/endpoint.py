"""A language model behind any OpenAI-compatible endpoint: many prompts at once, retries, answers that are kept on disk."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import ConfigError, MissingPackageError, RLFlowError
from rlflow_environments.common.http import retry_after_s
from rlflow_environments.common.jsonl import BadRow, parse_object, records

if TYPE_CHECKING:
    import httpx

LONGEST_PAUSE_S = 30.0


class EndpointError(RLFlowError):
    """The endpoint gave no answer after all attempts, or refused the request."""


class ChatEndpoint:
    """POST {url}/chat/completions with one user message per prompt.

    Connection errors, timeouts, 429 and 5xx are tried again, with pauses that double and honour Retry-After; anything else is
    an error at once.
    """

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
    ) -> None:
        """pause_s: before the second attempt. cache: a file of answers that are not asked for again. Raises ConfigError."""
        for name, value in (("concurrency", concurrency), ("timeout-s", timeout_s), ("tries", tries)):
            if value <= 0:
                raise ConfigError(f"--{name}: expected more than 0, found {value}.")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint: expected an address such as http://localhost:8001/v1, found '{url}'.")
        self._url = completions_url(url)
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._api_key = api_key
        self._concurrency, self._timeout_s, self._tries, self._pause_s = concurrency, timeout_s, tries, pause_s
        self._answers = _Answers(cache)

    def complete(
        self, prompts: Sequence[str], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[str]:
        """The model's answers, in order. What was answered before an error or a kill is not asked for again, with a cache.

        Raises EndpointError, MissingPackageError.
        """
        asked = [prompt for prompt in dict.fromkeys(prompts) if self._answers.get(self._key(prompt)) is None]
        done = len(prompts) - len(asked)
        client = open_client(self._api_key, self._timeout_s, self._concurrency)
        with client, ThreadPoolExecutor(self._concurrency) as threads:
            try:
                for _ in threads.map(lambda prompt: self._ask(client, prompt), asked):
                    done += 1
                    progress(done, len(prompts))
            except BaseException:  # also Ctrl-C: what has not begun is not asked any more
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [self._answers.get(self._key(prompt)) or "" for prompt in prompts]

    def _key(self, prompt: str) -> str:
        """What an answer depends on; not the address, which may change between runs."""
        return hashlib.sha256(json.dumps([self._body, prompt], sort_keys=True).encode()).hexdigest()

    def _ask(self, client: httpx.Client, prompt: str) -> None:
        import httpx

        body = {**self._body, "messages": [{"role": "user", "content": prompt}]}
        problem, wait = "", 0.0
        for attempt in range(self._tries):
            time.sleep(wait)
            # Jitter keeps the requests of one run from coming back all at once; it touches no result.
            wait = min(LONGEST_PAUSE_S, self._pause_s * 2**attempt) * random.Random(f"{prompt}{attempt}").uniform(
                0.5, 1.0
            )
            try:
                response = client.post(self._url, json=body)
            except httpx.TransportError as failure:
                problem = f"{type(failure).__name__} {failure}".rstrip()
                continue
            if response.status_code == 200:
                text = completion_text(response)
                if text is None:
                    raise EndpointError(f"{self._url}: expected a chat completion, found {response.text[:200]}")
                self._answers.put(self._key(prompt), text)
                return
            problem = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code != 429 and response.status_code < 500:
                raise EndpointError(
                    f"{self._url}: {problem}. Mend --endpoint, --model or the key's environment variable."
                )
            wait = max(wait, retry_after_s(response.headers, LONGEST_PAUSE_S))
        raise EndpointError(
            f"{self._url}: no answer after {self._tries} attempts; last: {problem}. Give the command again when the endpoint is "
            "back: it goes on where it stopped."
        )


class _Answers:
    """{key: answer}, and with a path a file to which each answer is appended at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()
        if path is not None and path.is_file():
            for _, _, record in records(path.read_bytes()):
                try:
                    row = parse_object(record)
                    self._known[str(row["key"])] = str(row["answer"])
                except (BadRow, KeyError):  # the line that a kill cut off
                    continue

    def get(self, key: str) -> str | None:
        with self._lock:
            return self._known.get(key)

    def put(self, key: str, answer: str) -> None:
        with self._lock:
            self._known[key] = answer
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    # A newline first as well, so that a line that a kill cut off spoils none but itself.
                    file.write("\n" + json.dumps({"key": key, "answer": answer}, ensure_ascii=False) + "\n")


def completions_url(url: str) -> str:
    """Where the completions of an API are, given its address with or without that path."""
    return url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


def open_client(api_key: str | None, timeout_s: float, concurrency: int) -> httpx.Client:
    """An HTTP client with that many connections, which sends the key if there is one. Raises MissingPackageError."""
    try:
        import httpx
    except ImportError:
        raise MissingPackageError(
            "a model at an endpoint needs the package httpx. Install it with: pip install 'rlflow[judge]'"
        ) from None
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(headers=headers, timeout=timeout_s, limits=limits)


def completion_text(response: httpx.Response) -> str | None:
    """The text of a chat completion, empty where the model gave none; None if the body is no chat completion."""
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else ""
