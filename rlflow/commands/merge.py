"""`rlflow merge`: a LoRA adapter and its base as one model directory."""

from __future__ import annotations

import argparse

from rlflow.commands.arguments import Commands, add_command


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "merge",
        run,
        "merge a LoRA adapter into its base model",
        "Writes the HuggingFace directory that a LoRA adapter (a run's adapter/, or a folder that peft wrote) and its base are\n"
        "together. The base stays as it is. A run with trainer.lora has such a directory already: its export/.",
        "examples:\n"
        "  rlflow merge runs/my-run/adapter merged\n"
        "  rlflow merge adapter merged --base models/Qwen2.5-1.5B-Instruct\n",
    )
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        help="folder with adapter_config.json and adapter_model.safetensors",
    )
    parser.add_argument("out", metavar="OUT", help="directory to write")
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="the base model; left out: the one that adapter_config.json names",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model directory that is there"
    )


def run(args: argparse.Namespace) -> None:
    """Merges and says what was written."""
    from rlflow.models.adapter import merge_adapter  # torch is loaded for this command alone

    manifest = merge_adapter(args.adapter, args.out, args.base, overwrite=args.overwrite)
    size = manifest["weight_bytes"] / 1e9
    print(
        f"{args.out}: {manifest['tensors']} tensors, {size:.2f} GB, the adapter {args.adapter} merged in"
    )
