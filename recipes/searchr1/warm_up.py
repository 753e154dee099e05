"""Makes the demo's starting policy: a tiny random Qwen2, fine-tuned on demonstrations through the Megatron trainer.

The shipped recipes/searchr1/starting_policy/ came from the defaults. Stopped in the middle, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from rlflow import Trainer, make_batch
from rlflow.algorithms import SFTLoss
from rlflow.models.export import write_model
from rlflow.models.tiny import write_random_model, write_tokenizer
from rlflow.rollout import Tokenizer
from rlflow.run.imitation import row_weights, to_trajectory
from rlflow_environments.search.world.tiny_model import LEARNED_ON, TAGS, VOCABULARY, tokenizer_texts
from rlflow_environments.search.world.warm_up import Curriculum


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="warm_up.sh", description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, default=Path("runs/warm-up"), help="of the run; export/ is the policy")
    parser.add_argument("--steps", type=int, default=3200, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=16, help="demonstrations per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate, cosine to 2%% of it")
    parser.add_argument("--seed", type=int, default=0, help="of the demonstrations and the random model")
    parser.add_argument("--save-every", type=int, default=400, help="steps between checkpoints")
    args = parser.parse_args()

    start, latest = args.out / "random", args.out / "latest.json"
    if not (start / "config.json").exists():
        write_tokenizer(start, tokenizer_texts(), vocabulary=VOCABULARY, tags=TAGS, learned_on=LEARNED_ON)
        write_random_model(start, seed=args.seed)
    schedule = {"name": "cosine", "warmup_steps": 100, "decay_steps": args.steps, "min_lr": 0.02 * args.lr}
    trainer = Trainer.from_pretrained(start, lr=args.lr, schedule=schedule, tokens_per_microbatch=2048)
    done = trainer.load(json.loads(latest.read_text())["checkpoint"]) if latest.exists() else 0
    encode, curriculum, began = Tokenizer.from_pretrained(start).encode, Curriculum(), time.monotonic()
    for step in range(done, args.steps):
        generator = random.Random(f"{args.seed}/{step}")
        rows = [to_trajectory(curriculum.row(generator, step / args.steps), encode, repeats=True) for _ in range(args.rows)]
        batch = make_batch(rows)
        metrics = trainer.update(batch.replace(weights=row_weights(batch)), SFTLoss())
        if (step + 1) % 50 == 0:
            left = (time.monotonic() - began) / (step + 1 - done) * (args.steps - step - 1)
            print(f"step {step + 1}/{args.steps}  loss {metrics['loss']:.3f}  gradient norm {metrics['gradient_norm']:.2f}  "
                  f"left {left / 60:.0f} min", flush=True)  # fmt: skip
        if (step + 1) % args.save_every == 0:
            path = args.out / f"checkpoint-{step + 1}"
            trainer.save(path, step + 1)
            latest.write_text(json.dumps({"checkpoint": str(path)}))
    write_model(args.out / "export", trainer.weights(), reference=start)
    print(f"wrote {args.out / 'export'}")


if __name__ == "__main__":
    main()
