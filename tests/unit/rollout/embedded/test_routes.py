"""The experts of every token, as the engine says them: those that transformers chooses in one pass over the whole text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.rollout.continuation import Continued
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.episode_state import TokenSpan, make_segment
from rlflow.rollout.tokenizer import Tokenizer

SIZES = {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", scale=0.2, **SIZES)


def chosen(path: Path, tokens: list[int]) -> Tensor:
    """(T, layers with experts, k) of transformers, in the order of the experts."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        logits = oracle(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2).indices.sort().values for layer in logits], 1)


def check(path: Path, tokens: list[int], routes: Tensor | None) -> None:
    assert routes is not None and routes.dtype is torch.uint8
    assert routes.shape == (len(tokens) - 1, 2, 2)
    assert torch.equal(routes.long().sort().values, chosen(path, tokens)[:-1])


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (length,), generator=draw).tolist() for length in lengths]


def test_routes_equal_transformers_where_prompts_are_shared_and_cut(model: Path) -> None:
    """One prompt begins as another does, beyond a block of the cache; all are prefilled in pieces."""
    engine = EmbeddedEngine(model, routes=True, max_concurrency=3, prefill_tokens=24)
    first, rest = prompts(75, 20)
    asked = [first, first[:70] + rest, rest, first]

    async def together() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(tokens, Sampling(9, seed=seed)) for seed, tokens in enumerate(asked))
        )

    for tokens, completion in zip(asked, asyncio.run(together()), strict=True):
        check(model, tokens + completion.tokens, completion.routes)
    assert engine.statistics.reused > 32


def test_a_segment_of_several_turns_has_the_routes_of_all_but_its_last_token(model: Path) -> None:
    engine = EmbeddedEngine(model, routes=True)
    prompt, observation = prompts(40, 11)

    async def turns() -> list[Completion]:
        first = await engine.generate(prompt, Sampling(6, seed=0), "episode")
        second = await engine.generate(
            [*prompt, *first.tokens, *observation], Sampling(6, seed=1), "episode"
        )
        return [first, second]

    first, second = asyncio.run(turns())
    spans = [
        TokenSpan(prompt),
        TokenSpan(first.tokens, first),
        TokenSpan(observation),
        TokenSpan(second.tokens, second),
    ]
    segment = make_segment(spans)
    check(model, segment.tokens.tolist(), segment.routes)
    ended = make_segment([*spans, TokenSpan(observation)])
    assert ended.routes is not None and len(ended.routes) == len(segment) - 1


def test_a_request_that_a_pause_cut_in_two_has_all_routes(model: Path) -> None:
    engine, tokenizer = EmbeddedEngine(model, routes=True), Tokenizer.from_pretrained(model)
    (prompt,) = prompts(30)

    async def paused() -> Completion:
        asked = Continued(engine, tokenizer.decode).generate(
            prompt, Sampling(12, seed=0), "episode"
        )
        task = asyncio.create_task(asked)
        while engine.statistics.decoded < 4:
            await asyncio.sleep(0)
        await engine.pause("abort")
        await engine.resume()
        return await task

    completion = asyncio.run(paused())
    assert len(completion.tokens) == 12
    check(model, prompt + completion.tokens, completion.routes)


def test_nothing_is_said_unless_asked_for(model: Path) -> None:
    completion = asyncio.run(EmbeddedEngine(model).generate([5, 6], Sampling(2)))
    assert completion.routes is None
