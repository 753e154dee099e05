"""Router replay: what it leaves of the gap between engine and trainer, and what that means for learning.

Random Qwen3-MoE policies (64 experts, 2 of them for each token, none shared) are sampled by the embedded engine in one precision
and scored by the trainer in the other, with routes of its own and with the engine's. Then policies learn a small task with the
engine in bfloat16 and the trainer in float32, with and without replay. The last line is one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow import Environment, Metric, Step, Task

LETTERS = "abcdefgh"
WORDS = ("<pad>", "<end>", *LETTERS, "?")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PRECISIONS = (("bfloat16", "float32"), ("float32", "bfloat16"))
"""Of engine and trainer."""
Gaps = dict[str, float]


class Reversed(Environment):
    """Shows three letters and expects them from the last to the first, a third of a point for each."""

    stop = ("?",)
    metrics = {"exact_match": Metric("share", "of rows said", score=True)}

    def tasks(self, split: str) -> Sequence[Task]:
        """Every row of three letters."""
        rows = [a + b + c for a in LETTERS for b in LETTERS for c in LETTERS]
        return [Task(f"{split}-{row}", f"{row}?", row[::-1]) for row in rows]

    async def step(self, episode: Any, response: str) -> Step:
        """Judges the only response."""
        wanted = episode.task.answer
        right = sum(said == want for said, want in zip(response, wanted, strict=False))
        return Step(
            reward=right / 3,
            terminated=True,
            metrics={"exact_match": float(response[:3] == wanted)},
        )


def write_policy(path: Path, seed: int, scale: float) -> Path:
    """A random policy whose tokens are WORDS. scale: standard deviation of its weights, of routers a tenth, so that both of a
    token's experts count."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_moe", vocab_size=len(WORDS), **SIZES)
    )
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" not in name:
                own = scale / 10 if name.endswith("mlp.gate.weight") else scale
                parameter.copy_(own * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(WORDS)}, []))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.save_pretrained(str(path))
    return path


def gaps(path: Path, engine_dtype: str, trainer_dtype: str, rows: int, tokens: int) -> Gaps:
    """Mean absolute difference of log-probs, nats, of sampled tokens, with routers free and replayed; the share of routes that
    differ."""
    import torch

    from rlflow.batching import ROUTES, make_batch
    from rlflow.rollout.embedded.embedded_engine import EmbeddedEngine
    from rlflow.rollout.engine import Sampling
    from rlflow.rollout.episode_state import TokenSpan, make_segment
    from rlflow.trainer.base import Trainer
    from rlflow.types import StopReason, Trajectory

    engine = EmbeddedEngine(path, dtype=engine_dtype, routes=True, max_tokens=tokens + 8)
    prompts = [[2 + (row + place) % len(LETTERS) for place in range(3)] for row in range(rows)]

    async def sample() -> list[Any]:
        return await asyncio.gather(
            *(engine.generate(one, Sampling(tokens, seed=row)) for row, one in enumerate(prompts))
        )

    segments = [
        make_segment([TokenSpan(prompt), TokenSpan(done.tokens, done)])
        for prompt, done in zip(prompts, asyncio.run(sample()), strict=True)
    ]
    batch = make_batch(
        [Trajectory("t", "g", [one], [], 0.0, StopReason.TERMINATED) for one in segments]
    )
    trainer = Trainer.from_pretrained(path, dtype=trainer_dtype, router_replay="rollout")
    free, fixed = trainer.score(batch, want=("logprobs", ROUTES)), trainer.score(batch)
    trainer.close()
    known = torch.arange(batch.tokens.shape[1]) < (batch.lengths - 1)[:, None]
    same = (batch.extras[ROUTES].long()[..., :, None] == free[ROUTES].long()[..., None, :]).any(-1)
    mask = batch.loss_mask
    return {
        "differ": 1 - float(same[known].float().mean()),
        "free": float((free["logprobs"] - batch.logprobs)[mask].abs().mean()),
        "replayed": float((fixed["logprobs"] - batch.logprobs)[mask].abs().mean()),
    }


def learned(
    path: Path, runs: Path, seed: int, replay: str, steps: int, lr: float
) -> dict[str, float]:
    """What a run with the engine in bfloat16 and the trainer in float32 comes to."""
    from rlflow.config.schema import load_config
    from rlflow.loop import train
    from rlflow.report.sinks import read_metrics
    from rlflow.run.directory import RunDirectory

    name = f"{replay}-{seed}"
    values = [
        f"run.directory={runs}/{{name}}", f"run.name={name}", f"run.steps={steps}", f"run.seed={seed}", f"model.path={path}",
        f"environment={{name: '{Path(__file__).resolve()}:Reversed'}}", "rollout.engine={name: embedded, dtype: bfloat16}",
        "rollout.prompts_per_step=16", "rollout.samples_per_prompt=16", "rollout.max_turns=1", "rollout.max_response_tokens=3",
        "rollout.max_total_tokens=16", f"trainer.lr={lr}", f"trainer.router_replay={replay}",
        "trainer.optimizer={name: adamw, weight_decay: 0, beta2: 0.99}", "evaluation.every_steps=0", "evaluation.at_start=false",
        "checkpoint.every_steps=0", "checkpoint.export=false", "metrics.progress=none", "metrics.picture=false",
    ]  # fmt: skip
    train(load_config(None, values))
    steps_done = [
        one for one in read_metrics(RunDirectory.open(runs / name).metrics) if "train/loss" in one
    ]
    last = steps_done[-10:]

    def mean(key: str, of: list[dict[str, float]]) -> float:
        return statistics.fmean(one[key] for one in of)

    return {
        "reward": mean("train/reward", last),
        "reward_all": mean("train/reward", steps_done),
        "exact_match": mean("train/exact_match", last),
        "gap": mean("train/logprob_gap", steps_done),
        "gap_last": mean("train/logprob_gap", last),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, few tokens, no learning")
    parser.add_argument("--steps", type=int, default=80, help="of each learning run; 0: none")
    parser.add_argument("--lr", type=float, default=3e-3, help="of learning")
    parser.add_argument(
        "--scale", type=float, default=0.15, help="standard deviation of the random weights"
    )
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else 3)
    rows, tokens = (8, 24) if arguments.quick else (32, 64)
    results: dict[str, Any] = {"gaps": {}, "learning": {}}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            path = write_policy(Path(folder) / f"scored-{seed}", seed, arguments.scale)
            for engine, trainer in PRECISIONS:
                found = gaps(path, engine, trainer, rows, tokens)
                results["gaps"][f"{engine}/{trainer}/{seed}"] = found
                told = f"free {found['free']:.5f}, replayed {found['replayed']:.5f} nats, {found['differ']:.2%} of routes differ"
                print(f"engine {engine}, trainer {trainer}, seed {seed}: {told}", flush=True)
        for seed in seeds if arguments.steps and not arguments.quick else ():
            start = write_policy(Path(folder) / f"start-{seed}", seed, arguments.scale)
            for replay in ("off", "rollout"):
                run = learned(start, Path(folder), seed, replay, arguments.steps, arguments.lr)
                results["learning"][f"{replay}/{seed}"] = run
                shown = ", ".join(f"{name} {value:.4g}" for name, value in run.items())
                print(f"router_replay={replay}, seed {seed}: {shown}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
