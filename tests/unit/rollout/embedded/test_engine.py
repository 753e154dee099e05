from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model

from rlflow.errors import ConfigError, ModelError, RolloutError
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Engine, Sampling
from rlflow.rollout.tokenizer import Tokenizer
from tests import rounding


def random_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 384, (length,), generator=generator).tolist() for length in lengths]


def run(*coroutines: Coroutine[Any, Any, Completion]) -> list[Completion]:
    async def together() -> list[Completion]:
        return list(await asyncio.gather(*coroutines))

    return asyncio.run(together())


def reference_logprobs(
    path: Path, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """(len(tokens), vocab) log-probs that transformers gives for the positions of `tokens`, at the temperature, in float64."""
    (exact,), _ = rounding.logprobs(path, [prompt + tokens], temperature)
    return exact[len(prompt) - 1 : -1]


def assert_logprobs(
    path: Path, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> None:
    """Those of transformers, up to the rounding of float32."""
    errors, bound = logprob_errors(path, prompt, completion, temperature)
    assert errors.max() <= bound


def logprob_errors(
    path: Path, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> tuple[torch.Tensor, float]:
    """How far every log-prob is from the exact one, and how far rounding may bring it."""
    (exact,), bound = rounding.logprobs(path, [prompt + completion.tokens], temperature)
    chosen = exact[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
    return (chosen - torch.tensor(completion.logprobs)).abs(), bound


def test_it_implements_the_protocol(qwen: Path) -> None:
    assert isinstance(EmbeddedEngine(qwen), Engine)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_tokens_equal_transformers_under_ragged_arrivals(
    tmp_path: Path, family: str
) -> None:
    path = tiny_model(tmp_path, family, scale=0.2)
    engine = EmbeddedEngine(path, max_concurrency=3)
    prompts = random_rows([5, 90, 33, 12, 61, 1])

    async def arrive(index: int) -> Completion:
        for _ in range(3 * index):  # joins while the others decode, and leaves before them
            await asyncio.sleep(0)
        return await engine.generate(prompts[index], Sampling(4 + 5 * (index % 3), temperature=0.0))

    for prompt, completion in zip(prompts, run(*(arrive(index) for index in range(6)))):
        assert completion.stop == "length"
        expected = reference_logprobs(path, prompt, completion.tokens)
        assert (
            rounding.margin(path, prompt, completion.tokens, 0.0) > 1
        )  # so it is the best token in float32 too
        assert completion.tokens == expected.argmax(-1).tolist()
        assert_logprobs(path, prompt, completion)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_are_those_of_the_distribution_sampled_from(
    qwen: Path, temperature: float
) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([20])
    (completion,) = run(engine.generate(prompt, Sampling(30, temperature, seed=4)))
    assert_logprobs(qwen, prompt, completion, temperature)


def test_first_tokens_are_distributed_as_the_policy_says(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=64)
    (prompt,) = random_rows([9])
    count = 2000
    completions = run(*(engine.generate(prompt, Sampling(1, seed=seed)) for seed in range(count)))
    expected = reference_logprobs(qwen, prompt, [0])[0].exp()
    shares = torch.bincount(torch.tensor([c.tokens[0] for c in completions]), minlength=384) / count
    assert (shares - expected).abs().max() < 4 * (0.25 / count) ** 0.5
    assert (
        engine.statistics.prefilled < 4 * count
    )  # one prompt computed once per reuse, not 9 tokens each


def test_a_sample_depends_on_its_seed_not_on_the_company(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=5)
    prompts = random_rows([30, 7, 50, 21, 40, 11, 3])
    alone = [run(engine.generate(p, Sampling(12, seed=400 + i)))[0] for i, p in enumerate(prompts)]
    together = run(*(engine.generate(p, Sampling(12, seed=400 + i)) for i, p in enumerate(prompts)))
    other_seed = run(engine.generate(prompts[0], Sampling(12, seed=99)))[0]
    assert [c.tokens for c in alone] == [c.tokens for c in together]
    assert other_seed.tokens != alone[0].tokens
    for index, (prompt, single, crowded) in enumerate(zip(prompts, alone, together)):
        assert (
            rounding.margin(qwen, prompt, single.tokens, 1.0, 400 + index) > 1
        )  # so rounding cannot change a token
        assert_logprobs(qwen, prompt, single)
        assert_logprobs(qwen, prompt, crowded)


def test_without_a_seed_samples_differ_but_engines_agree(qwen: Path) -> None:
    (prompt,) = random_rows([8])

    def two(seed: int) -> list[list[int]]:
        engine = EmbeddedEngine(qwen, seed=seed)
        return [c.tokens for c in run(*(engine.generate(prompt, Sampling(8)) for _ in range(2)))]

    assert two(0) == two(0) != two(1)
    assert two(0)[0] != two(0)[1]


def test_a_history_is_prefilled_once_and_the_result_is_that_of_a_full_recompute(qwen: Path) -> None:
    engine, fresh = EmbeddedEngine(qwen), EmbeddedEngine(qwen)
    prompt, first, second = random_rows([40, 25, 30])
    tokens = list(prompt)
    for turn, observation in enumerate((first, second, [])):
        sampling = Sampling(10, seed=turn)
        kept = run(engine.generate(tokens, sampling, "episode"))[0]
        recomputed = run(fresh.generate(tokens, sampling))[0]
        assert kept.tokens == recomputed.tokens
        assert rounding.margin(qwen, tokens, kept.tokens, 1.0, turn) > 1
        assert_logprobs(qwen, tokens, kept)
        assert_logprobs(qwen, tokens, recomputed)
        tokens += kept.tokens + observation
    new = 40 + (1 + 25) + (1 + 30)  # the last sampled token of a turn has no keys and values yet
    assert engine.statistics.prefilled == new
    assert engine.statistics.prefilled + engine.statistics.reused == 40 + 75 + 115


def test_a_changed_history_is_recomputed_from_the_change(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([40])
    run(engine.generate(prompt, Sampling(5, seed=1), "episode"))
    changed = [*prompt[:20], (prompt[20] - 3 + 1) % 381 + 3, *prompt[21:]]
    completion = run(engine.generate(changed, Sampling(5, seed=1), "episode"))[0]
    assert_logprobs(qwen, changed, completion)
    assert engine.statistics.reused == 20


def test_a_prompt_of_a_group_is_computed_once(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([50])
    completions = run(*(engine.generate(prompt, Sampling(6, seed=seed)) for seed in range(8)))
    assert engine.statistics.prefilled == 50 + 7
    assert len({tuple(c.tokens) for c in completions}) > 1
    for completion in completions:
        assert_logprobs(qwen, prompt, completion)


def test_long_prompts_are_prefilled_in_parts(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, prefill_tokens=64)
    prompts = random_rows([300, 20, 130])
    completions = run(*(engine.generate(prompt, Sampling(5, seed=1)) for prompt in prompts))
    assert engine.statistics.steps > 300 / 64
    for prompt, completion in zip(prompts, completions):
        assert_logprobs(qwen, prompt, completion)


def test_requests_queue_for_slots_and_unused_slots_are_taken_back(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=2)
    prompts = random_rows([10] * 7)
    named = run(
        *(
            engine.generate(prompt, Sampling(4, seed=0), f"{index}")
            for index, prompt in enumerate(prompts)
        )
    )
    for prompt, completion in zip(prompts, named):
        assert len(completion.tokens) == 4
        assert_logprobs(qwen, prompt, completion)
    engine.release("6")
    (again,) = run(engine.generate(prompts[0], Sampling(4, seed=0), "0"))
    assert again.tokens == named[0].tokens


def test_stop_strings_end_with_the_token_that_completes_them_and_nothing_is_cut(qwen: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(qwen)
    engine = EmbeddedEngine(qwen, tokenizer)
    prompts = random_rows([10] * 40)
    free = run(*(engine.generate(prompt, Sampling(40, seed=i)) for i, prompt in enumerate(prompts)))
    ended = 0
    for stop in (("e",), ("an", "he"), ("><",), ("zzzz",)):
        stopped = run(
            *(
                engine.generate(prompt, Sampling(40, stop=stop, seed=i))
                for i, prompt in enumerate(prompts)
            )
        )
        for without, completion in zip(free, stopped):
            texts = [tokenizer.decode(without.tokens[: count + 1]) for count in range(40)]
            first = next(
                (at for at, text in enumerate(texts) if any(string in text for string in stop)),
                None,
            )
            assert completion.stop == ("length" if first is None else "stop")
            assert completion.tokens == without.tokens[: 40 if first is None else first + 1]
            ended += first is not None
    assert ended >= 20  # the claim was exercised


def test_a_stop_token_is_part_of_the_completion(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([10])
    (free,) = run(engine.generate(prompt, Sampling(20, seed=3)))
    (stopped,) = run(
        engine.generate(prompt, Sampling(20, seed=3, stop_token_ids=(free.tokens[4],)))
    )
    assert stopped.stop == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


def test_weights_change_between_two_tokens_of_a_request_in_flight(
    qwen: Path, other_qwen: Path
) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([25])

    async def change() -> Completion:
        request = asyncio.ensure_future(engine.generate(prompt, Sampling(20, seed=5), "episode"))
        while engine.statistics.decoded < 8:
            await asyncio.sleep(0)
        await engine.load_weights(iterate_weights(other_qwen), version=3)
        return await request

    completion = asyncio.run(change())
    assert completion.versions == [0] * 8 + [3] * 12
    for path, part in (
        (qwen, slice(8)),
        (other_qwen, slice(8, None)),
    ):  # the cache was recomputed: no trace of old weights
        errors, bound = logprob_errors(path, prompt, completion)
        assert errors[part].max() <= bound

    turn = prompt + completion.tokens + [7, 8, 9]
    (next_turn,) = run(engine.generate(turn, Sampling(5, seed=6), "episode"))
    assert_logprobs(other_qwen, turn, next_turn)
    assert asyncio.run(engine.weights_digest()) == digest(iterate_weights(other_qwen))


def test_a_kept_turn_is_recomputed_after_new_weights(qwen: Path, other_qwen: Path) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([25])
    (first,) = run(engine.generate(prompt, Sampling(5, seed=5), "episode"))
    asyncio.run(engine.load_weights(iterate_weights(other_qwen), version=1))
    turn = prompt + first.tokens + [7, 8, 9]
    (second,) = run(engine.generate(turn, Sampling(5, seed=6), "episode"))
    assert_logprobs(other_qwen, turn, second)
    assert second.versions == [1] * 5


def test_half_loaded_weights_are_never_sampled_from(qwen: Path, other_qwen: Path) -> None:
    engine = EmbeddedEngine(qwen)
    half = list(iterate_weights(other_qwen))[:5]
    with pytest.raises(ModelError, match="missing"):
        asyncio.run(engine.load_weights(half, version=1))
    with pytest.raises(RolloutError, match="load complete weights first"):
        run(engine.generate([5], Sampling(1)))
    asyncio.run(engine.load_weights(iterate_weights(other_qwen), version=1))
    assert len(run(engine.generate([5], Sampling(1)))[0].tokens) == 1


def test_a_model_whose_file_holds_nan_is_told_by_file_and_tensor(
    qwen: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(qwen, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][2, 3] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RolloutError) as failure:
        run(EmbeddedEngine(model).generate([5], Sampling(1)))
    assert f"model.safetensors: tensor '{name}': 1 of " in str(failure.value)
    assert "learning rate" not in str(failure.value)


def test_diverged_weights_are_an_error_and_leave_no_trace(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([25])
    broken = [(name, tensor * float("nan")) for name, tensor in iterate_weights(qwen)]
    asyncio.run(engine.load_weights(broken, version=1))
    with pytest.raises(RolloutError, match="not finite"):
        run(engine.generate(prompt, Sampling(3), "episode"))
    asyncio.run(engine.load_weights(iterate_weights(qwen), version=2))
    short, long = (
        prompt[:5],
        random_rows([60])[0],
    )  # the short one's padding is what the broken weights left behind
    named = {"episode": short, "other": long}
    completions = run(
        *(engine.generate(row, Sampling(3, seed=1), name) for name, row in named.items())
    )
    assert_logprobs(qwen, short, completions[0])
    assert_logprobs(qwen, long, completions[1])


def test_a_sample_that_is_interrupted_and_continued_is_the_uninterrupted_one(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen)
    (prompt,) = random_rows([10])
    (whole,) = run(engine.generate(prompt, Sampling(20, seed=5)))
    (first,) = run(engine.generate(prompt, Sampling(8, seed=5), "episode"))
    (rest,) = run(engine.generate(prompt + first.tokens, Sampling(12, seed=5), "episode"))
    assert first.tokens + rest.tokens == whole.tokens


def test_an_aborted_request_ends_with_what_it_has(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=1)
    first, second = random_rows([10, 12])

    async def abort_both() -> list[Completion]:
        requests = [
            asyncio.ensure_future(engine.generate(first, Sampling(50, seed=1), "runs")),
            asyncio.ensure_future(engine.generate(second, Sampling(50, seed=2), "waits")),
        ]
        while engine.statistics.decoded < 4:
            await asyncio.sleep(0)
        await engine.abort("waits")
        await engine.abort("runs")
        return list(await asyncio.gather(*requests))

    runs, waits = asyncio.run(abort_both())
    assert (runs.stop, len(runs.tokens)) == ("aborted", 4)
    assert (waits.stop, waits.tokens) == ("aborted", [])
    assert_logprobs(qwen, first, runs)
    (again,) = run(engine.generate(second, Sampling(5, seed=2), "waits"))
    assert_logprobs(qwen, second, again)


@pytest.mark.parametrize(
    "mode, lengths", [("keep", [20, 20]), ("abort", [4, 0]), ("wait", [20, 20])]
)
def test_pause(qwen: Path, mode: str, lengths: list[int]) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=1)
    prompts = random_rows([10, 12])

    async def pause() -> list[Completion]:
        requests = [
            asyncio.ensure_future(engine.generate(prompt, Sampling(20, seed=1)))
            for prompt in prompts
        ]
        while engine.statistics.decoded < 4:
            await asyncio.sleep(0)
        await engine.pause(mode)
        stood_at = engine.statistics.decoded
        assert stood_at == (20 if mode == "wait" else 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.statistics.decoded == stood_at
        await engine.resume()
        return list(await asyncio.gather(*requests))

    assert [len(completion.tokens) for completion in asyncio.run(pause())] == lengths


def test_a_cancelled_call_gives_its_slot_back(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=1)

    async def cancel() -> Completion:
        request = asyncio.ensure_future(engine.generate([5, 6], Sampling(500)))
        while engine.statistics.decoded < 3:
            await asyncio.sleep(0)
        request.cancel()
        return await engine.generate([7, 8], Sampling(4))

    assert len(asyncio.run(cancel()).tokens) == 4


def test_a_loop_that_died_with_requests_in_flight_does_not_block_the_next(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, max_concurrency=1)

    async def leave() -> None:
        asyncio.ensure_future(engine.generate([5, 6], Sampling(500)))  # noqa: RUF006 -- dropped on purpose
        await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert len(run(engine.generate([7, 8], Sampling(4)))[0].tokens) == 4


def test_equal_inputs_give_equal_bits(qwen: Path) -> None:
    prompts = random_rows([30, 7, 50, 21, 40, 11, 3])

    def bits(order: list[int]) -> list[tuple[list[int], list[float]]]:
        engine = EmbeddedEngine(qwen, max_concurrency=4, deterministic=True)
        done = run(*(engine.generate(prompts[i], Sampling(9, seed=i), f"{i}") for i in order))
        return [(c.tokens, c.logprobs) for _, c in sorted(zip(order, done))]

    assert bits([0, 1, 2, 3, 4, 5, 6]) == bits([3, 6, 0, 5, 1, 4, 2])


def test_bfloat16_weights_hash_to_what_was_sent_in_that_type(qwen: Path) -> None:
    engine = EmbeddedEngine(qwen, dtype="bfloat16")
    assert asyncio.run(engine.weights_digest()) == digest(
        (name, tensor.bfloat16()) for name, tensor in iterate_weights(qwen)
    )
    (completion,) = run(engine.generate([5, 6, 7], Sampling(6, temperature=0.0)))
    expected = reference_logprobs(qwen, [5, 6, 7], completion.tokens)
    chosen = expected.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
    assert (chosen - torch.tensor(completion.logprobs)).abs().max() < 0.1


@pytest.mark.parametrize(
    "tokens, sampling, message",
    [
        ([], Sampling(1), "no tokens"),
        ([384], Sampling(1), "outside the vocabulary of 384"),
        ([1] * 64, Sampling(1), "leaves no room in the 64"),
        ([1], Sampling(0), "max_tokens >= 1"),
        ([1], Sampling(1, temperature=-1.0), "a temperature of 0 or at least 0"),
        ([1], Sampling(1, stop=("",)), "stop string is empty"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    qwen: Path, tokens: list[int], sampling: Sampling, message: str
) -> None:
    engine = EmbeddedEngine(qwen, max_tokens=64)
    with pytest.raises(RolloutError, match=message):
        run(engine.generate(tokens, sampling))
    assert run(engine.generate([1] * 60, Sampling(10)))[0].stop == "length"  # ends at 64 tokens


def test_options_are_checked(qwen: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'float32'"):
        EmbeddedEngine(qwen, dtype="float23")
    with pytest.raises(ConfigError, match="max_concurrency"):
        EmbeddedEngine(qwen, max_concurrency=0)
