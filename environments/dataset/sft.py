"""`rlflow sft`: supervised fine-tuning on files, by the loop, the checkpoints and the export of
`rlflow train`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rlflow.commands import train
from rlflow.commands.arguments import (
    Commands,
    Option,
    add_command,
    add_options,
    flag,
    option,
    option_overrides,
)
from rlflow.errors import ConfigError

OPTIONS = (
    Option(
        "--data",
        "environment.train",
        "rows to imitate: messages, prompt and completion, or text; .jsonl, .json or .parquet",
        commands=("sft",),
    ),
    Option(
        "--eval-data",
        "environment.val",
        "rows for the evaluation's loss (default: a tenth of --data, environment.held_out)",
        commands=("sft",),
    ),
)
ALWAYS = {
    "environment.name": "recordings",
    "rollout.engine.name": "recorded",
    "rollout.samples_per_prompt": "1",
}
"""What makes a run imitate rows."""
DEFAULTS = {
    "run.name": "sft",
    "run.deterministic": "true",
    "trainer.lr": "1e-5",
    "trainer.schedule": "{name: cosine}",
    "trainer.packing": "true",
    "algorithm.losses": "[sft]",
    "algorithm.advantage": "{name: reinforce, baseline: none}",
}
"""What configuration and command line may say otherwise."""
ON_CPUS = {"trainer.tokens_per_microbatch": "2048"}


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "sft",
        run,
        "fine-tune a model on conversations or texts",
        """
        Trains a model to say what the rows of a file hold, with the loop, the checkpoints, the
        export and the files of `rlflow train`. Of a conversation the assistant's turns are trained,
        found token by token with the model's chat template. docs/sft.md has the forms of rows.
        """,
        """
        rlflow sft --model DIR --data rows.jsonl --dry-run     # counts tokens, shows a row
        rlflow sft --model DIR --data rows.jsonl --epochs 2 run.name=first trainer.lr=2e-5
        rlflow sft --model DIR --data rows.parquet --eval-data held.jsonl trainer.lora='{rank: 16}'
        rlflow sft --config runs/first/config.yaml --resume
        rlflow train --model runs/first/export --config my.yaml    # then from reward
        """,
    )
    option(parser, "--config", "FILE", "YAML configuration, of sections as for rlflow train")
    option(parser, "--epochs", "N", "passes over the rows (run.epochs; default 1)", type=float)
    flag(parser, "--resume", "continue the run from its last checkpoint")
    flag(parser, "--overwrite", "throw away the files of an earlier run of that name")
    flag(parser, "--dry-run", "look at model, rows and memory, show a row as it is trained, exit")
    flag(parser, "--model-later", "with --dry-run: model.path is made later; look at all else")
    add_options(parser, "sft")
    parser.set_defaults(out=None, preset=None)


def run(args: argparse.Namespace) -> int:
    """Trains; returns what `rlflow train` does."""
    from rlflow.config.foreign import foreign_file

    if args.config and foreign_file(args.config) is not None:
        raise ConfigError(
            f"--config: {args.config} is of another system; expected ours. Translate it first: "
            "rlflow train --config FILE."
        )
    if args.epochs is not None:
        args.overrides = [f"run.epochs={args.epochs:g}", *args.overrides]
    args.overrides = [*_completing(args.config, option_overrides(args, "sft")), *args.overrides]
    return train.run(args)


def _completing(config_file: str | None, overrides: Sequence[str]) -> list[str]:
    """The overrides that a configuration and overrides need to be a run that imitates."""
    from rlflow.config.loading import keys_set
    from rlflow.config.schema import RunConfig, load_config

    said = keys_set(config_file, overrides, RunConfig)
    config = load_config(config_file, overrides)
    defaults = DEFAULTS if config.cluster.on_gpus else DEFAULTS | ON_CPUS
    if not {"run.steps", "run.epochs"} & said:
        defaults = {**defaults, "run.epochs": "1"}
    # A row is one turn of as many tokens as there is room for
    room = {
        "rollout.max_turns": "1",
        "rollout.max_response_tokens": str(config.rollout.max_total_tokens - 1),
    }
    missing = {key: value for key, value in defaults.items() if key not in said}
    return _assignments({**ALWAYS, **room, **missing})


def _assignments(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]
