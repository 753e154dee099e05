"""The export of a run, with its model card and its proof: transformers computes from the directory
what the trainer computes."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlflow.batching import token_batch
from rlflow.config.schema import RunConfig
from rlflow.errors import ModelError
from rlflow.models.adapter import read_adapter, write_adapter
from rlflow.models.huggingface import WeightFiles, quiet_transformers, read_object
from rlflow.models.weight_files import write_model
from rlflow.report.lines import evaluation_line
from rlflow.rollout.rollout import Rollout
from rlflow.run.evaluate import EvaluationSchedule
from rlflow.trainer.base import Trainer
from rlflow.trainer.options import LoraOptions

logger = logging.getLogger(__name__)

EXPORT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Nats, by model.dtype: log-probs of the export (transformers, float32) against the trainer's. A
bfloat16 trainer rounds its activations and logits too; a tensor in the wrong place costs several
nats."""
MERGE_TOLERANCE = {"float32": 0.0, "bfloat16": 2.0**-7}
"""Of a weight, beside 1e-5: base and sum may be rounded to model.dtype, once each."""
ROWS, WIDTH = 4, 48


def export_policy(
    trainer: Trainer, path: Path, reference: str, dtype: str, texts: Mapping[str, str] | None = None
) -> float:
    """Writes the policy as a HuggingFace directory, in place of one that is there, with config and
    tokenizer of `reference`. Returns what `check_export` measures (nats). dtype: that of the
    trainer, a key of EXPORT_TOLERANCE. texts: see `write_model`.

    Raises StorageError where it cannot be written, ModelError where it is not what the trainer
    has."""
    write_model(path, trainer.weights(), reference, overwrite=True, texts=texts)
    gap = check_export(trainer, path, tolerance=EXPORT_TOLERANCE[dtype])
    logger.info("export: log-probs within %.1e of the trainer's", gap)
    return gap


def export_adapter(
    trainer: Trainer, path: Path, export: Path, base: str, options: LoraOptions, dtype: str
) -> None:
    """Writes the adapters as a folder that the package peft loads, in place of one that is there.

    export: what `export_policy` wrote; it must be the base with this adapter in it. Raises
    StorageError, ModelError."""
    factors = trainer.adapter_weights()
    write_adapter(
        path, factors, base=base, rank=options.rank, alpha=options.alpha, targets=options.targets
    )
    adapter, _ = read_adapter(path)
    before, after = WeightFiles(base), WeightFiles(export)
    for name in (f"{layer}.weight" for layer in adapter.factors):
        expected = before[name].float() + adapter.change(name.removesuffix(".weight"))
        allowed = 1e-5 + MERGE_TOLERANCE[dtype] * expected.abs()
        if not bool(((after[name].float() - expected).abs() <= allowed).all()):  # NaN included
            raise ModelError(
                f"{path}: '{name}' of {export} is not that of {base} with the adapter added."
            )


def check_export(trainer: Trainer, path: str | Path, tolerance: float = 1e-4) -> float:
    """The largest difference in log-probs (nats) between transformers on the exported directory,
    float32 on the CPU, and the trainer's policy, on fixed random tokens. Independent of the mapping
    tables that wrote it.

    Raises ModelError where the directory cannot be loaded or the difference exceeds `tolerance`; a
    bfloat16 trainer rounds in its own pass: 0.01 for a tiny model, more for wide ones."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=torch.float32, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"{path}: transformers cannot load the export ({str(error).splitlines()[0]})."
        ) from error
    batch = token_batch(_random_rows(model.config.vocab_size))
    with torch.no_grad():
        logits = model(batch.tokens).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    found = trainer.score(batch)["logprobs"][:, 1:]
    valid = torch.arange(1, WIDTH) < batch.lengths[:, None]
    difference = float((found - expected)[valid].abs().max())
    if not difference <= tolerance:  # NaN included
        raise ModelError(
            f"{path}: the export does not compute what the trainer does; log-probs differ by {difference:.2g} nats, "
            f"at most {tolerance:.2g} expected."
        )
    return difference


def _random_rows(vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (ROWS, WIDTH), generator=draw)
    return [
        row[:length].tolist()
        for row, length in zip(tokens, (WIDTH, WIDTH // 2, WIDTH // 3, WIDTH), strict=True)
    ]


_CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")  # where huggingface_hub keeps a model


def export_files(
    config: RunConfig, rollout: Rollout, evaluation: EvaluationSchedule, steps: int, export: Path
) -> dict[str, str]:
    """{name: text} of the files that only this run can write, for the directory `export`."""
    file = Path(config.model.path) / "generation_config.json"
    generation = read_object(file) if file.is_file() else {}
    generation |= {
        "eos_token_id": list(rollout.tokenizer.eos_ids) or None,
        "stop_strings": list(rollout.environment.stop) or None,
    }
    prompts = [rollout.prompt_tokens(task) for task in evaluation.tasks(final=True)[:1]]
    base = base_name(config.model.path)
    card = _CARD.format(
        front=f"\nbase_model: {base}" if "/" in base else "",
        title=config.run.name,
        base=base,
        environment=Path(str(config.environment["name"])).name,
        facts="\n".join(
            f"| {name} | {value} |"
            for name, value in _facts(config, rollout, evaluation, steps).items()
        ),
        path=str(export),
        quoted=shlex.quote(str(export)),
        options=", trust_remote_code=True" if config.model.trust_remote_code else "",
        prompt=rollout.tokenizer.decode(prompts[0], skip_special_tokens=False)
        if prompts
        else "Hello",
        tokens=config.rollout.max_response_tokens,
        stop=json.dumps(list(rollout.environment.stop), ensure_ascii=False),
    )
    return {"README.md": card, "generation_config.json": json.dumps(generation, indent=2) + "\n"}


def base_name(path: str) -> str:
    """OWNER/NAME of a model in the hub's cache, else the name of its directory."""
    cached = _CACHED.search(path)
    return f"{cached[1]}/{cached[2]}" if cached else Path(path).name


def _facts(
    config: RunConfig, rollout: Rollout, evaluation: EvaluationSchedule, steps: int
) -> dict[str, Any]:
    """Recipe and scores, by name."""
    algorithm, limits = config.algorithm, config.rollout
    made = {evaluation.first_step: evaluation.first, evaluation.last_step: evaluation.last}
    return {
        "algorithm": " + ".join(
            part["name"] for part in (algorithm.advantage, *algorithm.losses, algorithm.aggregate)
        ),
        "length": f"{steps} steps of {limits.prompts_per_step} prompts, {limits.samples_per_prompt} responses each",
        "episode": f"at most {limits.max_turns} turns of {limits.max_response_tokens} tokens, {limits.max_total_tokens} in all",
        "temperature": limits.temperature,
        "learning rate": config.trainer.lr,
        "weights": config.model.dtype,
        **{
            f"score after step {step}": evaluation_line(found, rollout.environment.metrics)
            for step, found in made.items()
            if step >= 0
        },
    }


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, rlflow]{front}
---
# {title}

{base}, trained by reinforcement learning with rlflow in the environment `{environment}`.

| | |
|---|---|
{facts}

A prompt as the policy was trained on, chat template included, and its response:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {path!r}
tokenizer = AutoTokenizer.from_pretrained(path{options})
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto"{options})
prompt = {prompt!r}
inputs = tokenizer(prompt, add_special_tokens=False, return_token_type_ids=False, return_tensors="pt")
output = model.generate(**inputs, tokenizer=tokenizer, max_new_tokens={tokens}, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

It ends with a token or a string that `generation_config.json` names; for strings `generate` needs the tokenizer.
vLLM does not read them there: a request to it holds `"stop": {stop}, "include_stop_str_in_output": true`.
In an episode of several turns the environment's answer follows; `rlflow eval --model {quoted}` plays whole ones.
"""
