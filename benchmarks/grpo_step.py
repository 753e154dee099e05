#!/usr/bin/env python
"""A whole GRPO step (sample, score, advantages, update, new weights to the sampler): rlflow against TRL's GRPOTrainer.

Both sides get the same random model, prompts, group size, completion lengths and reward, one optimizer step per step over
all completions, Adam with the same figures, no reference model (--kl: one on both sides) and the same number of threads.
TRL runs as someone would who wants it fast on a CPU: float32, no gradient checkpointing, fused AdamW, no logging.

    pip install -e '.[benchmarks]'        # trl, datasets, accelerate; torch stays what it is
    python benchmarks/grpo_step.py [--quick]

The sides take turns within one run, each in a process of its own. tokens/s counts sampled tokens, as each side counted
them. The last line is one JSON object; docs/benchmarks.md says how to read it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import SHAPES, Figures, Turns, interleave, spread, summary, versions, write_random_model

from rlflow.environment import Environment
from rlflow.types import Episode, Step, Task

RIVAL, OURS = "trl", "rlflow"
ADAM = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
CLIP, KL = 0.2, 0.04
FIRST_WORD = 2048  # ids below may end a completion; prompts consist of ids from here on


@dataclass(frozen=True)
class Case:
    """One comparison. A completion ends after `most` tokens, or when one of `stop_ids` ids is sampled: of a random model
    with a nearly uniform distribution, after vocab / stop_ids tokens on the average, the lengths distributed geometrically."""

    name: str
    model: str
    prompts: int
    group: int
    most: int
    stop_ids: int

    @property
    def longest_prompt(self) -> int:
        return 104


def cases(quick: bool, model: str) -> list[Case]:
    """Completions of equal length, where TRL neither waits nor pads; and of skewed lengths, as they are in practice."""
    vocab = SHAPES[model].vocab
    if quick:
        return [Case("equal", model, 2, 4, 24, 1), Case("skewed", model, 2, 4, 64, vocab // 16)]
    return [Case("equal", model, 8, 8, 128, 1), Case("skewed", model, 8, 8, 256, vocab // 64)]


@dataclass(frozen=True)
class Setting:
    """What the sides run on. kl: with a reference model. microbatch: rows of TRL's forward pass. trl_vllm: TRL samples with
    vLLM, in the same process."""

    threads: int
    device: str
    dtype: str
    kl: bool
    microbatch: int
    trl_vllm: bool = False


# ---------------------------------------------------------------- what both sides are given


def write_model(path: Path, case: Case, setting: Setting) -> int:
    """A random model with a tokenizer of one word per id; returns its number of parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    shape = SHAPES[case.model]
    ends = list(range(1, 1 + case.stop_ids))
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": ends}
    parameters = write_random_model(path, shape, setting.dtype, setting.device, **special)
    words = {
        word: index
        for index, word in enumerate(["<pad>", "<end>", *(f"w{i}" for i in range(2, shape.vocab))])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.save_pretrained(str(path))
    GenerationConfig(pad_token_id=0, eos_token_id=ends).save_pretrained(str(path))
    return parameters


def prompt_texts(count: int, vocab: int) -> list[str]:
    """An instruction of 64 words that all share, then 12 to 40 words of its own (seed 0)."""
    import torch

    draw = torch.Generator().manual_seed(0)

    def words(number: int) -> list[str]:
        return [
            f"w{index}"
            for index in torch.randint(FIRST_WORD, vocab, (number,), generator=draw).tolist()
        ]

    instruction = words(64)
    lengths = torch.randint(12, 41, (count,), generator=draw).tolist()
    return [" ".join([*instruction, *words(length)]) for length in lengths]


def reward(text: str) -> float:
    """A number in [0, 1) that nobody can learn: no group's rewards are all equal, so every completion is trained."""
    return zlib.crc32(text.encode()) / 2**32


class Prompts(Environment):
    """The prompts as tasks of one turn."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._tasks = [Task(str(index), text) for index, text in enumerate(texts)]

    def tasks(self, split: str) -> Sequence[Task]:
        return self._tasks

    async def step(self, episode: Episode, response: str) -> Step:
        return Step(reward=reward(response), terminated=True)


# ---------------------------------------------------------------- the two sides


def trl_side(turns: Turns, path: Path, case: Case, setting: Setting, steps: int) -> None:
    """`GRPOTrainer.train`, held between its steps."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    turns.imported()
    seen = {"generated": 0.0, "rollout_s": 0.0, "fed": 0.0}
    fed_before = 0.0

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.update(generated=float(sum(map(len, completion_ids))), rollout_s=turns.since_begin())
        return [reward(text) for text in completions]

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not turns.begin():
                os._exit(0)  # in the middle of a loop that is not ours, with nothing to save

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal fed_before
            fed_before, seen["fed"] = (
                state.num_input_tokens_seen,
                state.num_input_tokens_seen - fed_before,
            )
            turns.end(**seen)

    rows = case.prompts * case.group
    microbatch = min(setting.microbatch, rows)
    arguments = GRPOConfig(
        output_dir=str(path / "trl"),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=rows // microbatch,
        num_generations=case.group,
        max_completion_length=case.most,
        temperature=1.0,
        beta=KL if setting.kl else 0.0,
        epsilon=CLIP,
        loss_type="dapo",  # every token of the step counts alike, as in rlflow's token_mean
        scale_rewards="group",
        max_steps=steps,
        optim="adamw_torch_fused",
        learning_rate=ADAM["lr"],
        lr_scheduler_type="constant",
        adam_beta1=ADAM["beta1"],
        adam_beta2=ADAM["beta2"],
        adam_epsilon=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        max_grad_norm=1.0,
        bf16=setting.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=setting.device == "cpu",
        use_vllm=setting.trl_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        dataloader_pin_memory=setting.device != "cpu",
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = prompt_texts(case.prompts, SHAPES[case.model].vocab)
    trainer = GRPOTrainer(
        model=str(path),
        reward_funcs=score,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        # Named, as rlflow reads it: AutoTokenizer would split the text by Qwen2's rule instead of the file's.
        processing_class=PreTrainedTokenizerFast.from_pretrained(str(path), padding_side="left"),
        callbacks=[TakeTurns()],
    )
    trainer.train()


def rlflow_side(turns: Turns, path: Path, case: Case, setting: Setting) -> None:
    """The training loop of `rlflow train`, its metrics file included."""
    import rlflow.rollout.embedded.embedded_engine
    import rlflow.trainer.megatron  # noqa: F401
    from rlflow.loop import training_step
    from rlflow.run.open import open_run

    turns.imported()
    with open_run(run_config(path, case, setting)) as run:
        stream = run.groups()
        while turns.begin():
            groups = next(stream)
            metrics = training_step(run.step, groups, run.trainer, run.algorithm, run.timer)
            run.sync_weights(version=run.step + 1)
            run.finish_step(metrics, groups)
            written = json.loads(run.directory.metrics.read_text().splitlines()[-1])
            sampled, fed = metrics["train/tokens"], metrics["train/fed_tokens"]
            turns.end(generated=sampled, fed=fed, rollout_s=written["time/rollout_s"])


def run_config(path: Path, case: Case, setting: Setting) -> Any:
    from rlflow.config.schema import RunConfig

    config = RunConfig()
    config.run.directory, config.run.steps = str(path / "rlflow"), 1000
    config.model.path, config.model.dtype = str(path), setting.dtype
    texts = prompt_texts(case.prompts, SHAPES[case.model].vocab)
    config.environment = {"name": "grpo_step:Prompts", "texts": texts}
    config.rollout.prompts_per_step, config.rollout.samples_per_prompt = case.prompts, case.group
    config.rollout.max_turns, config.rollout.max_response_tokens = 1, case.most
    config.rollout.max_total_tokens = case.longest_prompt + case.most
    rows = case.prompts * case.group
    config.rollout.engine = {
        "name": "embedded",
        "max_concurrency": rows,
        "max_tokens": config.rollout.max_total_tokens,
    }
    config.algorithm.losses = [{"name": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP}]
    if setting.kl:
        config.algorithm.losses.append({"name": "kl", "coefficient": KL})
    optimizer = {"name": "adamw", **{name: value for name, value in ADAM.items() if name != "lr"}}
    config.trainer = replace(
        config.trainer, lr=ADAM["lr"], optimizer=optimizer, packing=True, tokens_per_microbatch=4096
    )
    config.metrics.progress, config.metrics.picture, config.metrics.trajectories_per_step = (
        "none",
        False,
        0,
    )
    config.evaluation.at_start = False
    return config


# ---------------------------------------------------------------- the comparison


def compare(case: Case, path: Path, rounds: int, setting: Setting) -> dict[str, Any]:
    """Figures of both sides and their ratios. Raises RuntimeError where they did not do the same work."""
    sides = {
        RIVAL: (trl_side, path, case, setting, rounds + 2),
        OURS: (rlflow_side, path, case, setting),
    }
    taken = interleave(sides, rounds, threads=setting.threads, device=setting.device)
    result: dict[str, Any] = {"case": case.name, **asdict(case)}
    for side, turns in taken.items():
        counted = turns[1:]
        result[side] = {
            "tokens_per_s": summary([turn["generated"] / turn["wall_s"] for turn in counted]),
            "tokens_per_cpu_s": summary([turn["generated"] / turn["cpu_s"] for turn in counted]),
            "generated": summary([turn["generated"] for turn in counted]),
            "step_s": summary([turn["wall_s"] for turn in counted]),
            "rollout_share": summary([turn["rollout_s"] / turn["wall_s"] for turn in counted]),
            "peak_mib": max(turn["peak_mib"] for turn in turns),
        }
    check_equal_work(case, taken[OURS], taken[RIVAL])
    for ratio, key in (("speedup", "tokens_per_s"), ("speedup_cpu", "tokens_per_cpu_s")):
        result[ratio] = result[OURS][key]["median"] / result[RIVAL][key]["median"]
    return result


def check_equal_work(case: Case, ours: list[Figures], rival: list[Figures]) -> None:
    """Raises RuntimeError unless both sides read the same prompts and sampled about as many tokens."""
    prompts = {turn["fed"] - turn["generated"] for turn in [*ours, *rival]}
    if len(prompts) > 1:
        raise RuntimeError(
            f"{case.name}: the prompts of a step differ, they have {sorted(prompts)} tokens"
        )
    sampled, other = (sum(turn["generated"] for turn in side) for side in (ours, rival))
    if abs(sampled - other) > 0.25 * other:
        raise RuntimeError(
            f"{case.name}: rlflow sampled {sampled:.0f} tokens, TRL {other:.0f}; the work differs"
        )


HEADER = "{:<8} {:<7} {:>8} {:>10} {:>12} {:>10} {:>9} {:>8} {:>9}"
COLUMNS = (
    "case",
    "side",
    "tokens/s",
    "low..high",
    "tokens/CPU-s",
    "low..high",
    "sampled",
    "rollout",
    "peak MiB",
)


def print_result(result: dict[str, Any]) -> None:
    """Three rows of the table: both sides and their ratio. `rollout`: its share of the step's time."""
    for side in (RIVAL, OURS):
        row = result[side]
        wall, processor = row["tokens_per_s"], row["tokens_per_cpu_s"]
        print(
            f"{result['case']:<8} {side:<7} {wall['median']:>8.0f} {spread(wall):>10} {processor['median']:>12.0f} "
            f"{spread(processor):>10} {row['generated']['median']:>9.0f} {row['rollout_share']['median']:>8.0%} "
            f"{row['peak_mib']:>9.0f}"
        )
    ratios = (
        f"{'':<8} {'ratio':<7} {result['speedup']:>7.2f}x {'':>10} {result['speedup_cpu']:>11.2f}x"
    )
    print(ratios, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter completions: under a minute"
    )
    parser.add_argument(
        "--model", choices=[name for name in SHAPES if not name.endswith("B")], default="18M"
    )
    parser.add_argument("--rounds", type=int, help="counted steps per side and case (5; quick: 2)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each side (1)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument(
        "--kl", action="store_true", help="with a reference model and a KL term, on both sides"
    )
    parser.add_argument(
        "--microbatch",
        type=int,
        default=16,
        help="rows of TRL's forward pass; the fastest is chosen (16)",
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    missing = [
        name for name in ("trl", "datasets", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(
            f"{sys.argv[0]}: not installed: {', '.join(missing)}: pip install -e '.[benchmarks]'",
            file=sys.stderr,
        )
        sys.exit(2)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # threads that wait busily cost most on shared cores
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setting = Setting(options.threads, "cpu", "float32", options.kl, options.microbatch)
    rounds = options.rounds or (2 if options.quick else 5)
    chosen = [case for case in cases(options.quick, options.model) if options.only in case.name]
    run(chosen, rounds, setting, benchmark="grpo_step")


def run(chosen: Sequence[Case], rounds: int, setting: Setting, benchmark: str) -> None:
    """Plays the cases and prints versions, table and JSON."""
    packages = versions("rlflow", "trl", "torch", "transformers", "megatron-core", "accelerate")
    named = ", ".join(f"{name} {number}" for name, number in packages.items())
    print(f"{named} | {setting.device}, {setting.dtype}, {setting.threads} thread(s) per side")
    print(HEADER.format(*COLUMNS), flush=True)
    results, parameters = [], 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as directory:
            parameters = write_model(Path(directory), case, setting)
            results.append(compare(case, Path(directory), rounds, setting))
        print_result(results[-1])
    print(
        json.dumps(
            {
                "benchmark": benchmark,
                "versions": {"python": platform.python_version(), **packages},
                "parameters": parameters,
                "rounds": rounds,
                "setting": asdict(setting),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
