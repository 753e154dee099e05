"""What an export tells its readers: a model card for people, `generation_config.json` for libraries."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from rlflow.config.schema import RunConfig
from rlflow.models.huggingface import read_object
from rlflow.report.lines import evaluation_line
from rlflow.rollout import Rollout
from rlflow.run.evaluation_schedule import EvaluationSchedule

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
        facts="\n".join(f"| {name} | {value} |" for name, value in _facts(config, rollout, evaluation, steps).items()),
        path=str(export),
        quoted=shlex.quote(str(export)),
        options=", trust_remote_code=True" if config.model.trust_remote_code else "",
        prompt=rollout.tokenizer.decode(prompts[0], skip_special_tokens=False) if prompts else "Hello",
        tokens=config.rollout.max_response_tokens,
        stop=json.dumps(list(rollout.environment.stop), ensure_ascii=False),
    )
    return {"README.md": card, "generation_config.json": json.dumps(generation, indent=2) + "\n"}


def base_name(path: str) -> str:
    """OWNER/NAME of a model in the hub's cache, else the name of its directory."""
    cached = _CACHED.search(path)
    return f"{cached[1]}/{cached[2]}" if cached else Path(path).name


def _facts(config: RunConfig, rollout: Rollout, evaluation: EvaluationSchedule, steps: int) -> dict[str, Any]:
    """Recipe and scores, by name."""
    algorithm, limits = config.algorithm, config.rollout
    made = {evaluation.first_step: evaluation.first, evaluation.last_step: evaluation.last}
    return {
        "algorithm": " + ".join(part["name"] for part in (algorithm.advantage, *algorithm.losses, algorithm.aggregate)),
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
