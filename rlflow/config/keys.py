"""Every configuration key with its default, type, meaning, and names in other libraries."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlflow.components import Kind
from rlflow.values import describe, is_component, section_hints, section_of

KL_LOSS = "algorithm.losses=[ppo_clip, {name: kl, coefficient: 0.01}]"
_OTHERS = {
    "algorithm.advantage": "adv_estimator",
    "algorithm.epochs_per_step": "num_iterations ppo_epochs",
    "algorithm.losses": "loss_type",
    "algorithm.losses.0.clip_high": "epsilon_high",
    "algorithm.losses.0.clip_low": "clip_eps cliprange epsilon",
    KL_LOSS: "beta kl_coef kl_loss_coef",
    "algorithm.minibatches_per_step": "ppo_mini_batch_size",
    "checkpoint.every_steps": "save_steps",
    "data.max_prompt_tokens": "max_prompt_length",
    "evaluation.every_steps": "eval_steps",
    "metrics.sinks": "report_to tensorboard wandb_project",
    "model.dtype=bfloat16": "bf16",
    "model.path": "model_name_or_path",
    "rollout.max_response_tokens": "max_completion_length max_new_tokens max_response_length",
    "rollout.max_total_tokens": "max_seq_length",
    "rollout.prompts_per_step": "batch_size rollout_batch_size train_batch_size",
    "rollout.samples_per_prompt": "group_size n num_generations",
    "run.directory": "output_dir",
    "run.epochs": "num_epochs num_train_epochs",
    "run.steps": "max_steps",
    "trainer.lr": "learning_rate",
    "trainer.max_gradient_norm": "grad_clip max_grad_norm",
    "trainer.optimizer.beta2": "adam_beta2 beta2",
    "trainer.recompute=full": "gradient_checkpointing",
    "trainer.schedule": "lr_scheduler_type",
    "trainer.schedule.min_lr": "min_lr",
    "trainer.schedule.warmup_steps": "lr_warmup_steps warmup warmup_steps",
    "trainer.tensor_parallel": "tensor_model_parallel_size",
    "trainer.tokens_per_microbatch": "micro_batch_size per_device_train_batch_size",
}
FIELD_NAMES = {other: ours for ours, others in _OTHERS.items() for other in others.split()}
"""Names in other libraries -> the key, or the assignment, that does the same here."""
_COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)


def elsewhere(name: str) -> str:
    """Returns `" Did you mean 'trainer.lr'?"` for a name that other libraries use, else `""`."""
    return f" Did you mean '{FIELD_NAMES[name]}'?" if name in FIELD_NAMES else ""


@dataclass(frozen=True)
class Key:
    """One dotted key. kind: of the components that it takes."""

    name: str
    default: Any
    type: str
    meaning: str
    kind: Kind | None = None

    @property
    def others_names(self) -> list[str]:
        """Its names in other libraries."""
        keys = {other: ours.partition("=")[0] for other, ours in FIELD_NAMES.items()}
        return [other for other, key in keys.items() if key.startswith(self.name)]


def described_keys(schema: Any, prefix: str = "") -> Iterator[Key]:
    """The keys of a schema and of its nested sections, in its order."""
    hints = section_hints(schema)
    meanings = dict(_COMMENT.findall(inspect.getsource(schema)))
    for item in dataclasses.fields(schema):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        section = section_of(hint)
        if section is not None:
            yield from described_keys(section, f"{name}.")
            continue
        made: Any = item.default_factory
        default = item.default if made is dataclasses.MISSING else made()
        holders = filter(is_component, (hint, *typing.get_args(hint)))
        about = getattr(next(holders, None), "__metadata__", ())
        kind = next((part for part in about if isinstance(part, Kind)), None)
        yield Key(name, default, describe(hint), meanings.get(item.name, ""), kind)
