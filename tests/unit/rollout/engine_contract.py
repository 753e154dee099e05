"""What every engine must do: a subclass with the fixtures `make` and `weights` runs these tests over its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from torch import Tensor

from rlflow.errors import RLFlowError, RolloutError
from rlflow.models.adapter import is_of_adapter
from rlflow.models.huggingface import digest
from rlflow.models.layer_rules import dtype_of
from rlflow.rollout import Tokenizer
from rlflow.rollout.engine import Completion, Engine, Sampling

T = TypeVar("T")
Pairs = list[tuple[str, Tensor]]
Make = Callable[..., Engine]
PROMPT = [10, 20, 30, 40, 50]
OTHER = [11, 21, 31]
MOST = 4000  # tokens that every engine of the tests has room for


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result; a contract that is broken by waiting for ever fails instead."""

    async def limited() -> T:
        return await asyncio.wait_for(coroutine, 120)

    return asyncio.run(limited())


def start(
    engine: Engine, tokens: Sequence[int], count: int, seed: int = 0, **options: Any
) -> asyncio.Task[Completion]:
    return asyncio.ensure_future(engine.generate(tokens, Sampling(count, seed=seed), **options))


async def some_steps(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def decodable(tokenizer: Tokenizer, tokens: list[int]) -> int:
    """A place, not the first, whose token has text that the tokens before it have not."""
    for place in range(2, len(tokens)):
        text = tokenizer.decode([tokens[place]])
        if text and "\ufffd" not in text and text not in tokenizer.decode(tokens[:place]):
            return place
    raise AssertionError("no such token")


class EngineContract:
    """`make(**options)`: a new engine with vocabulary 300 or more; options are max_concurrency and max_tokens.
    `weights`: a complete set of weights that differ from those it starts with."""

    longer = 1
    """How many times longer those requests are that something happens to; for engines that sample beside the event loop."""

    async def a_while(self, engine: Engine) -> None:
        """Returns when a request that came before has some of its tokens, and not all."""
        await some_steps()

    def test_a_completion_has_a_log_prob_and_a_version_for_every_token(self, make: Make) -> None:
        done = run(make().generate(PROMPT, Sampling(12, seed=3), "a"))
        assert (len(done.tokens), len(done.logprobs), len(done.versions)) == (12, 12, 12)
        assert done.stop == "length" and not done.interrupted
        assert all(logprob <= 0 for logprob in done.logprobs) and set(done.versions) == {0}

    def test_a_seed_gives_its_tokens_whatever_else_is_in_flight(self, make: Make) -> None:
        async def crowd() -> list[Completion]:
            engine = make(max_concurrency=3)
            return list(
                await asyncio.gather(
                    *(start(engine, PROMPT, 10, seed) for seed in (1, 2, 3, 4, 5, 1))
                )
            )

        together = run(crowd())
        alone = [
            run(make().generate(PROMPT, Sampling(10, seed=seed))) for seed in (1, 2, 3, 4, 5, 1)
        ]
        assert [done.tokens for done in together] == [done.tokens for done in alone]
        assert together[0].tokens == together[5].tokens != together[1].tokens

    def test_greedy_needs_no_seed(self, make: Make) -> None:
        first, second = (
            run(make().generate(PROMPT, Sampling(8, temperature=0.0, seed=seed)))
            for seed in (None, 5)
        )
        assert first.tokens == second.tokens

    def test_a_stop_string_ends_with_the_token_that_completes_it(
        self, make: Make, tokenizer: Tokenizer
    ) -> None:
        free = run(make().generate(PROMPT, Sampling(40, seed=1)))
        place = decodable(tokenizer, free.tokens)
        string = tokenizer.decode([free.tokens[place]])
        done = run(make().generate(PROMPT, Sampling(40, stop=("\x00never", string), seed=1)))
        assert (done.stop, done.tokens) == ("stop", free.tokens[: place + 1])

    @pytest.mark.parametrize("count", [1, 12])
    def test_a_stop_string_of_the_prompt_ends_nothing(
        self, make: Make, tokenizer: Tokenizer, count: int
    ) -> None:
        """Not behind half a character either, whose other half the completion may bring."""
        whole = tokenizer.encode("a <stop> b 漢")
        for prompt in (whole, whole[:-1], whole[:-2]):
            done = run(make().generate(prompt, Sampling(count, seed=1, stop=("<stop>",))))
            assert (done.stop, len(done.tokens)) == ("length", count)
            assert len(done.logprobs) == len(done.versions) == count

    def test_a_stop_token_is_part_of_the_completion(self, make: Make) -> None:
        free = run(make().generate(PROMPT, Sampling(20, seed=1)))
        done = run(make().generate(PROMPT, Sampling(20, seed=1, stop_token_ids=(free.tokens[6],))))
        assert (done.stop, done.tokens) == (
            "stop",
            free.tokens[: free.tokens.index(free.tokens[6]) + 1],
        )

    def test_the_lowest_priority_number_goes_first_then_who_came_first(self, make: Make) -> None:
        async def order() -> list[str]:
            engine, ended = make(max_concurrency=1), []
            runs = start(engine, PROMPT, 20)
            await some_steps()
            waiting = []
            for name, priority in (("late", 1), ("later", 1), ("urgent", -1), ("soon", 0)):
                waiting.append(start(engine, OTHER, 3, request_id=name, priority=priority))
                waiting[-1].add_done_callback(lambda _, name=name: ended.append(name))
                await some_steps(1)
            await asyncio.gather(runs, *waiting)
            return ended

        assert run(order()) == ["urgent", "soon", "late", "later"]

    def test_pause_keep_holds_everything_where_it_is(self, make: Make) -> None:
        count = 30 * self.longer
        free = run(make().generate(PROMPT, Sampling(count, seed=1)))

        async def hold() -> list[Completion]:
            engine = make(max_concurrency=1)
            requests = [start(engine, PROMPT, count, 1)]
            await some_steps()
            await engine.pause("keep")
            requests.append(start(engine, PROMPT, count, 1))
            await some_steps(50 * count)  # more than an engine that goes on needs to the end
            assert not any(request.done() for request in requests)
            await engine.resume()
            return list(await asyncio.gather(*requests))

        assert [(done.stop, done.tokens) for done in run(hold())] == [("length", free.tokens)] * 2

    def test_pause_abort_ends_requests_as_paused_with_what_they_have(self, make: Make) -> None:
        count = 50 * self.longer
        free = run(make().generate(PROMPT, Sampling(count, seed=1)))

        async def pause() -> list[Completion]:
            engine = make(max_concurrency=1)
            requests = [
                start(engine, PROMPT, count, 1, request_id="runs"),
                start(engine, OTHER, count, request_id="waits"),
            ]
            await self.a_while(engine)
            await engine.pause("abort")
            ended = list(await asyncio.gather(*requests))
            await engine.resume()
            return [*ended, await engine.generate(PROMPT, Sampling(count, seed=1), "runs")]

        runs, waits, again = run(pause())
        assert (runs.stop, waits.stop) == ("paused", "paused") and runs.interrupted
        assert 0 < len(runs.tokens) < count and runs.tokens == free.tokens[: len(runs.tokens)]
        assert len(runs.logprobs) == len(runs.versions) == len(runs.tokens)
        assert waits.tokens == [] and again.tokens == free.tokens

    def test_pause_wait_finishes_what_runs_and_admits_nothing(self, make: Make) -> None:
        async def pause() -> tuple[bool, bool, list[Completion]]:
            engine = make(max_concurrency=1)
            requests = [start(engine, PROMPT, 20), start(engine, OTHER, 20)]
            await some_steps()
            await engine.pause("keep")
            await engine.pause("wait")  # also where it was paused otherwise before
            await some_steps()
            done = requests[0].done(), requests[1].done()
            await engine.resume()
            return *done, list(await asyncio.gather(*requests))

        ran, waited, completions = run(pause())
        assert (ran, waited) == (True, False)
        assert [(done.stop, len(done.tokens)) for done in completions] == [("length", 20)] * 2

    def test_an_abort_ends_the_request_of_that_id_only(self, make: Make) -> None:
        count = 40 * self.longer

        async def abort() -> list[Completion]:
            engine = make(max_concurrency=2)
            requests = [start(engine, PROMPT, count, request_id=name) for name in ("a", "b", "c")]
            await self.a_while(engine)
            for name in ("a", "c", "unknown"):
                await engine.abort(name)
            return list(await asyncio.gather(*requests))

        runs, other, waits = run(abort())
        assert (runs.stop, other.stop, waits.stop) == ("aborted", "length", "aborted")
        assert (
            0 < len(runs.tokens) < count
            and runs.tokens == other.tokens[: len(runs.tokens)]
            and waits.tokens == []
        )

    def test_release_of_an_unknown_id_is_no_error(self, make: Make) -> None:
        engine = make()
        engine.release("never seen")
        run(engine.generate(PROMPT, Sampling(2), "a"))
        engine.release("a")
        engine.release("a")
        assert len(run(engine.generate(PROMPT, Sampling(2), "a")).tokens) == 2

    def test_new_weights_are_used_from_the_next_token_on_and_hash_to_what_was_sent(
        self, make: Make, weights: Pairs
    ) -> None:
        async def load(engine: Engine, slowly: bool) -> Completion:
            async def one_by_one() -> AsyncIterator[tuple[str, Tensor]]:
                for pair in weights:
                    await some_steps(3)
                    yield pair

            request = start(engine, PROMPT, 30 * self.longer)
            await self.a_while(engine)
            await engine.load_weights(one_by_one() if slowly else weights, version=7)
            return await request

        for slowly in (False, True):
            engine = make()
            versions = run(load(engine, slowly)).versions
            assert (
                set(versions) == {0, 7}
                and versions == sorted(versions)
                and len(versions) == 30 * self.longer
            )
            if engine.hashes_weights:
                kept = [
                    (n, t)
                    for n, t in weights
                    if engine.weight_names is None or n in engine.weight_names or is_of_adapter(n)
                ]
                sent = [
                    (n, t if engine.dtype is None else t.to(dtype_of(n, engine.dtype)))
                    for n, t in kept
                ]
                assert run(engine.weights_digest()) == digest(sent)
            else:
                with pytest.raises(RolloutError, match="cannot hash its weights"):
                    run(engine.weights_digest())

    def test_an_engine_that_takes_the_trainers_own_tensors_keeps_none_of_them(
        self, make: Make, weights: Pairs
    ) -> None:
        engine, given = make(), [(name, tensor.clone()) for name, tensor in weights]
        if not (engine.takes_device_tensors and engine.hashes_weights):
            pytest.skip("it gets copies, or cannot say what it has")
        run(engine.load_weights(given, version=1))
        before = run(engine.weights_digest())
        for _, tensor in given:
            tensor.zero_()  # as by the next update
        assert run(engine.weights_digest()) == before

    def test_nothing_is_sampled_from_half_loaded_weights(self, make: Make, weights: Pairs) -> None:
        async def fail(engine: Engine) -> None:
            request = start(engine, PROMPT, min(200 * self.longer, MOST))
            await some_steps()
            with pytest.raises(RLFlowError):
                await engine.load_weights(weights[:1], version=1)
            with pytest.raises(RolloutError):
                await request
            with pytest.raises(RolloutError):
                await engine.generate(PROMPT, Sampling(2))
            await engine.load_weights(weights, version=2)
            assert (await engine.generate(PROMPT, Sampling(2))).versions == [2, 2]

        run(fail(make()))

    @pytest.mark.parametrize("fault", ["shape", "type", "twice"])
    def test_a_tensor_that_is_not_the_models_is_refused_and_the_next_update_repairs_it(
        self, make: Make, weights: Pairs, fault: str
    ) -> None:
        name, tensor = weights[-1]
        spoiled = {
            "shape": [*weights[:-1], (name, tensor[..., :-1].contiguous())],
            "type": [*weights[:-1], (name, tensor.long())],
            "twice": [*weights, weights[0]],
        }[fault]

        async def play(engine: Engine) -> list[int]:
            with pytest.raises(
                RLFlowError, match=f"'{weights[0][0] if fault == 'twice' else name}'"
            ):
                await engine.load_weights(spoiled, version=1)
            await engine.load_weights(weights, version=2)
            return (await engine.generate(PROMPT, Sampling(2))).versions

        assert run(play(make())) == [2, 2]

    def test_a_closed_engine_ends_what_is_in_flight_and_refuses_the_rest(self, make: Make) -> None:
        async def close() -> None:
            engine = make(max_concurrency=1)
            requests = [
                start(engine, PROMPT, min(200 * self.longer, MOST)),
                start(engine, OTHER, 200),
            ]
            await some_steps()
            await engine.close()
            assert [done.stop for done in await asyncio.gather(*requests)] == ["aborted", "aborted"]
            for reopen in (engine.resume, engine.pause):
                await reopen()
                with pytest.raises(RolloutError, match="closed"):
                    await engine.generate(PROMPT, Sampling(2))

        run(close())

    def test_an_id_that_is_in_flight_is_refused_and_free_again_afterwards(self, make: Make) -> None:
        async def collide() -> Completion:
            engine = make(max_concurrency=1)
            request = start(engine, PROMPT, 10, request_id="a")
            await some_steps(2)
            with pytest.raises(RolloutError, match="'a' is in flight"):
                await engine.generate(OTHER, Sampling(2), "a")
            await request
            return await engine.generate(OTHER, Sampling(2), "a")

        assert len(run(collide()).tokens) == 2

    def test_prompts_that_leave_no_room_are_refused_and_others_end_at_the_limit(
        self, make: Make
    ) -> None:
        engine = make(max_tokens=32)
        assert engine.max_tokens == 32
        for tokens in ([], [5] * 32, [5] * 33):
            with pytest.raises(RolloutError):
                run(engine.generate(tokens, Sampling(1)))
        done = run(engine.generate([5] * 30, Sampling(10)))
        assert (len(done.tokens), done.stop) == (2, "length")

    def test_a_cancelled_call_gives_its_place_back(self, make: Make) -> None:
        async def cancel() -> Completion:
            engine = make(max_concurrency=1)
            request = start(engine, PROMPT, 400, request_id="a")
            await some_steps()
            request.cancel()
            return await engine.generate(PROMPT, Sampling(3), "b")

        assert len(run(cancel()).tokens) == 3
