"""How weights reach the engines: one tensor at a time, in the caller's thread, verified by content or by a probe."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.sleeping import FakeEngine, fake_logprob
from rlflow.devices.gpu_buckets import GpuBucket, GpuSharing, gpu_buckets
from rlflow.errors import ConfigError, ModelError, RolloutError
from rlflow.models.huggingface import combined_hash, digest, iterate_weights, tensor_hash
from rlflow.rollout import Rollout, Tokenizer, WeightProbe
from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
from rlflow.rollout.engine import Completion, Engine, in_portions
from rlflow.rollout.weight_sync import SyncReport, sharing_of
from tests import gpu_memory
from tests.unit.rollout.asking import Asking, all_trajectories, make

PAIRS = [("scale", torch.full((3,), 2.0)), ("shift", torch.ones(2))]


def over(engines: Engine | Sequence[Engine], tokenizer: Tokenizer, **options: Any) -> Rollout:
    return Rollout(
        engines, Asking(), tokenizer, samples_per_prompt=2, max_response_tokens=20, **options
    )


def test_the_digest_of_a_stream_is_that_of_the_whole_whatever_the_order(qwen: Path) -> None:
    hashes = [tensor_hash(name, tensor) for name, tensor in reversed(list(iterate_weights(qwen)))]
    assert combined_hash(hashes) == digest(iterate_weights(qwen))
    assert combined_hash([*hashes, tensor_hash("one more", torch.zeros(1))]) != digest(
        iterate_weights(qwen)
    )


@pytest.mark.parametrize(
    "other",
    [("b", torch.zeros(2, 3)), ("a", torch.zeros(3, 2)), ("a", torch.zeros(2, 3).bfloat16()), ("a", -torch.zeros(2, 3)),
     ("a", torch.zeros(2, 3, dtype=torch.int32))],
)  # fmt: skip
def test_name_dtype_shape_and_bits_make_the_hash_not_the_order_in_memory(
    other: tuple[str, Tensor],
) -> None:
    assert (
        tensor_hash("a", torch.zeros(2, 3))
        == tensor_hash("a", torch.zeros(3, 2).t())
        != tensor_hash(*other)
    )


def test_new_weights_are_used_and_a_stale_engine_is_found(
    qwen: Path, other_qwen: Path, tokenizer: Tokenizer
) -> None:
    class Stale(EmbeddedEngine):
        async def load_weights(self, weights: Any, version: int) -> None:
            """Says that it loaded them."""

    environment = Asking()
    with make(qwen, tokenizer, environment) as rollout:
        rollout.load_weights(iterate_weights(other_qwen), version=4)
        trajectories = all_trajectories(rollout.collect(environment.tasks("")))
        assert {int(v) for t in trajectories for v in t.segments[0].versions} == {-1, 4}
    with over(Stale(qwen, tokenizer), tokenizer) as rollout:
        with pytest.raises(RolloutError, match="weight sync: after version 4"):
            rollout.load_weights(iterate_weights(other_qwen), version=4)
        assert rollout.version == 0


@pytest.mark.parametrize(
    "weights", [{"a": torch.ones(1)}, [torch.ones(1)], [("a", None)], [("a",)]]
)
def test_what_is_no_pair_of_name_and_tensor_is_refused(weights: Any) -> None:
    with pytest.raises(
        RolloutError, match=r"load_weights: expected \(HuggingFace name, tensor\) pairs, found "
    ):
        list(SyncReport().gathered(weights))


def test_tensors_are_made_in_the_callers_thread_and_few_are_alive_at_a_time(
    qwen: Path, other_qwen: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflow.rollout.weight_sync.PORTION", 1)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def one_by_one() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, tensor in iterate_weights(other_qwen):
            assert threading.current_thread() is threading.main_thread()
            made = tensor.clone()
            alive.append(weakref.ref(made))
            yield name, made
            del made
            most = max(most, sum(reference() is not None for reference in alive))

    engines = [
        EmbeddedEngine(qwen, tokenizer, dtype=dtype) for dtype in ("float32", "bfloat16", "float32")
    ]
    with over(engines, tokenizer) as rollout:
        rollout.load_weights(one_by_one(), version=1)
    assert len(alive) > 20 and most <= 5
    assert [engine.version for engine in engines] == [1, 1, 1]


def test_portions_are_bounded_in_bytes_and_in_number() -> None:
    sizes = [10, 15, 30, 1, *[0] * 40, 25]
    portions = list(
        in_portions(
            ((str(number), torch.zeros(size)) for number, size in enumerate(sizes)), 100, 32
        )
    )
    assert [len(portion) for portion in portions] == [
        2,
        1,
        32,
        10,
    ]  # 100 bytes; 120 alone; 32; the rest with 100
    assert [int(name) for portion in portions for name, _ in portion] == list(range(45))


def test_memory_that_engines_open_is_written_over_when_all_have_read_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And freed when all have the weights, or one has failed."""
    gpu_memory.stand_in(monkeypatch)
    pairs = [(str(number), torch.randn(1000)) for number in range(12)]
    closed: list[int] = []

    class Opens(FakeEngine):
        sharing, hashes_weights = GpuSharing(3 * 4000), True

        async def load_weights(self, weights: Any, version: int) -> None:
            self.found: dict[str, Tensor] = {}
            async for bucket in weights:
                await asyncio.sleep(0.002 * len(self.found) if self is engines[-1] else 0)
                self.found |= gpu_memory.tensors_in(bucket, "GPU-0")
                if version == 2 and len(self.found) > 3:
                    raise ConnectionError("no room")
            assert not closed

        async def weights_digest(self) -> str:
            return combined_hash([])

    def watched() -> Iterator[GpuBucket]:
        try:
            yield from gpu_buckets(pairs, how)
        finally:
            closed.append(1)

    engines = [Opens(tokenizer) for _ in range(3)]
    with over(engines, tokenizer) as rollout:
        how = sharing_of(engines)
        assert how is not None and sharing_of([*engines, FakeEngine(tokenizer)]) is None
        rollout.load_weights(watched(), version=1)
        for engine in engines:
            assert all(torch.equal(engine.found[name], tensor) for name, tensor in pairs)
        assert closed == [1] and rollout.synced.metrics()["sync/mib"] == 3 * 12 * 4000 / 2**20
        closed.clear()
        with pytest.raises(ConnectionError, match="no room"):
            rollout.load_weights(watched(), version=2)
        assert closed == [1]


def test_a_stream_that_breaks_ends_every_load_and_the_next_one_repairs_it(
    tokenizer: Tokenizer,
) -> None:
    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield PAIRS[0]
        raise ConnectionError("a rank is gone")

    engines = [FakeEngine(tokenizer) for _ in range(3)]
    with over(engines, tokenizer, max_aborted_share=0.0) as rollout:
        with pytest.raises(ConnectionError, match="a rank is gone"):
            rollout.load_weights(breaks(), version=1)
        with pytest.raises(RolloutError, match="half loaded"):
            rollout.collect(Asking().tasks(""), step=0)
        rollout.load_weights(PAIRS, version=2)
        assert len(rollout.collect(Asking().tasks(""), step=0)) == 4


def test_an_engine_that_refuses_a_tensor_ends_the_sync_with_its_error(
    qwen: Path, tokenizer: Tokenizer
) -> None:
    def endless() -> Iterator[tuple[str, Tensor]]:
        while True:
            yield "model.norm.wait", torch.zeros(1)

    with over([EmbeddedEngine(qwen, tokenizer) for _ in range(2)], tokenizer) as rollout:
        with pytest.raises(ModelError, match=r"Did you mean 'model\.norm\.weight'"):
            rollout.load_weights(endless(), version=1)
        rollout.load_weights(iterate_weights(qwen), version=2)


def test_another_way_of_syncing_takes_the_place_of_the_usual_one(tokenizer: Tokenizer) -> None:
    class Recording:
        pushed: list[tuple[list[str], int]] = []

        def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
            self.pushed.append(([name for name, _ in weights], version))

    with over(FakeEngine(tokenizer), tokenizer, weight_sync=Recording()) as rollout:
        rollout.load_weights(PAIRS, version=3)
        assert (Recording.pushed, rollout.version) == ([(["scale", "shift"], 3)], 3)


# --- engines without a content hash -----------------------------------------------------------------------------------


def probe(weights: Iterable[tuple[str, Tensor]], off: float = 0.0, **options: Any) -> WeightProbe:
    """What a trainer with these weights, whose log-probs are `off` nats away, would offer."""
    held = dict(weights)

    def score(rows: Sequence[Sequence[int]]) -> list[list[float]]:
        assert threading.current_thread() is threading.main_thread()
        return [[0.0, *(fake_logprob(token, held) + off for token in row[1:])] for row in rows]

    return WeightProbe([[5, 6, 7], [8]], score, **options)


def test_an_engine_that_cannot_hash_needs_a_probe(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, hashes_weights=False)
    with over(engine, tokenizer) as rollout:
        with pytest.raises(
            RolloutError,
            match=r"FakeEngine cannot hash its weights.*give load_weights a WeightProbe",
        ):
            rollout.load_weights(PAIRS, version=1)
        assert engine.version == 0  # refused before anything was sent
        rollout.load_weights(PAIRS, version=1, probe=probe(PAIRS))
        assert (rollout.version, engine.version) == (1, 1)
        assert set(engine.released) == {"weight probe 0", "weight probe 1"}


def test_a_probe_finds_other_weights_and_its_tolerance_is_the_callers(tokenizer: Tokenizer) -> None:
    class Stale(FakeEngine):
        async def load_weights(self, weights: Any, version: int) -> None:
            self.version = version

    with over(Stale(tokenizer, hashes_weights=False), tokenizer) as rollout:
        with pytest.raises(
            RolloutError,
            match=r"differ by .* nats on a token of the probe, more than its tolerance of 0\.001",
        ):
            rollout.load_weights(PAIRS, version=1, probe=probe(PAIRS))
    with over(FakeEngine(tokenizer, hashes_weights=False), tokenizer) as rollout:
        rollout.load_weights(PAIRS, version=1, probe=probe(PAIRS, off=0.05, tolerance=0.1))
        for off in (0.2, float("nan")):
            with pytest.raises(RolloutError, match=r"tolerance of 0\.1"):
                rollout.load_weights(PAIRS, version=1, probe=probe(PAIRS, off=off, tolerance=0.1))


def test_in_low_precision_a_probe_goes_by_mean_and_quantile_of_all_engines_at_once(
    tokenizer: Tokenizer,
) -> None:
    step = 0.125
    asked = 0

    class Counted(FakeEngine):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            nonlocal asked
            asked += 1
            while asked % 4:  # both engines' prompts are in flight
                await asyncio.sleep(0)
            return await super().generate(*arguments, **options)

    engines = [Counted(tokenizer, hashes_weights=False) for _ in range(2)]
    with over(engines, tokenizer) as rollout:
        near = probe(PAIRS, off=0.6 * step, max_tokens=128, step=step)
        rollout.load_weights(PAIRS, version=1, probe=near)
        far = probe(PAIRS, off=0.7 * step, max_tokens=128, step=step)
        told = r"0\.0875 nats in the mean .* of the probe's 256 tokens; expected at most 0\.0813"
        with pytest.raises(RolloutError, match=told):
            rollout.load_weights(PAIRS, version=2, probe=far)


def test_a_probe_finds_an_engine_that_kept_its_version_or_does_not_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(FakeEngine):
        async def load_weights(self, weights: Any, version: int) -> None:
            """Keeps what it has."""

    with over(Deaf(tokenizer, hashes_weights=False), tokenizer) as rollout:
        with pytest.raises(RolloutError, match=r"given version 1 and sampled its probe from \[0\]"):
            rollout.load_weights(PAIRS, version=1, probe=probe(PAIRS))
    monkeypatch.setattr("rlflow.rollout.weight_sync.PROBE_TIMEOUT_S", 0.05)
    paused = FakeEngine(tokenizer, hashes_weights=False)
    with over(paused, tokenizer) as rollout:
        paused._state = "paused"
        with pytest.raises(RolloutError, match=r"did not answer the probe .* paused"):
            rollout.load_weights(PAIRS, version=1, probe=probe(PAIRS))


def test_a_probe_that_compares_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="compares nothing"):
        WeightProbe([], lambda rows: [])
