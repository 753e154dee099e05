"""The experts of every token, as the engine says them: those that transformers chooses in one pass over the whole text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor

from rlflow.batching import ROUTES, make_batch
from rlflow.errors import DataError
from rlflow.rollout.continuation import Continued
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Sampling
from rlflow.rollout.episode_state import TokenSpan, make_segment
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.trainer.routing import check_routes
from rlflow.types import Segment, StopReason, Trajectory

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


def spoken(before: int, lacking: int = 0, k: int = 2, count: int = 3) -> Completion:
    """Of `count` tokens behind so many others, without the routes of its first `lacking` ones."""
    routed = before + count - 1 - lacking
    routes = torch.arange(k, dtype=torch.uint8).expand(routed, 2, k)
    return Completion([5] * count, [-1.0] * count, [0] * count, "stop", routes, routes_version=0)


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("lacking", [1, 8])
def test_a_turn_without_its_prompt_s_routes_is_not_hidden_by_those_behind_it(
    turn: int, lacking: int
) -> None:
    """What the last turn says covers the whole segment, and the places of an earlier one are wrong."""
    spans = [TokenSpan([1] * 10)]
    for number in range(3):
        before = sum(len(span.tokens) for span in spans)
        completion = spoken(before, lacking if number == turn else 0)
        spans += [TokenSpan(completion.tokens, completion), TokenSpan([2] * 4)]
    segment = make_segment(spans)
    trajectory = Trajectory("t", "g", [segment], [], 0.0, StopReason.TERMINATED)
    batch = make_batch([trajectory])
    with pytest.raises(DataError, match=r"row 0: expected routes of \d+ tokens"):
        check_routes(batch, (2, 2), 8)


def test_turns_of_other_shapes_are_not_joined() -> None:
    first, second = spoken(10), spoken(13, k=3)
    segment = make_segment(
        [TokenSpan([1] * 10), TokenSpan(first.tokens, first), TokenSpan(second.tokens, second)]
    )
    assert segment.routes is not None and not len(segment.routes)


def test_segments_of_other_shapes_are_refused_and_large_numbers_stay_as_they_are() -> None:
    def trajectory(routes: Tensor) -> Trajectory:
        mask = torch.tensor([False, False, True])
        segment = Segment(torch.arange(3), mask, torch.zeros(3), mask.long() - 1, routes, 0)
        return Trajectory("t", "g", [segment], [], 0.0, StopReason.TERMINATED)

    small = torch.zeros(2, 2, 2, dtype=torch.uint8)
    large = torch.full((2, 2, 2), 300, dtype=torch.int32)
    batch = make_batch([trajectory(small), trajectory(large)])
    assert batch.extras[ROUTES].max() == 300
    for other in (small[..., :1], small.float()):
        with pytest.raises(DataError, match="expected whole numbers as routes"):
            make_batch([trajectory(small), trajectory(other)])


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
