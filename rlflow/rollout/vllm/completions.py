"""Requests to a server for completions, and its answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.errors import ConfigError, RolloutError
from rlflow.models.entries import Experts
from rlflow.models.vocabulary import known_vocab
from rlflow.rollout.engine import Completion, Sampling, Stop

STOPS: dict[str, Stop] = {"stop": "stop", "length": "length", "abort": "aborted"}
"""vLLM's words -> ours."""
NEVER, MOST_NEVER = -100.0, 1024
"""Added to the logit of an id that is not to be sampled, the least that vLLM takes; and of how many
ids it takes one in a request."""


@dataclass(frozen=True)
class Sampled:
    """A completion. cached: tokens of its prompt that were in vLLM's cache."""

    completion: Completion
    cached: int


@dataclass(frozen=True, eq=False)
class Sent:
    """A request to generate that was sent. name: of it at the server."""

    name: str
    reply: Future[Sampled]


def unknown_ids(path: str | Path, rows: int | None) -> range:
    """The ids of a model with so many rows that its tokenizer has not (`known_vocab`). Raises
    ConfigError for more of them than vLLM takes in a request."""
    unknown = range(known_vocab(path, rows), rows) if rows else range(0)
    if len(unknown) > MOST_NEVER:
        raise ConfigError(
            f"rollout.engine: {path} has {len(unknown)} rows more than its tokenizer has ids, and "
            f"vLLM leaves out {MOST_NEVER} at the most, so it would sample tokens that are none; "
            "cut the embedding to the tokenizer's size (transformers: resize_token_embeddings), "
            "or take engine=embedded."
        )
    return unknown


def sampling_arguments(
    sampling: Sampling,
    max_tokens: int,
    stop_tokens: tuple[int, ...],
    place: int,
    unknown: range = range(0),
) -> dict[str, Any]:
    """Keywords of vLLM's SamplingParams for the part of a request that begins at a place of its
    row.

    unknown: ids that are not sampled, as no token has them. Of end-of-sequence tokens vLLM knows
    those only that the request names. It begins a request's random numbers anew in each part, and
    those of a part before are in its tokens."""
    seed = sampling.seed
    return {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "stop": list(sampling.stop),
        "stop_token_ids": [*sampling.stop_token_ids, *stop_tokens],
        "seed": None if seed is None else hash((seed, place)) & 0x7FFFFFFFFFFFFFFF,
        "logprobs": 0,  # of the sampled token
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
        "include_stop_str_in_output": True,
        **({"logit_bias": dict.fromkeys(map(str, unknown), NEVER)} if unknown else {}),
    }


def answered(
    answer: Mapping[str, Any],
    known: Mapping[str, int],
    wanted: int,
    name: str,
    experts: Experts | None = None,
    prompt: int = 0,
) -> Sampled:
    """The completion that a server sent. known: versions by the server's names. wanted: the version
    that was loaded when it was asked. name: of the server. experts: those that it names to each
    token. prompt: tokens of the request's.

    Raises RolloutError for an answer that is none, tokens of other weights than those of `wanted`
    or of a later version, an end that is none, and routes that are not those of all tokens."""
    try:
        choice = answer["choices"][0]
        tokens = [int(token) for token in choice["token_ids"] or ()]
        places = (choice["logprobs"] or {}).get("content") or []
        logprobs = [float(place["logprob"]) for place, _ in zip(places, tokens, strict=True)]
        spans = choice["weight_versions"] or ()
        names = [one["version"] for one in spans for _ in range(one["start"], one["end"])]
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        cached, stop = details.get("cached_tokens") or 0, str(choice["finish_reason"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__} {error}"
        raise RolloutError(f"{name} sent what is no completion ({what}).") from None
    if len(names) != len(tokens):
        raise RolloutError(
            f"{name} told the versions of {len(names)} tokens out of {len(tokens)}; expected vLLM "
            "0.32 or later."
        )
    versions = [known.get(one, -1) for one in names]
    if versions and min(versions) < wanted:
        found = names[versions.index(min(versions))]
        raise RolloutError(
            f"{name} sampled with weights '{found}' where version {wanted} or later was expected: "
            "it was started anew, or somebody else gave it weights. Start the run again with "
            "--resume."
        )
    if stop not in STOPS:
        raise RolloutError(f"{name} ended a request with '{stop}'; expected {', '.join(STOPS)}.")
    done = Completion(tokens, logprobs, versions, STOPS[stop])
    if experts is not None and not done.interrupted:  # what goes on has all in its next answer
        sent, count = choice.get("routed_experts"), prompt + len(tokens) - 1
        done.routes = decoded_routes(sent, experts, count, f"{name}: {cached} tokens were cached")
    return Sampled(done, cached)


def decoded_routes(sent: Any, experts: Experts, tokens: int, name: str) -> Tensor:
    """(tokens, layers with experts, k) of vLLM's `routed_experts`: an array (tokens, layers, k) in
    numpy's format and base64. Raises RolloutError for anything else, and for fewer tokens."""
    if sent is None:
        raise RolloutError(
            f"{name}; it did not say to which experts tokens went: start it with "
            "--enable-return-routed-experts, or set trainer.router_replay=recompute."
        )
    expected = (tokens, len(experts.sparse), experts.top_k)
    try:
        stream = io.BytesIO(base64.b64decode(sent, validate=True))
        np.lib.format.read_magic(stream)
        shape, _, kind = np.lib.format.read_array_header_1_0(stream)
        if shape == expected and kind.kind in "ui":  # before anything of that size is made
            values = np.frombuffer(stream.read(), kind).reshape(shape)[:, list(experts.sparse)]
            return torch.from_numpy(values if kind == np.uint8 else values.astype(np.int32))
    except (ValueError, TypeError, EOFError) as error:
        raise RolloutError(f"{name}; it sent what are no routes ({error}).") from None
    raise RolloutError(
        f"{name}; expected routes of (tokens, layers, experts of a token) {expected}, found "
        f"{shape}: those of a cached prefix, or of some layers, are not there."
    )
