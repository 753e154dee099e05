"""A model behind an OpenAI-compatible server as the teacher, by its log-probs of prompts."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlflow.algorithms.teachers.base import Teacher
from rlflow.algorithms.teachers.classroom import Classroom
from rlflow.algorithms.teachers.replies import Place, read_row
from rlflow.algorithms.teachers.vocabulary import check_tokenizers
from rlflow.errors import ConfigError, RLFlowError
from rlflow.net.http import GaveUp, Retryable, RetryPolicy, model_client
from rlflow.trainer.scoring import empty_scores
from rlflow.types import Batch
from rlflow.values import NonNegativeInt, PositiveFloat, PositiveInt

ROUTE = "/completions"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
PROBED_IDS, PROBE_ROW = 256, 64
SAME = 1e-4  # nats; a server's own rounding between two requests is less


@dataclass
class ServerTeacher(Teacher):
    """POST {url}/completions with the batch's rows of token ids; reads the prompt's log-probs.

    wire: `prompt_logprobs` is vLLM's key; `echo` the older `echo` with `logprobs`, for servers that
    have it and take ids. tokenizer: a directory with the server's tokenizer, to be compared whole
    with the policy's; without one the server's texts of 256 ids are compared. api_key_variable: the
    environment variable that holds the key. timeout_s: of one request; deadline_s: of a step's
    rows, retries included.

    vLLM gives log-probs of prompts at temperature 1 whatever the request says, so
    `rollout.temperature` must be 1 with it; the start checks that. The weights behind an address
    cannot be checked: a resumed run asks the same server again."""

    url: str
    model: str
    top_k: NonNegativeInt = 0
    prompt: str | None = None
    wire: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    tokenizer: str | None = None
    same_template: bool = True
    api_key_variable: str | None = None
    concurrency: PositiveInt = 8
    rows_per_request: PositiveInt = 4
    timeout_s: PositiveFloat = 120.0
    deadline_s: PositiveFloat = 600.0
    tries: PositiveInt = 5

    def __post_init__(self) -> None:
        super().__init__(self.top_k, self.prompt)
        variable = self.api_key_variable
        key = None if variable is None else os.environ.get(variable)
        if variable is not None and not key:
            raise ConfigError(
                f"algorithm.teacher.api_key_variable: the environment variable {variable} is not "
                "set."
            )
        address, self._client = model_client(
            "algorithm.teacher.url",
            self.url,
            ROUTE,
            key,
            self.concurrency,
            self.timeout_s,
        )
        self._url = address + ROUTE
        self._policy = RetryPolicy(self.tries, FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def open(self, room: Classroom) -> None:
        super().open(room)
        if self.tokenizer is not None:
            where = "algorithm.teacher.tokenizer"
            check_tokenizers(room.tokenizer, self.tokenizer, where, self.same_template)
        size = len(room.tokenizer)
        count = min(size, PROBED_IDS)
        ids = [number * size // count for number in range(count)]
        rows = [ids[start : start + PROBE_ROW] for start in range(0, count, PROBE_ROW)]
        rows = [row for row in rows if len(row) > 1]
        asked = self._ask(rows, [room.temperature] * len(rows))
        self._check_texts(rows, asked)
        if room.temperature != 1:
            plain = self._ask(rows[:1], [1.0])
            pairs = zip(asked[0][1:], plain[0][1:], strict=True)
            if max(abs(one.logprob - other.logprob) for one, other in pairs) < SAME:
                raise ConfigError(
                    f"{self._url}: it gives log-probs of prompts at temperature 1, whatever is "
                    "asked; the teacher must score at rollout.temperature = "
                    f"{room.temperature:g}. Set that to 1, or take algorithm.teacher {{name: "
                    "model, ...}."
                )

    def score(self, batch: Batch) -> dict[str, Tensor]:
        pairs = zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)
        rows = [row[:length] for row, length in pairs]
        temperatures = [one or 1.0 for one in batch.temperatures.tolist()]
        scores = empty_scores(batch, ("logprobs",), self.top_k)
        for row, places in enumerate(self._ask(rows, temperatures)):
            own, rest = slice(1, len(places)), places[1:]
            scores["logprobs"][row, own] = torch.tensor([place.logprob for place in rest])
            if self.top_k and rest:
                # (T - 1, k, 2): exact ids
                top = torch.tensor([place.top for place in rest], dtype=torch.float64)
                largest = int(top[..., 0].max())
                if largest >= len(self.room.tokenizer):
                    raise RLFlowError(
                        f"{self._url}: token {largest} is not in the policy's vocabulary."
                    )
                scores["top_ids"][row, own] = top[..., 0].long()
                scores["top_logprobs"][row, own] = top[..., 1].float()
        return scores

    def close(self) -> None:
        self._client.close()

    def _ask(self, rows: Sequence[list[int]], temperatures: Sequence[float]) -> list[list[Place]]:
        """The places of every row, in order. Raises RLFlowError for a late or a wrong answer."""
        count = len(rows)
        size = self.rows_per_request
        chunks = [range(at, min(at + size, count)) for at in range(0, count, size)]
        # Rows of one request share its temperature.
        parts = [
            [row for row in chunk if temperatures[row] == value]
            for chunk in chunks
            for value in sorted({temperatures[row] for row in chunk})
        ]
        futures = [
            self._client.submit(self._request, [rows[row] for row in part], temperatures[part[0]])
            for part in parts
        ]
        try:
            _, missing = wait(futures, self.deadline_s, return_when="FIRST_EXCEPTION")
            failed = [future for future in futures if future.done() and future.exception()]
            if missing and not failed:
                raise RLFlowError(
                    f"{self._url}: {len(missing)} of {len(futures)} requests are not answered "
                    f"after {self.deadline_s:g} s; raise algorithm.teacher.deadline_s or "
                    "concurrency, or take a faster server."
                )
            answers: dict[int, list[Place]] = {}
            for part, future in zip(parts, failed or futures, strict=False):
                answers.update(zip(part, future.result(), strict=True))
        finally:
            for future in futures:
                future.cancel()
        return [answers[row] for row in range(count)]

    async def _request(self, rows: list[list[int]], temperature: float) -> list[list[Place]]:
        async def attempt(deadline: float) -> Any:
            return await self._post(rows, temperature)

        try:
            reply = await self._policy.call_async(attempt, random.Random(len(rows[0])))
        except GaveUp as end:
            raise RLFlowError(
                f"{self._url}: no answer after {end.attempts} attempts; last: {end.last}."
            ) from None
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or len(choices) != len(rows):
            found = len(choices) if isinstance(choices, list) else "none"
            raise RLFlowError(
                f"{self._url}: expected {len(rows)} choices, one per row of token ids, found "
                f"{found}."
            )
        try:
            ordered = sorted(choices, key=lambda choice: choice["index"])
            return [
                read_row(self.wire, choice, row, self.top_k, self._url)
                for choice, row in zip(ordered, rows, strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise RLFlowError(
                f"{self._url}: an answer that cannot be read: {type(problem).__name__} {problem}."
            ) from None

    async def _post(self, rows: list[list[int]], temperature: float) -> Any:
        body = {
            "model": self.model,
            "max_tokens": 1,
            "prompt": rows,
            "temperature": temperature,
        }
        if self.wire == "echo":
            body |= {
                "echo": True,
                "logprobs": self.top_k,
                "return_tokens_as_token_ids": True,
            }
        else:
            body["prompt_logprobs"] = self.top_k
        reply = (await self._client.session.ask("POST", self._url, body)).checked()
        if reply.status != 200:
            raise RLFlowError(
                f"{self._url}: status {reply.status}: {reply.excerpt}. A teacher's server must "
                "take token ids as `prompt` and "
                f"give log-probs of them ({self.wire}); check algorithm.teacher.url, model, wire, "
                "top_k and the key."
            )
        try:
            return reply.json()
        except ValueError:
            raise Retryable(f"expected JSON, found {reply.excerpt}") from None

    def _check_texts(self, rows: Sequence[list[int]], answers: Sequence[list[Place]]) -> None:
        """Raises ConfigError where an id means another text to the server than to the policy."""
        tokenizer = self.room.tokenizer
        for row, places in zip(rows, answers, strict=True):
            for token, place in zip(row[1:], places[1:], strict=True):
                ours = tokenizer.decode([token], skip_special_tokens=False)
                unclear = (
                    place.text is None or "�" in ours + place.text or token in tokenizer.special_ids
                )
                if not unclear and ours.strip() != str(place.text).strip():
                    raise ConfigError(
                        f"{self._url}: token {token} is {place.text!r} to the server and {ours!r} "
                        "to the policy: its vocabulary "
                        "is another one, and its log-probs belong to other tokens. Take a teacher "
                        "with the policy's tokenizer."
                    )
