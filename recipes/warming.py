"""Supervised fine-tuning of a demo's starting policy, which the warm-up scripts of the recipes
share."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlflow_tools.kit.imitation import TextPart, row_weights, to_trajectory

from rlflow import Trainer, make_batch
from rlflow.algorithms import SFTLoss
from rlflow.models.weight_files import write_model
from rlflow.rollout import Tokenizer

Row = Callable[[random.Random, float], Sequence[TextPart]]
"""(generator, share of the steps that is over) -> the parts of one training row."""


def parser_of(
    description: str | None, *, steps: int, lr: float, out: str, rows: int = 16
) -> argparse.ArgumentParser:
    """The options of a warm-up script, with its own defaults."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="warm_up.sh", description=description, formatter_class=formatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="of the run; export/ is the policy"
    )
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=rows, help="demonstrations per step")
    parser.add_argument(
        "--lr", type=float, default=lr, help="peak learning rate, cosine to 2%% of it"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the demonstrations and the random model"
    )
    parser.add_argument("--save-every", type=int, default=400, help="steps between checkpoints")
    return parser


def warm_up(start: Path, row: Row, args: argparse.Namespace, *, repeats: bool = True) -> Path:
    """Fine-tunes the HuggingFace directory `start` on rows; returns the directory of the result.
    Stopped in the middle, the same call goes on from its last checkpoint. repeats: see
    `to_trajectory`."""
    latest = args.out / "latest.json"
    schedule = {
        "name": "cosine",
        "warmup_steps": 100,
        "decay_steps": args.steps,
        "min_lr": 0.02 * args.lr,
    }
    trainer = Trainer.from_pretrained(
        start, lr=args.lr, schedule=schedule, tokens_per_microbatch=2048
    )
    done = trainer.load(json.loads(latest.read_text())["checkpoint"]) if latest.exists() else 0
    encode, began = Tokenizer.from_pretrained(start).encode, time.monotonic()
    for step in range(done, args.steps):
        generator = random.Random(f"{args.seed}/{step}")
        rows = [
            to_trajectory(row(generator, step / args.steps), encode, repeats=repeats)
            for _ in range(args.rows)
        ]
        batch = make_batch(rows)
        metrics = trainer.update(batch.replace(weights=row_weights(batch)), SFTLoss())
        if (step + 1) % 50 == 0:
            left = (time.monotonic() - began) / (step + 1 - done) * (args.steps - step - 1)
            print(
                f"step {step + 1}/{args.steps}  loss {metrics['loss']:.3f}  "
                f"gradient norm {metrics['gradient_norm']:.2f}  left {left / 60:.0f} min",
                flush=True,
            )
        if (step + 1) % args.save_every == 0:
            path = args.out / f"checkpoint-{step + 1}"
            trainer.save(path, step + 1)
            latest.write_text(json.dumps({"checkpoint": str(path)}))
    write_model(args.out / "export", trainer.weights(), reference=start)
    trainer.close()
    return args.out / "export"
