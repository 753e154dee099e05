"""ckpt_convert to-hf | to-megatron | inspect | verify, also as `rlflow convert ...`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import RLFlowError

from .options import FORMATTER, SIZES, add_writing_options, logits_check, timed, writing_options
from .read_ahead import read_ahead

SCOPE = (
    "Megatron checkpoints are torch_dist directories or legacy mp_rank_* files of any layout, of Qwen2, Qwen2.5, Qwen3,\n"
    "Llama, Mistral, Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3 and GLM-4.5."
)
CODES = (
    "exit codes: 0 done, 2 wrong arguments, 3 missing file, 4 damaged file or failed verification, 5 another size\n"
    "than the options say, 6 unknown model or tensor, 7 checkpoint and reference disagree, 8 disk full, 9 OUT exists,\n"
    "10 unsupported format, 11 hostile file, 130 interrupted\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. An error is one line on stderr, with RLFLOW_DEBUG=1 a traceback."""
    parser = argparse.ArgumentParser(
        prog="ckpt_convert", description="Converts checkpoints.\n" + SCOPE, epilog=CODES, formatter_class=FORMATTER
    )
    add_actions(parser)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args) or 0)
    except RLFlowError as error:
        if os.environ.get("RLFLOW_DEBUG") == "1":
            raise
        print(f"ckpt_convert: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("ckpt_convert: interrupted; OUT is as it was.", file=sys.stderr)
        return 130


def add(commands: argparse._SubParsersAction) -> None:
    """The plug-in: adds `convert` to the command line of rlflow."""
    parser = commands.add_parser(
        "convert", help="convert checkpoints", description=SCOPE, epilog=CODES, formatter_class=FORMATTER
    )
    add_actions(parser)


def add_actions(parser: argparse.ArgumentParser) -> None:
    """Adds to-hf, to-megatron, inspect and verify."""
    from .command_to_megatron import add_to_megatron

    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _add_to_hf(actions)
    add_to_megatron(actions, CODES)
    inspect = actions.add_parser(
        "inspect", help="what a checkpoint holds", description="Shows what a checkpoint holds."
    )
    inspect.add_argument("checkpoint", metavar="CKPT", type=Path)
    inspect.add_argument("--all", action="store_true", help="optimizer state and snapshots too")
    inspect.set_defaults(run=run_inspect)
    verify = actions.add_parser(
        "verify",
        help="check an export against its manifest",
        description="Reads every file of an export and compares it with the manifest that to-hf wrote.",
    )
    verify.add_argument("out", metavar="OUT", type=Path)
    verify.set_defaults(run=run_verify)
    for action in (inspect, verify):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _add_to_hf(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "to-hf",
        help="Megatron checkpoint to HuggingFace directory",
        description="Writes a HuggingFace directory from a checkpoint, in one process and in bounded memory.\n" + SCOPE,
        epilog="verification: fast checks sizes, counts, finite values, and that every file reads back as it was\n"
        "written (xxh3); it cannot see a changed byte in the checkpoint. full also checks the checkpoint's own\n"
        "checksums, maps the result back to compare every byte, and notes sha256; it takes a few times the memory of\n"
        "the largest tensor. logits runs the result in transformers and the checkpoint in megatron-core, both on the\n"
        "CPU in float32, and compares; it needs both packages and memory for both models.\n" + CODES,
        formatter_class=FORMATTER,
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=Path, help="a checkpoint, a run (its newest one), or Megatron's save directory"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    parser.add_argument(
        "--hf", metavar="REF", type=Path, help="model directory with config and tokenizer (default: the run's model.path)"
    )
    add_writing_options(parser, "such as 4GB (default)")
    sizes = parser.add_argument_group("sizes", "Read from the files; where given, they must agree (exit code 5).")
    for option, (name, what) in SIZES.items():
        sizes.add_argument(f"--{option}", dest=f"size_{name}", type=int, metavar="N", help=what)
    parser.set_defaults(run=run_to_hf)


def run_to_hf(args: argparse.Namespace) -> int:
    from .runs import chosen_checkpoint, reference_of

    args.checkpoint = chosen_checkpoint(args.checkpoint, args.size_iteration)
    args.hf = args.hf or reference_of(args.checkpoint)
    if not args.dry_run:
        read_ahead(args.checkpoint)
    from .export_model import Options, prepare, to_huggingface
    from .writers.directory import check_output

    sizes = {name: getattr(args, f"size_{name}") for name, _ in SIZES.values()}
    options = Options(
        **writing_options(args),
        check=logits_check(args.verify, args.checkpoint, None, args.dtype),
        expected={name: value for name, value in sizes.items() if value is not None},
    )
    if args.dry_run:
        check_output(args.out, args.checkpoint, args.hf, args.overwrite)
        plan = prepare(args.checkpoint, args.hf, options)[1].plan
        report = {"tensors": len(plan.targets), "parameters": plan.parameters, "weight_bytes": plan.nbytes}
        text = f"would write {report['tensors']} tensors, {plan.parameters:,} parameters, {plan.nbytes / 1e9:.3f} GB"
        print(json.dumps(report) if args.json else f"{text} to {args.out}")
        return 0
    report = timed(lambda meter: to_huggingface(args.checkpoint, args.out, args.hf, options, meter))
    told = (
        f"wrote {args.out}: {report['tensors']} tensors, {report['parameters']:,} parameters, "
        f"{report['weight_bytes'] / 1e9:.3f} GB in {report['seconds']:.1f} s, verified: {report['verified']}"
    )
    print(json.dumps(report) if args.json else told)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    from .describe import describe
    from .runs import chosen_checkpoint

    report = describe(chosen_checkpoint(args.checkpoint), everything=args.all)
    print(json.dumps(report) if args.json else _inspection(report))
    return 0


def _inspection(report: dict[str, Any]) -> str:
    layout = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in report["layout"].items()) or "not recorded"
    lines = [
        f"checkpoint  {report['checkpoint']}",
        f"format      {report['format']}, keys {report['keys']}, {report['files']} data files",
        f"iteration   {'not recorded' if report['iteration'] is None else report['iteration']}",
        f"layout      {layout}",
        f"weights     {report['parameters']:,} parameters, {report['weight_bytes'] / 1e9:.3f} GB",
        f"besides     {report['other_tensors']} tensors ({report['other_bytes'] / 1e9:.3f} GB) of optimizer and snapshots",
    ]
    width = max((len(tensor["name"]) for tensor in report["tensors"]), default=0)
    lines += [
        f"  {tensor['name']:<{width}}  {tensor['dtype']:<8}  {'x'.join(map(str, tensor['shape'])):<16} "
        f"{tensor['bytes'] / 1e6:10.3f} MB  {tensor['chunks']} chunks"
        for tensor in report["tensors"]
    ]
    return "\n".join(lines)


def run_verify(args: argparse.Namespace) -> int:
    from .verify import verify_export

    report = verify_export(args.out)
    good = f"{args.out}: good; {len(report['files'])} files, {report['tensors']} tensors are what was written"
    print(json.dumps(report) if args.json else good)
    return 0
