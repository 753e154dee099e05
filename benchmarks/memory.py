"""Memory of a long run: the resident set over many steps whose rows have other, skewed lengths every time.

A step is what `rlflow train` makes of one, with a tiny model: the embedded engine samples responses, the trainer scores and
updates, the new weights go to the engine. What grows with the number of steps, and not with their size, shows. Aim: at the end
at most 10% above the peak of the first 50 steps. The last line is one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import MIB, SHAPES, versions, write_random_model
from train_step import make_batch, policy_gradient

SETTLED = 50  # steps after which memory is not to grow
LIMIT = 1.10
PARTS = ("trainer", "engine")


def skewed_lengths(draw: random.Random, rows: int, longest: int) -> tuple[int, ...]:
    """Lengths as of agent episodes: most of them short, few long (log-normal, median a sixth of the longest)."""
    return tuple(
        max(4, min(longest, round(longest / 6 * draw.lognormvariate(0.0, 0.9))))
        for _ in range(rows)
    )


def rss_mib() -> float:
    import psutil

    return psutil.Process().memory_info().rss / MIB


async def measure(
    path: Path, model: str, steps: int, parts: tuple[str, ...], packed: bool, longest: int
) -> list[float]:
    """The resident set in MiB after each step."""
    import rlflow.trainer.megatron  # noqa: F401
    from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
    from rlflow.rollout.engine import Sampling
    from rlflow.trainer.base import Trainer

    vocab = SHAPES[model].vocab
    trainer = Trainer.from_pretrained(
        path, lr=1e-5, packing=packed, tokens_per_microbatch=2 * longest
    )
    engine = EmbeddedEngine(path, max_tokens=2 * longest) if "engine" in parts else None
    draw = random.Random(0)
    taken = []

    async def sample(lengths: tuple[int, ...]) -> None:
        assert engine is not None
        calls = [
            engine.generate(
                [draw.randrange(1, vocab) for _ in range(length)],
                Sampling(max_tokens=1 + length % 16),
                f"{number}",
            )
            for number, length in enumerate(lengths)
        ]
        await asyncio.gather(*calls)

    for number in range(steps):
        lengths = skewed_lengths(draw, rows=12, longest=longest)
        if engine is not None:
            await sample(lengths)
        if "trainer" in parts:
            batch = make_batch(lengths, vocab)
            trainer.score(batch)
            trainer.update(batch, policy_gradient)
        if engine is not None:
            await engine.load_weights(trainer.weights(), version=number + 1)
        taken.append(rss_mib())
        if (number + 1) % SETTLED == 0:
            print(f"step {number + 1:>4}: {taken[-1]:8.0f} MiB", flush=True)
    if engine is not None:
        await engine.close()
    trainer.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="150 steps: about a minute")
    parser.add_argument("--steps", type=int, help="500 (quick: 150)")
    parser.add_argument(
        "--only", choices=PARTS, help="leave the other part out, to see whose memory grows"
    )
    parser.add_argument(
        "--padded", action="store_true", help="rows are padded, not laid end to end"
    )
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest row (256)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    steps = options.steps or (150 if options.quick else 500)
    parts = (options.only,) if options.only else PARTS
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_random_model(path, SHAPES["tiny"])
        taken = asyncio.run(
            measure(path, "tiny", steps, parts, not options.padded, options.longest)
        )
    from rlflow.devices.matmul import PRODUCTS, processor_name

    settled, highest = max(taken[:SETTLED]), max(taken)
    result: dict[str, Any] = {
        "benchmark": "memory",
        "versions": {
            "python": platform.python_version(),
            **versions("rlflow", "torch", "megatron-core"),
        },
        "processor": processor_name(),
        "products": dict(PRODUCTS.chosen()),
        "parts": parts,
        "steps": steps,
        "first_mib": taken[0],
        "settled_mib": settled,
        "last_mib": taken[-1],
        "peak_mib": highest,
        "growth": highest / settled,
        "limit": LIMIT,
        "passed": highest <= LIMIT * settled,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
