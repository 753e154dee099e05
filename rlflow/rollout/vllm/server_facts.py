"""Facts of a vLLM server: whether it answers, which model and weights it has, whether its log-probs
are of the distribution that is sampled from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.errors import RolloutError
from rlflow.models.entries import Experts
from rlflow.rollout.vllm.completions import decoded_routes
from rlflow.rollout.vllm.routes import GENERATE, Routes

PROBE = {"max_tokens": 1, "logprobs": 4, "seed": 1, "ignore_eos": True, "detokenize": False}
ROUTED = {**PROBE, "max_tokens": 4, "temperature": 1.0}
ROUTED_TOKENS = 300
"""Of a prompt that has more than one of the blocks that vLLM caches."""
TELLING = 0.05  # nats between tokens, from which on two temperatures can be told apart
HOW_TO = "vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs"


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself. model: its name there. weights: its name of their version.
    max_tokens: of a prompt and its completion. root: where its model is. development: whether it
    has the routes that change its state. sleeps: whether it can give its memory back."""

    version: str
    model: str
    weights: str
    max_tokens: int
    root: str | None
    development: bool
    sleeps: bool


async def facts_of(
    routes: Routes, name: str, model: str | None, ours: bool, experts: Experts | None = None
) -> ServerFacts:
    """What the server `name` is. model: its name there; none: the only one. ours: whether it has
    rlflow's plug-in. experts: those that it must name to each token.

    Raises RolloutError for one that cannot be used, Refused, Retryable, KeyError, TypeError for one
    that is no such server."""
    version = str((await routes.ask("GET", "/version"))["version"])
    served = _chosen((await routes.ask("GET", "/v1/models"))["data"], name, model)
    weights = await _check_generation(routes, name, served["id"])
    paused = await routes.ask("GET", "/is_paused", missing={"is_paused": None})
    if paused["is_paused"]:
        raise RolloutError(f"{name} is paused; resume it (POST /resume), or start it anew.")
    facts = ServerFacts(
        version=version,
        model=served["id"],
        weights=weights,
        max_tokens=int(served.get("max_model_len") or 1 << 31),
        root=served.get("root"),
        development=paused["is_paused"] is not None,
        sleeps=ours and set(await of_workers(routes, "can_sleep")) == {"True"},
    )
    if experts is not None:
        await _check_experts(routes, name, facts, experts)
    return facts


async def _check_experts(routes: Routes, name: str, facts: ServerFacts, experts: Experts) -> None:
    """Whether the server says to which experts tokens go: those of a prompt, of the same one out of
    its cache, and of one that goes on. Raises RolloutError."""
    prompt = [1 + place % 7 for place in range(min(ROUTED_TOKENS, facts.max_tokens - 8))]
    for what in ("a prompt", "a prompt that it has in its cache", "a request that goes on"):
        body = {"token_ids": prompt, "sampling_params": ROUTED, "model": facts.model}
        choice = (await routes.ask("POST", GENERATE, body))["choices"][0]
        sampled, named = [int(token) for token in choice["token_ids"]], f"{name}, asked for {what}"
        sent, count = choice.get("routed_experts"), len(prompt) + len(sampled) - 1
        found = decoded_routes(sent, experts, count, named)
        if experts.top_k > 1 and bool((found[..., 0] == found[..., 1]).any()):
            raise RolloutError(f"{named}, sent routes that name an expert twice: it has not all.")
        if "cache" in what:
            prompt = [*prompt, *sampled]


async def of_workers(routes: Routes, method: str, **keywords: str) -> list[str]:
    """What each of the server's workers says (`inside.plugin.Extension`)."""
    body = {"method": method, "kwargs": keywords}
    return list((await routes.ask("POST", "/collective_rpc", body))["results"])


def _chosen(listed: list[dict[str, Any]], name: str, model: str | None) -> dict[str, Any]:
    found = [one for one in listed if model in (None, one["id"])]
    if len(found) != 1:
        names = ", ".join(str(one["id"]) for one in listed) or "none"
        raise RolloutError(
            f"{name}: rollout.engine.model: expected one of its models, found {model}; it has "
            f"{names}."
        )
    return found[0]


async def _check_generation(routes: Routes, name: str, model: str) -> str:
    """The server's name of the weights' version. What it cannot compute shows now.

    Raises RolloutError where log-probs are not those at the sampling temperature: their distances
    must halve from temperature 1 to 2."""
    for token in range(1, 9):
        one, weights = await _first_token(routes, model, token, 1.0)
        two, _ = await _first_token(routes, model, token, 2.0)
        # The sampled token takes the place of another one: only what both tell is compared.
        both = sorted(one.keys() & two.keys(), key=one.__getitem__)
        distance = one[both[-1]] - one[both[0]] if both else 0.0
        if distance > TELLING:
            if abs((two[both[-1]] - two[both[0]]) / distance - 0.5) > 0.1:
                raise RolloutError(
                    f"{name} tells log-probs at temperature 1 whatever the request's is; start it "
                    "with --logprobs-mode processed_logprobs."
                )
            break
    return weights


async def _first_token(
    routes: Routes, model: str, token: int, temperature: float
) -> tuple[dict[int, float], str]:
    """Log-probs, nats, of a few of the most probable tokens and of the one sampled; of which
    weights."""
    sampling = {**PROBE, "temperature": temperature}
    body = {"token_ids": [token], "sampling_params": sampling, "model": model}
    choice = (await routes.ask("POST", GENERATE, body))["choices"][0]
    places = choice["logprobs"]["content"][0]["top_logprobs"]
    logprobs = {place["token_id"]: place["logprob"] for place in places}
    return logprobs, str(choice["weight_versions"][0]["version"])
