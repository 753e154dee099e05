"""ckpt_convert to-megatron: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .options import FORMATTER, add_writing_options, logits_check, parse_count, timed, writing_options
from .read_ahead import read_ahead


def add_to_megatron(actions: argparse._SubParsersAction, codes: str) -> None:
    """Adds the action. codes: text on exit codes."""
    parser = actions.add_parser(
        "to-megatron",
        help="HuggingFace directory to Megatron checkpoint",
        description="Writes a Megatron checkpoint of a HuggingFace directory, in one process and in bounded memory:\n"
        "OUT/release and the tracker file that makes Megatron load it as weights to start from.",
        epilog="verification: fast checks sizes, finite values, and that every file reads back as it was written\n"
        "(xxh3). full also reads the checkpoint with the readers of to-hf and compares every byte with HF. logits\n"
        "runs Megatron's own model on it (with --spec te its local layers, names apart) and compares with transformers.\n"
        + codes,
        formatter_class=FORMATTER,
    )
    parser.add_argument("model", metavar="HF", type=Path, help="model directory with config.json and safetensors")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    layout = parser.add_argument_group(
        "layout", "torch_dist loads in every layout; a legacy checkpoint only in its own."
    )
    layout.add_argument("--tp", type=parse_count, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    layout.add_argument("--pp", type=parse_count, default=1, metavar="N", help="pipeline-parallel ranks (default 1)")
    layout.add_argument(
        "--vpp", type=parse_count, default=1, metavar="N", help="model chunks per pipeline rank (default 1)"
    )
    for end in ("first", "last"):
        what = f"layers of the {end} pipeline rank, where not as many as the others'"
        layout.add_argument(f"--{end}-stage-layers", type=_positive, metavar="N", help=what)
    layout.add_argument("--ep", type=parse_count, default=1, metavar="N", help="expert-parallel ranks (default 1)")
    layout.add_argument(
        "--vocab-multiple",
        type=_positive,
        default=128,
        metavar="N",
        help="pad the vocabulary to a multiple of N x TP (default 128, as make_vocab_size_divisible_by)",
    )
    parser.add_argument(
        "--format", choices=("torch_dist", "torch"), default="torch_dist", help="torch: legacy mp_rank_* files"
    )
    parser.add_argument(
        "--spec", choices=("te", "local"), default="te", help="names of Transformer Engine's or Megatron's own layers"
    )
    add_writing_options(parser, "of torch_dist files (4GB)")
    parser.set_defaults(run=run_to_megatron)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found '{text}'")
    return int(text)


def run_to_megatron(args: argparse.Namespace) -> int:
    if not args.dry_run:
        read_ahead(args.model)
    from .import_model import ImportOptions, prepare_import, to_megatron
    from .mapping.to_megatron import CheckpointLayout
    from .writers.directory import check_output

    options = ImportOptions(
        layout=CheckpointLayout(
            *(args.tp, args.pp, args.vpp, args.ep, args.vocab_multiple, args.spec == "te"),
            *(args.first_stage_layers, args.last_stage_layers),
        ),
        format=args.format,
        **writing_options(args),
        check=logits_check(args.verify, None, args.model, args.dtype),
    )
    if args.dry_run:
        check_output(args.out, None, args.model, args.overwrite)
        _, checkpoint, plan = prepare_import(args.model, options)
        count = len(checkpoint.files)
        report = {"files": count, "tensors": len(plan.targets), "weight_bytes": plan.nbytes}
        told = f"would write {plan.nbytes / 1e9:.3f} GB of weights in {count} files to {args.out}"
        print(json.dumps(report) if args.json else told)
        return 0
    found = timed(lambda meter: to_megatron(args.model, args.out, options, meter))
    if args.json:
        print(json.dumps(found))
        return 0
    print(
        f"wrote {args.out}: {found['format']}, {found['parameters']:,} parameters, {found['weight_bytes'] / 1e9:.3f} GB in "
        f"{found['seconds']:.1f} s, verified: {found['verified']}"
    )
    print(f"Megatron-LM takes sizes from it (--use-checkpoint-args); give as well: {' '.join(found['flags_to_give'])}")
    if found["left_out"]:
        print(f"left out: {len(found['left_out'])} tensors of multi-token prediction, such as {found['left_out'][0]}")
    return 0
