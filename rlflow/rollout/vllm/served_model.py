"""Checks that a server that keeps its weights has those of a model directory: log-probs of a few
tokens, computed here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from rlflow.errors import ModelError, RolloutError
from rlflow.models.architecture import architecture
from rlflow.models.huggingface import iterate_weights, read_config
from rlflow.models.vocabulary import known_vocab
from rlflow.rollout.embedded.decoder import Decoder
from rlflow.rollout.engine import Engine, Sampling

logger = logging.getLogger(__name__)

LARGEST = 2 * 2**30
"""Bytes of weight files up to which a model is loaded here for the check, in float32."""
TOKENS, TEMPERATURE = 24, 0.7
SAME = 1e-3
"""Nats, the largest difference of a token up to which it is the same model in float32."""
ROUNDINGS = 3
"""How many times what bfloat16 changes here it may change there: products are added in another
order."""


async def check_served_model(engine: Engine, path: Path, name: str, told: str | None) -> None:
    """Compares what the server `name` samples with the model at `path`; says in a warning what is
    not known then.

    told: where the server says that its model is. Raises RolloutError where it is another one."""
    says = f" (it says that it serves {told})" if told else ""
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if size > LARGEST:
        unknown = "%s%s: it is not known whether its weights are those of %s: checked up to %d GiB"
        logger.warning(unknown, name, says, path, LARGEST >> 30)
        return
    try:
        shape = architecture(read_config(path))
        known = known_vocab(path, shape.vocab)
        model = Decoder(shape, torch.float32, torch.device("cpu"), known)
        model.load(iterate_weights(path))
    except ModelError as error:
        logger.warning(
            "%s%s: it is not known whether its weights are those of %s: %s", name, says, path, error
        )
        return
    prompt = [token % model.architecture.vocab for token in (5, 7, 11, 13)]
    done = await engine.generate(prompt, Sampling(TOKENS, TEMPERATURE, seed=1))
    row = [*prompt, *done.tokens]
    expected = logprobs(model, row, TEMPERATURE)[len(prompt) :]
    gap = _largest(expected, done.logprobs)
    if gap <= SAME:
        logger.info("%s has the weights of %s: log-probs agree within %.1g nats", name, path, gap)
        return
    rounded = Decoder(model.architecture, torch.bfloat16, torch.device("cpu"), known)
    rounded.load(model.named_weights())
    rounding = _largest(expected, logprobs(rounded, row, TEMPERATURE)[len(prompt) :])
    if not gap <= ROUNDINGS * rounding:
        raise RolloutError(
            f"{name}{says}: expected the weights of {path}, found others: log-probs of the same "
            f"tokens differ by {gap:.2g} nats, {rounding:.2g} by rounding to bfloat16. Serve that "
            "model, or name the one that is served as --model."
        )
    logger.warning(
        "%s%s: log-probs differ by %.2g nats from those of %s: bfloat16, or weights that are a "
        "little older",
        name,
        says,
        gap,
        path,
    )


def _largest(some: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


@torch.inference_mode()
def logprobs(model: Decoder, tokens: Sequence[int], temperature: float) -> list[float]:
    """Of every token after those before it, in nats, at the temperature; 0 for the first."""
    model.reserve(len(tokens))
    ids = torch.tensor(tokens)
    logits = model.forward(
        ids,
        torch.arange(len(tokens)),
        lambda layer, queries, rest: _attended(model, layer, queries, rest),
    )
    told = (logits[:-1] / temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return [0.0, *told.tolist()]


def _attended(model: Decoder, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
    """Causal attention of one sequence without a cache."""
    shape = model.architecture
    keys, values = keys_values.tensor_split([shape.groups * shape.key_dim], 1)
    keys, values = (part.unflatten(1, (shape.groups, -1)) for part in (keys, values))
    query, key, value = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    seen = torch.ones(len(queries), len(queries), dtype=torch.bool).tril_()
    if (window := shape.window_at(layer)) is not None:
        seen.triu_(1 - window)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=shape.softmax_scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1).reshape(len(queries), -1)
