"""The export of a run, its model card, and the proof that transformers computes the same."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlflow.batching import token_batch
from rlflow.config.schema import AlgorithmSection, RolloutSection, RunConfig
from rlflow.errors import ModelError
from rlflow.models.adapter import read_adapter, write_adapter
from rlflow.models.families import SHIPPED
from rlflow.models.huggingface import WeightFiles, quiet_transformers, read_config, read_object
from rlflow.models.vocabulary import known_vocab
from rlflow.models.weight_files import write_model
from rlflow.report.lines import evaluation_line
from rlflow.report.metrics import Metrics
from rlflow.trainer.base import Trainer
from rlflow.trainer.options import LoraOptions

if TYPE_CHECKING:
    from rlflow.rollout.rollout import Rollout
    from rlflow.run.evaluate import EvaluationSchedule

logger = logging.getLogger(__name__)

EXPORT_TOLERANCE = 1e-4
"""Nats, in float32: log-probs of the export (transformers) against the trainer's, at the most. A
misplaced tensor costs several nats."""
OF_ROUNDING = 3.0
"""In bfloat16, where a largest difference says little (a quarter of a nat over the 30 layers of a
sound model): the mean difference, in those of transformers' own rounding to bfloat16."""
MERGE_TOLERANCE = {"float32": 0.0, "bfloat16": 2.0**-8}
"""Of a base's weight and of the sum, beside 1e-5: each may be rounded to model.dtype once. The sum
alone would not do: where an adapter takes a weight nearly to 0, the base's rounding is left."""
ROWS, WIDTH = 4, 48


def export_policy(
    trainer: Trainer,
    path: str | Path,
    reference: str | Path,
    dtype: str = "float32",
    texts: Mapping[str, str] | None = None,
) -> float:
    """Writes or replaces the policy's HuggingFace directory; returns the nats of `check_export`.

    reference: the directory with config and tokenizer. dtype: the trainer's. texts: see
    `write_model`. Raises StorageError where it cannot be written, ModelError where it is not what
    the trainer has."""
    write_model(path, trainer.weights(), reference, overwrite=True, texts=texts)
    gap = check_export(trainer, path, dtype)
    logger.info("export: log-probs within %.1e of the trainer's", gap)
    return gap


def export_adapter(
    trainer: Trainer,
    path: Path,
    export: Path,
    base: str,
    options: LoraOptions,
    dtype: str,
) -> None:
    """Writes or replaces the adapters' folder, which the package peft loads.

    export: the directory of `export_policy`, which must be the base with this adapter in it. Raises
    StorageError, ModelError."""
    factors = trainer.adapter_weights()
    write_adapter(
        path,
        factors,
        base=base,
        rank=options.rank,
        alpha=options.alpha,
        targets=options.targets,
    )
    adapter, _ = read_adapter(path)
    before, after = WeightFiles(base), WeightFiles(export)
    for name in (f"{layer}.weight" for layer in adapter.factors):
        started = before[name].float()
        expected = started + adapter.change(name.removesuffix(".weight"))
        allowed = 1e-5 + MERGE_TOLERANCE[dtype] * (started.abs() + expected.abs())
        # NaN included
        if not bool(((after[name].float() - expected).abs() <= allowed).all()):
            told = f"'{name}' of {export} is not that of {base} with the adapter added"
            raise ModelError(f"{path}: {told}.")


def check_export(trainer: Trainer, path: str | Path, dtype: str = "float32") -> float:
    """The largest difference in log-probs (nats) of the trainer's policy and of transformers on the
    exported directory, in float32 on the CPU, over fixed random tokens.

    dtype: the trainer's. Raises ModelError where the directory cannot be loaded or the two compute
    different things: see EXPORT_TOLERANCE and OF_ROUNDING."""
    known, exact = _transformers_logprobs(path, torch.float32)
    batch = token_batch(_random_rows(known))
    valid = torch.arange(1, WIDTH) < batch.lengths[:, None]
    own = trainer.score(batch)["logprobs"][:, 1:]
    differences = (own - exact)[valid].abs()
    found = float(differences.max())
    allowed = EXPORT_TOLERANCE
    where = ""
    if dtype == "bfloat16":
        _, rounded = _transformers_logprobs(path, torch.bfloat16)
        found = float(differences.mean())
        allowed = max(allowed, OF_ROUNDING * float((rounded - exact)[valid].abs().mean()))
        where = " in the mean"
    if not found <= allowed:  # NaN included
        raise ModelError(
            f"{path}: transformers does not compute what the trainer does; log-probs differ by "
            f"{found:.2g} nats{where}, at most {allowed:.2g} expected."
        )
    return float(differences.max())


def _transformers_logprobs(path: str | Path, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """(tokens of the vocabulary; log-probs of the fixed random rows, from their second token on)
    by transformers, whose layers compute in `dtype`. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
            model = AutoModelForCausalLM.from_pretrained(str(path), **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path}: transformers cannot load the export ({reason}).") from error
    known = known_vocab(path, model.config.vocab_size)
    tokens = token_batch(_random_rows(known)).tokens
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1, :known].float()
    return known, logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def check_own_family(trainer: Trainer, model: str, dtype: str) -> None:
    """Holds a starting policy whose family rlflow does not ship against transformers: its table
    says names and shapes, not what its layers compute. Raises ModelError."""
    family = read_config(model).get("model_type")
    if family in SHIPPED:
        return
    try:
        gap = check_export(trainer, model, dtype)
    except ModelError as error:
        told = f"Model family '{family}' is not one of rlflow's, and its table does not tell all"
        raise ModelError(f"{error} {told} (docs/add_a_model_family.md).") from error
    logger.info("model family %s: log-probs within %.1e of transformers'", family, gap)


def _random_rows(vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (ROWS, WIDTH), generator=draw)
    lengths = (WIDTH, WIDTH // 2, WIDTH // 3, WIDTH)
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


# Where huggingface_hub keeps a model
_CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")


def export_files(
    config: RunConfig,
    rollout: Rollout,
    evaluation: EvaluationSchedule,
    steps: int,
    export: Path,
) -> dict[str, str]:
    """{name: text} of the model card and the generation configuration in `export`."""
    file = Path(config.model.path) / "generation_config.json"
    generation = read_object(file) if file.is_file() else {}
    generation |= {
        "eos_token_id": list(rollout.tokenizer.eos_ids) or None,
        "stop_strings": list(rollout.environment.stop) or None,
    }
    prompts = [rollout.prompt_tokens(task) for task in evaluation.tasks(final=True)[:1]]
    decoded = [rollout.tokenizer.decode(one, skip_special_tokens=False) for one in prompts]
    facts = {
        **_recipe(config.algorithm, config.rollout, steps, rollout.recorded),
        "learning rate": config.trainer.lr,
        "weights": config.model.dtype,
        **_scores(evaluation, rollout.environment.metrics),
    }
    base = base_name(config.model.path)
    card = _CARD.format(
        front=f"\nbase_model: {base}" if "/" in base else "",
        title=config.run.name,
        base=base,
        tag="supervised-fine-tuning" if rollout.recorded else "reinforcement-learning",
        how="fine-tuned with rlflow on"
        if rollout.recorded
        else "trained by reinforcement learning with rlflow in",
        episodes="" if rollout.recorded else _EPISODES.format(quoted=shlex.quote(str(export))),
        environment=Path(str(config.environment["name"])).name,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        path=str(export),
        options=", trust_remote_code=True" if config.model.trust_remote_code else "",
        prompt=(decoded or ["Hello"])[0],
        tokens=config.rollout.max_response_tokens,
        stop=json.dumps(list(rollout.environment.stop), ensure_ascii=False),
        rendered=_rendered(config.rollout.chat_template_options),
    )
    return {
        "README.md": card,
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def _rendered(options: Mapping[str, Any]) -> str:
    """What the card says of the options of the chat template; "" without any."""
    if not options:
        return ""
    keywords = "".join(f", {name}={value!r}" for name, value in options.items())
    return (
        "The chat template was rendered with options: "
        f"`tokenizer.apply_chat_template(messages, add_generation_prompt=True{keywords})`; servers "
        f"take them as `chat_template_kwargs`: `{json.dumps(dict(options), default=str)}`.\n"
    )


def base_name(path: str) -> str:
    """OWNER/NAME of a model in the hub's cache, else the name of its directory."""
    cached = _CACHED.search(path)
    return f"{cached[1]}/{cached[2]}" if cached else Path(path).name


def _recipe(
    algorithm: AlgorithmSection, limits: RolloutSection, steps: int, recorded: bool
) -> dict[str, Any]:
    """What was done in `steps` steps, by name."""
    if recorded:
        losses = [part["name"] for part in (*algorithm.losses, algorithm.aggregate)]
        rows = f"{limits.prompts_per_step} rows of at most {limits.max_total_tokens} tokens"
        return {"algorithm": " + ".join(losses), "length": f"{steps} steps of {rows}"}
    parts = (algorithm.advantage, *algorithm.losses, algorithm.aggregate)
    prompts = f"{limits.prompts_per_step} prompts"
    turns = f"at most {limits.max_turns} turns"
    tokens = f"{limits.max_response_tokens} tokens, {limits.max_total_tokens} in all"
    return {
        "algorithm": " + ".join(part["name"] for part in parts),
        "length": f"{steps} steps of {prompts}, {limits.samples_per_prompt} responses each",
        "episode": f"{turns} of {tokens}",
        "temperature": limits.temperature,
    }


def _scores(evaluation: EvaluationSchedule, registered: Metrics) -> dict[str, str]:
    """Those of the run's first and last evaluation, by name."""
    made = {
        evaluation.first_step: evaluation.first,
        evaluation.last_step: evaluation.last,
    }
    return {
        f"score after step {step}": evaluation_line(scores, registered)
        for step, scores in made.items()
        if step >= 0
    }


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [{tag}, rlflow]{front}
---
# {title}

{base}, {how} the environment `{environment}`.

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
options = dict(add_special_tokens=False, return_token_type_ids=False, return_tensors="pt")
inputs = tokenizer(prompt, **options)
output = model.generate(**inputs, tokenizer=tokenizer, max_new_tokens={tokens}, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

It ends with a token or a string that `generation_config.json` names; for strings `generate` needs
the tokenizer. vLLM does not read them there: a request to it holds
`"stop": {stop}, "include_stop_str_in_output": true`.{episodes}
{rendered}"""
_EPISODES = """ In an episode of several turns the
environment's answer follows; `rlflow eval --model {quoted}` plays whole ones."""
