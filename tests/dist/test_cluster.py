"""Trainer ranks as real Ray actors: they train like one process, fail in one line, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rlflow.algorithms import EntropyLoss, PPOClipLoss, SumLoss, ValueLoss, token_weights
from rlflow.batching import make_batch
from rlflow.cluster.trainer import RankStuck, RayTrainer
from rlflow.components import LOSS
from rlflow.config.schema import ClusterSection, ModelSection, RunConfig
from rlflow.devices.gpu_buckets import GpuSharing
from rlflow.errors import ConfigError, MissingPackageError, RLFlowError
from rlflow.run.assemble import make_trainer
from rlflow.trainer.base import Trainer
from rlflow.trainer.options import TrainerOptions
from rlflow.types import Batch, PolicyOutput, Segment, StopReason, Trajectory
from tests import gpu_memory, rounding
from tests.fixtures import tiny_model
from tests.reference import ORACLE
from tests.reference.trainer import ReferenceTrainer

# Not importorskip: importing Ray here would decide where it listens before rlflow can.
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="pip install 'PATH_OR_GIT_URL[ray]'"
)
ADAMW = {"name": "adamw", "eps": 1e-3}  # a small eps would turn rounding into Adam's direction
OPTIONS = {"lr": 1e-2, "optimizer": ADAMW, "max_gradient_norm": 0.5}


@dataclasses.dataclass(frozen=True)
class FailingLoss:
    """Fails on every rank, or on one alone while the other waits for it."""

    only_rank: int | None = None

    def __call__(self, output: PolicyOutput, batch: Batch):
        if self.only_rank in (None, torch.distributed.get_rank()):
            raise ZeroDivisionError("a loss gone wrong\nin two lines")
        return -output.logprobs, {}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    owners = []
    for length in (7, 12, 3, 9, 30):
        tokens = torch.randint(0, 384, (length,), generator=generator)
        mask = torch.arange(length) >= 2
        segment = Segment(
            tokens, mask, -6 - torch.rand(length, generator=generator), torch.where(mask, 0, -1)
        )
        owners.append(
            Trajectory("t", "g", [segment], [], 1.0, StopReason.TERMINATED, temperature=0.8)
        )
    whole = make_batch(owners)
    advantages = torch.randn(len(owners), 1, generator=generator).expand(whole.tokens.shape)
    return whole.replace(weights=token_weights(whole), advantages=advantages)


@pytest.fixture(scope="module")
def processes_before() -> set[psutil.Process]:
    """What other tests have left running in this process."""
    return set(descendants())


@pytest.fixture(scope="module")
def two_ranks(model_path, processes_before) -> Iterator[RayTrainer]:
    section = TrainerOptions(tensor_parallel=2, **OPTIONS)
    trainer = make_trainer(
        config_of(
            model=ModelSection(path=str(model_path)),
            trainer=section,
            cluster=ClusterSection(ranks=2),
        )
    )
    assert isinstance(trainer, RayTrainer)
    yield trainer
    trainer.close()


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    return (process or psutil.Process()).children(recursive=True)


def still_alive(processes: list[psutil.Process], within_s: float = 15.0) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [
        process
        for process in alive
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


@needs_ray
@pytest.mark.dist
def test_two_tensor_parallel_ranks_train_like_one_process(two_ranks, model_path, batch):
    oracle = ReferenceTrainer(model_path, **OPTIONS)
    rows, temperature = rounding.rows_of(batch), float(batch.temperatures.min())
    _, bound = rounding.logprobs(model_path, rows, temperature)  # of each side
    found, expected = (trainer.score(batch)["logprobs"] for trainer in (two_ranks, oracle))
    torch.testing.assert_close(found, expected, atol=2 * bound, rtol=0)
    two_ranks.snapshot("reference")
    frozen = two_ranks.score(batch, model="reference", want=("logprobs", "entropy"))
    loss = SumLoss((PPOClipLoss(), EntropyLoss(0.01)))
    for _ in range(3):
        expected, report = oracle.update(batch, loss), two_ranks.update(batch, loss)
        for name in ("loss", "gradient_norm", "entropy", "ratio", "lr"):
            assert report[name] == pytest.approx(expected[name], rel=1e-5), name
    weights = dict(two_ranks.weights())
    for name, value in oracle.weights():
        torch.testing.assert_close(weights.pop(name), value, atol=1e-5, rtol=1e-5)
    assert not weights
    again = two_ranks.score(batch, model="reference", want=("logprobs", "entropy"))
    assert all(torch.equal(again[name], frozen[name]) for name in frozen)


@needs_ray
@pytest.mark.dist
def test_a_frozen_model_of_another_size_scores_as_in_one_process(
    two_ranks, model_path, batch, tmp_path
):
    teacher = tiny_model(
        tmp_path / "teacher", "llama", tokenizer=False, num_hidden_layers=3, seed=1
    )
    oracle = ReferenceTrainer(model_path)
    for trainer in (two_ranks, oracle):
        trainer.load_frozen("teacher", teacher)
    found, expected = (trainer.score(batch, "teacher", top_k=4) for trainer in (two_ranks, oracle))
    assert torch.equal(found["top_ids"], expected["top_ids"])
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=0)


@needs_ray
@pytest.mark.dist
def test_a_loss_of_a_file_reaches_the_ranks(two_ranks, batch, tmp_path):
    source = "def loss(output, batch):\n    return 0 * output.logprobs, {'seven': 7.0 * batch.loss_mask}\n"
    (tmp_path / "mine.py").write_text(source)
    loss = LOSS.resolve(f"{tmp_path / 'mine.py'}:loss")
    assert two_ranks.update(batch, loss)["seven"] == pytest.approx(7.0)


@needs_ray
@pytest.mark.dist
def test_a_checkpoint_brings_weights_and_step_back(two_ranks, batch, tmp_path):
    before = dict(two_ranks.weights())
    two_ranks.save(tmp_path / "checkpoint", step=11)
    two_ranks.update(batch, PPOClipLoss())
    changed = dict(two_ranks.weights())
    assert any(not torch.equal(before[name], changed[name]) for name in before)
    assert two_ranks.load(tmp_path / "checkpoint") == 11
    assert all(torch.equal(before[name], value) for name, value in two_ranks.weights())


@needs_ray
@pytest.mark.dist
def test_ranks_begin_when_weights_are_asked_for_and_make_no_copies_of_their_own(
    two_ranks, monkeypatch
):
    """What they free for it is free before an engine takes memory; rank 0's tensors are copied once, into Ray's memory."""
    whole, called, call = dict(two_ranks.weights()), [], two_ranks._call
    monkeypatch.setattr(two_ranks, "_call", lambda *given: called.append(given) or call(*given))
    tensors = two_ranks.weights(None)
    assert called == [("start_weights", "weights", None, None)]
    assert all(torch.equal(value, whole[name]) for name, value in tensors)


@needs_ray
@pytest.mark.dist
def test_weights_travel_in_bounded_chunks(two_ranks, monkeypatch):
    whole = dict(two_ranks.weights())
    monkeypatch.setattr("rlflow.cluster.trainer.CHUNK_BYTES", 1)  # a tensor per message
    streamed = list(two_ranks.weights())
    assert [name for name, _ in streamed] == list(whole)
    assert all(torch.equal(value, whole[name]) for name, value in streamed)
    next(two_ranks.weights())  # a consumer may leave early
    assert len(list(two_ranks.weights())) == len(whole)


@needs_ray
@pytest.mark.dist
def test_each_rank_packs_the_whole_weights_on_its_own_gpu(two_ranks):
    """Split over two ranks, both have all of them, in buckets of one kind, and free the memory at the end."""
    import ray

    for actor in two_ranks._actors:
        ray.get(actor.__ray_call__.remote(lambda _: gpu_memory.stand_in()))
    whole = dict(two_ranks.weights())
    limit = max(value.nbytes for value in whole.values())
    found, stream = {"GPU-0": {}, "GPU-1": {}}, two_ranks.gpu_weights(GpuSharing(limit))
    sizes, handles = [], []
    for bucket in stream:
        if not bucket.tensors:
            break
        sizes.append(bucket.nbytes)
        handles.append(bucket.handles)
        for gpu, tensors in found.items():
            tensors |= gpu_memory.tensors_in(bucket, gpu)
        files = [os.readlink(path) for path, *_ in bucket.handles.values()]
    assert len(sizes) > 2 and max(sizes) <= limit and all(one == handles[0] for one in handles)
    for tensors in found.values():
        assert list(tensors) == list(whole)
        assert all(torch.equal(value, whole[name]) for name, value in tensors.items())
    stream.close()
    left = [path for path, *_ in handles[0].values() if os.path.exists(path)]
    assert not {os.readlink(path) for path in left} & set(files)


def assert_listening_on_the_loopback(processes: list[psutil.Process]) -> None:
    listening = [
        (process.name(), connection.laddr.ip)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {ip.removeprefix("::ffff:") for _, ip in listening} <= {"127.0.0.1", "::1"}, listening


@needs_ray
@pytest.mark.dist
def test_every_socket_listens_on_the_loopback_only(two_ranks):
    assert_listening_on_the_loopback(descendants())


@needs_ray
@pytest.mark.dist
def test_an_error_of_the_ranks_is_one_line_and_the_trainer_lives_on(two_ranks, batch):
    with pytest.raises(ConfigError, match="referense"):
        two_ranks.score(batch, model="referense")
    with pytest.raises(
        RLFlowError, match=r"^trainer rank \d: ZeroDivisionError: a loss gone wrong$"
    ):
        two_ranks.update(batch, FailingLoss())
    assert two_ranks.score(batch)["logprobs"].isfinite().all()


def slow_disk(rank: object) -> None:
    """Of the thread that writes."""
    os.fsync = lambda _: threading.current_thread().name == "checkpoint" and time.sleep(2.5)


@needs_ray
@pytest.mark.dist
def test_a_checkpoint_may_take_longer_than_ranks_may_stand_still(
    two_ranks, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("rlflow.cluster.trainer.LOOK_EVERY_S", 0.2)
    two_ranks._gather([actor.__ray_call__.remote(slow_disk) for actor in two_ranks._actors])
    monkeypatch.setattr(two_ranks, "_stall_timeout_s", 1.0)
    two_ranks.begin_save(tmp_path, 1)
    assert not two_ranks.finish_save(wait=False)
    assert two_ranks.finish_save() and "still being written" in caplog.text


@needs_ray
@pytest.mark.dist
def test_a_rank_that_dies_is_one_error_and_no_process_stays(two_ranks, batch, processes_before):
    """Ends the shared trainer, so it stands last among the tests that use it."""
    everyone = [process for process in descendants() if process not in processes_before]
    ranks = [process for process in everyone if "TrainerRank" in " ".join(process.cmdline())]
    assert len(ranks) == 2
    ranks[0].kill()
    with pytest.raises(RLFlowError, match=r"^trainer rank \d"):
        two_ranks.update(batch, PPOClipLoss())
    two_ranks.close()
    assert not still_alive(everyone)
    with pytest.raises(RLFlowError, match="closed"):
        two_ranks.score(batch)


@needs_ray
@pytest.mark.dist
@pytest.mark.slow
def test_a_critic_trains_in_ray_actors_as_in_one_process(model_path, batch, tmp_path):
    """Its checkpoint too."""
    draw = torch.Generator().manual_seed(3)
    targets = batch.replace(
        values=torch.zeros(batch.tokens.shape),
        returns=torch.randn(batch.tokens.shape, generator=draw),
    )
    options, loss = (
        {**OPTIONS, "critic": {"lr": 1e-2}},
        SumLoss((PPOClipLoss(), ValueLoss(clip=None))),
    )
    oracle = Trainer.from_pretrained(model_path, ORACLE, **options)
    ranks = RayTrainer(model_path, ranks=2, **options)
    try:
        for _ in range(3):
            expected, report = oracle.update(targets, loss), ranks.update(targets, loss)
            for name in (
                "loss",
                "gradient_norm",
                "critic_loss",
                "critic_gradient_norm",
                "critic_lr",
                "value_loss",
            ):
                assert report[name] == pytest.approx(expected[name], rel=2e-5), name
        values = ranks.score(targets, want=("values",))["values"]
        torch.testing.assert_close(
            values, oracle.score(targets, want=("values",))["values"], atol=1e-4, rtol=1e-4
        )
        ranks.save(tmp_path / "checkpoint", 3)
        ranks.update(targets, loss)
        assert ranks.load(tmp_path / "checkpoint") == 3
        assert torch.equal(ranks.score(targets, want=("values",))["values"], values)
    finally:
        ranks.close()


@needs_ray
@pytest.mark.dist
@pytest.mark.slow
def test_adapters_train_in_ray_actors_as_in_one_process(model_path, batch):
    """Both streams of them too: merged into the weights, and alone."""
    options, loss = {**OPTIONS, "lora": {"rank": 4}, "seed": 3}, PPOClipLoss()
    oracle = Trainer.from_pretrained(model_path, ORACLE, **options)
    ranks = RayTrainer(model_path, ranks=2, tensor_parallel=2, **options)
    try:
        for _ in range(3):
            expected, report = oracle.update(batch, loss), ranks.update(batch, loss)
            assert report["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=2e-5)
        for stream in ("weights", "adapter_weights"):
            found = dict(getattr(ranks, stream)())
            for name, value in getattr(oracle, stream)():
                torch.testing.assert_close(found.pop(name), value, atol=1e-5, rtol=1e-5)
            assert not found
    finally:
        ranks.close()


@dataclasses.dataclass(frozen=True)
class HangingLoss:
    """Hangs, or stops the whole process, on one rank; the other waits for it."""

    stops: bool
    rank: int = 1

    def __call__(self, output: PolicyOutput, batch: Batch):
        if torch.distributed.get_rank() == self.rank:
            if self.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()
        return -output.logprobs, {}


@needs_ray
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True], ids=["hangs", "stopped"])
def test_a_rank_that_does_not_move_is_named_and_no_process_stays(
    model_path, batch, monkeypatch, caplog, stops
):
    monkeypatch.setattr("rlflow.cluster.trainer.LOOK_EVERY_S", 0.5)
    before = set(descendants())
    trainer = RayTrainer(model_path, ranks=2, tensor_parallel=2, stall_timeout_s=20.0, **OPTIONS)
    try:
        everyone = [process for process in descendants() if process not in before]
        trainer.update(batch, PPOClipLoss())
        message = "rank 1 does not answer" if stops else r"rank 1 is at .*threading\.py:\d+ in wait"
        told = rf"^cluster: update: nothing moved for 20 s: {message}.*waiting for it: rank 0; .*--resume"
        with pytest.raises(RankStuck, match=told):
            trainer.update(batch, HangingLoss(stops))
        assert "trainer rank 0: in update" in caplog.text
        assert stops or "test_cluster.py" in caplog.text
        assert not still_alive(everyone)
    finally:
        trainer.close()


@needs_ray
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", ["score", "save", "begin_save", "start_weights", "snapshot", "load"]
)
def test_a_stopped_rank_ends_any_call_and_is_named(phase, model_path, batch, tmp_path, monkeypatch):
    monkeypatch.setattr("rlflow.cluster.trainer.LOOK_EVERY_S", 0.5)
    trainer = RayTrainer(model_path, ranks=2, tensor_parallel=2, **OPTIONS)
    calls = {
        "score": lambda: trainer.score(batch),
        "save": lambda: trainer.save(tmp_path / "save", 1),
        "begin_save": lambda: trainer.begin_save(tmp_path / "begun", 1),
        "start_weights": lambda: list(trainer.weights()),
        "snapshot": lambda: trainer.snapshot("reference"),
        "load": lambda: trainer.load(tmp_path / "saved"),
    }
    try:
        trainer.save(tmp_path / "saved", 1)
        trainer._stall_timeout_s = 4.0  # only now: a start may take longer
        (pid,) = trainer._gather([trainer._actors[1].__ray_call__.remote(lambda rank: os.getpid())])
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            RankStuck, match=rf"^cluster: {phase}: nothing moved for 4 s: rank 1 does not answer"
        ):
            calls[phase]()
    finally:
        trainer.close()


DRIVER = """
import sys, time
import ray
from rlflow.cluster.trainer import RayTrainer
if __name__ == "__main__":
    trainer = RayTrainer(sys.argv[1], ranks=1, backend=sys.argv[2])
    print("ready", flush=True)
    time.sleep(120)
"""


@needs_ray
@pytest.mark.dist
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_driver_that_imported_ray_listens_on_the_loopback_and_leaves_no_process_behind(
    model_path, number
):
    """Ray reads its settings when it is imported; it listened on all addresses then."""
    command = [sys.executable, "-c", DRIVER, str(model_path), ORACLE]
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    driver = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        assert driver.stdout is not None and driver.stdout.readline().strip() == "ready"
        family = descendants(psutil.Process(driver.pid))
        assert len(family) > 3
        assert_listening_on_the_loopback([psutil.Process(driver.pid), *family])
        if number == signal.SIGINT:
            os.killpg(driver.pid, number)  # as a terminal does it
        else:
            os.kill(driver.pid, number)
        driver.wait(timeout=60)
        assert not still_alive(family)  # a killed driver cannot stop Ray: its guard does
    finally:
        driver.kill()
        driver.wait()


def config_of(**changes: object) -> RunConfig:
    sections: dict[str, object] = {"model": ModelSection(path="no/such/model"), **changes}
    return RunConfig(**sections)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trainer", "ranks", "message"),
    [
        ({"tensor_parallel": 2}, 0, "set cluster.ranks=2"),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            6,
            "= 2 x 2 x 1 = 4, found 6; set cluster.ranks=8",
        ),
        ({"backend": ORACLE}, 2, "runs on one device"),
        ({"backend": "megatorn"}, 0, "Did you mean 'megatron'"),
    ],
)
def test_ranks_that_do_not_fit_fail_before_anything_starts(trainer, ranks, message):
    config = config_of(trainer=TrainerOptions(**trainer), cluster=ClusterSection(ranks=ranks))
    before = len(descendants())
    with pytest.raises(ConfigError, match=message):
        make_trainer(config)
    assert len(descendants()) == before


def test_without_ranks_the_trainer_is_in_this_process_and_decays_over_the_run(model_path):
    config = config_of(
        model=ModelSection(path=str(model_path)),
        trainer=TrainerOptions(backend=ORACLE, schedule={"name": "cosine"}, lr=0.5),
    )
    config.run.steps, config.algorithm.minibatches_per_step, config.algorithm.epochs_per_step = (
        7,
        2,
        3,
    )
    trainer = make_trainer(config)
    assert isinstance(trainer, ReferenceTrainer)
    assert trainer.learning_rate(0) == 0.5 and trainer.learning_rate(
        41
    ) > 0 == trainer.learning_rate(42)


def test_a_missing_ray_says_how_to_install_it(model_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install -e '.*\[ray\]'"):
        RayTrainer(model_path, ranks=1, backend=ORACLE)


@needs_ray
def test_an_address_where_nothing_listens_is_a_config_error_at_once(model_path):
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        RayTrainer(model_path, ranks=1, backend=ORACLE, address="127.0.0.1:1")
