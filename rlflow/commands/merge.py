"""`rlflow merge`: a LoRA adapter and its base as one model directory."""

from __future__ import annotations

import argparse

from rlflow.commands.arguments import Commands, add_command, flag, option


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "merge",
        run,
        "merge a LoRA adapter into its base model",
        """
        Writes the HuggingFace directory that a LoRA adapter (a run's adapter/, or a folder that
        peft wrote) and its base are together. The base stays as it is. A run with trainer.lora has
        such a directory already: its export/.
        """,
        """
        rlflow merge runs/my-run/adapter merged
        rlflow merge adapter merged --base models/Qwen2.5-1.5B-Instruct
        """,
    )
    adapter = "folder with adapter_config.json and adapter_model.safetensors"
    parser.add_argument("adapter", metavar="ADAPTER", help=adapter)
    parser.add_argument("out", metavar="OUT", help="directory to write")
    base = "the base model; left out: the one that adapter_config.json names"
    option(parser, "--base", "DIR", base)
    flag(parser, "--overwrite", "replace a model directory that is there")


def run(args: argparse.Namespace) -> None:
    """Merges and says what was written."""
    from rlflow.models.adapter import merge_adapter  # torch is loaded for this command alone

    manifest = merge_adapter(args.adapter, args.out, args.base, overwrite=args.overwrite)
    what = f"{manifest['tensors']} tensors, {manifest['weight_bytes'] / 1e9:.2f} GB"
    print(f"{args.out}: {what}, the adapter {args.adapter} merged in")
