"""One rank of a check of all GPUs without Ray and vLLM; torchrun starts it.

    torchrun --standalone --nproc-per-node 8 benchmarks/gpu/ranks.py smoke
    torchrun --standalone --nproc-per-node 8 benchmarks/gpu/ranks.py updates --config FILE --checkpoint DIR --out FILE

updates: Megatron's trainer with the trainer section of a configuration over batches of random
tokens, which only their number decides: an update after a resume has to equal the one of a run
that was not interrupted."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

DEADLINE_S = 120.0  # of a collective
SIZE = 2**28  # float32 that the smoke test sums, in bytes 1 GiB


def join() -> tuple[int, int]:
    """(rank, ranks), with the process group over NCCL, or gloo without GPUs."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=DEADLINE_S))
    return rank, ranks


def smoke() -> None:
    """Sums over all ranks, the rate of a large one, and objects."""
    rank, ranks = join()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        value = torch.full((1000,), rank + 1, dtype=dtype, device=device)
        dist.all_reduce(value)
        assert bool((value == ranks * (ranks + 1) // 2).all()), (
            f"the sum of {dtype} is wrong on rank {rank}"
        )
    large = torch.ones(SIZE if device.type == "cuda" else 2**16, device=device)
    dist.all_reduce(large)
    started = synchronized()
    dist.all_reduce(large)
    spent_s = synchronized() - started
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, torch.cuda.get_device_name() if device.type == "cuda" else "CPU")
    if rank == 0:
        rate = 2 * (ranks - 1) / ranks * large.nbytes / spent_s / 1e9  # bytes that a rank sends
        print(json.dumps({"ranks": ranks, "devices": names, "all_reduce_gb_s": rate}))
    dist.destroy_process_group()


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def updates(given: argparse.Namespace) -> None:
    """Updates from the checkpoint on, where there is one; writes a line each, then what the
    policy says of a batch."""
    from rlflow.config.schema import load_config
    from rlflow.trainer.base import Trainer

    rank, ranks = join()
    config = load_config(given.config, [f"cluster.ranks={ranks}", *given.override])
    options = {name: getattr(config.trainer, name) for name in config.trainer.__dataclass_fields__}
    trainer = Trainer.from_pretrained(config.model.path, dtype=config.model.dtype, **options)
    done = trainer.load(given.checkpoint) if given.resume else 0
    out = Path(given.out)
    with recording(given.profile if rank == 0 else None):
        for number in range(done, given.updates):
            if number == given.die_before and rank == ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            line = timed_update(trainer, number, ranks, given.tokens)
            if rank == 0:
                with out.open("a") as file:
                    file.write(json.dumps({"update": number, **line}) + "\n")
            if number + 1 == given.save_after:
                trainer.save(given.checkpoint, given.save_after)
    scores = trainer.score(batch_of(-1, ranks, given.tokens))["logprobs"]
    if rank == 0:
        torch.save(scores, out.with_suffix(".pt"))
    trainer.close()
    dist.destroy_process_group()


def timed_update(trainer: Any, number: int, ranks: int, tokens: int) -> dict[str, float]:
    """Metrics of an update, seconds and memory with them."""
    from train_step import policy_gradient

    batch = batch_of(number, ranks, tokens)
    started = synchronized()
    metrics = trainer.update(batch, policy_gradient)
    seconds = synchronized() - started
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return {
        **metrics,
        "seconds": seconds,
        "tokens_per_s": metrics["tokens"] / seconds,
        "peak_gib": peak,
    }


def batch_of(number: int, ranks: int, tokens: int) -> Any:
    """Rows of `tokens` down to an eighth of it, eight for each rank, drawn from the number
    alone."""
    from train_step import make_batch

    torch.manual_seed(number + 1)
    lengths = torch.randint(tokens // 8, tokens + 1, (8 * ranks,)).tolist()
    batch = make_batch(tuple(lengths), 1000)  # tokens that every vocabulary has
    return batch.replace(advantages=torch.randn(batch.advantages.shape))


@contextlib.contextmanager
def recording(folder: str | None) -> Iterator[None]:
    """Inside, torch's profiler runs, where a folder is given; its trace and table go there."""
    if folder is None:
        yield
        return
    with torch.profiler.profile() as recorded:
        yield
    Path(folder).mkdir(parents=True, exist_ok=True)
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = recorded.key_averages().table(sort_by=order, row_limit=40)
    (Path(folder) / "profile.txt").write_text(table)
    recorded.export_chrome_trace(str(Path(folder) / "trace.json.gz"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("smoke", "updates"))
    parser.add_argument("--config", help="a run configuration, whose trainer and model are taken")
    parser.add_argument("--override", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--checkpoint", metavar="DIR")
    parser.add_argument("--out", metavar="FILE", help="a JSON line per update; scores beside it")
    parser.add_argument("--updates", type=int, default=4, help="in all (4)")
    parser.add_argument(
        "--save-after", type=int, default=0, metavar="N", help="save once N updates are done"
    )
    parser.add_argument(
        "--die-before", type=int, metavar="N", help="the last rank is killed before update N"
    )
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--tokens", type=int, default=4096, help="of the longest row (4096)")
    parser.add_argument("--profile", metavar="DIR", help="torch's profiler on rank 0")
    given = parser.parse_args()
    smoke() if given.what == "smoke" else updates(given)


if __name__ == "__main__":
    main()
