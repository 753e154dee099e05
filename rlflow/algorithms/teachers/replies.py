"""Log-probs of a prompt's tokens in the replies of completion servers, in either of two forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.errors import RLFlowError

ID = "token_id:"


@dataclass(frozen=True)
class Place:
    """A token of the prompt: its log-prob, the likeliest (id, log-prob) in its place, and the
    server's text of it, if known."""

    logprob: float
    top: list[tuple[int, float]]
    text: str | None = None


def read_row(
    wire: str, choice: Mapping[str, Any], row: list[int], top_k: int, who: str
) -> list[Place]:
    """The places of one row of token ids. Raises RLFlowError for an answer about other tokens."""
    if wire == "echo":
        return _echoed(choice, row, top_k, who)
    found = choice.get("prompt_logprobs")
    if not isinstance(found, list):
        raise RLFlowError(
            f"{who}: its answer has no prompt_logprobs, so it cannot be a teacher; take a server "
            "that gives log-probs of prompts (vLLM does), or try algorithm.teacher.wire=echo."
        )
    _check_length(found, row, who)
    places = [Place(0.0, [])]
    for token, entry in zip(row[1:], found[1:], strict=True):
        own = entry.get(str(token))
        if own is None:
            raise RLFlowError(
                f"{who}: expected the log-prob of token {token}, found {', '.join(entry)}."
            )
        ranks = sorted((one["rank"], int(number), one["logprob"]) for number, one in entry.items())
        top = [(number, float(logprob)) for rank, number, logprob in ranks if rank <= top_k]
        text = own.get("decoded_token")
        places.append(Place(float(own["logprob"]), _complete(top, top_k, who), text))
    return places


def _echoed(choice: Mapping[str, Any], row: list[int], top_k: int, who: str) -> list[Place]:
    found: Any = choice.get("logprobs")
    logprobs = found.get("token_logprobs") if isinstance(found, Mapping) else None
    if not isinstance(logprobs, list):
        raise RLFlowError(
            f"{who}: its answer has no logprobs of the echoed prompt, so it cannot be a teacher; "
            "see wire."
        )
    # The rest was sampled
    logprobs = logprobs[: len(row)]
    _check_length(logprobs, row, who)
    places = [Place(0.0, [])]
    for place in range(1, len(row)):
        said = str(found["tokens"][place])
        if said.startswith(ID) and said != f"{ID}{row[place]}":
            raise RLFlowError(
                f"{who}: expected the log-prob of token {row[place]}, found that of {said}."
            )
        top: list[tuple[int, float]] = []
        if top_k:
            entry = found["top_logprobs"][place]
            if not all(key.startswith(ID) for key in entry):
                raise RLFlowError(
                    f"{who}: it names the likeliest tokens by text, not by id; leave out "
                    "algorithm.teacher.top_k."
                )
            top = [(int(key.removeprefix(ID)), float(value)) for key, value in entry.items()]
            top = sorted(top, key=lambda pair: -pair[1])[:top_k]
        text = None if said.startswith(ID) else said
        places.append(Place(float(logprobs[place]), _complete(top, top_k, who), text))
    return places


def _check_length(found: list[Any], row: list[int], who: str) -> None:
    if len(found) != len(row):
        raise RLFlowError(
            f"{who}: expected log-probs of {len(row)} tokens, found {len(found)}: the server did "
            "not take the ids as they are."
        )


def _complete(top: list[tuple[int, float]], top_k: int, who: str) -> list[tuple[int, float]]:
    if len(top) != top_k:
        raise RLFlowError(
            f"{who}: expected the {top_k} likeliest tokens of each place, found {len(top)}; lower "
            "top_k."
        )
    return top
