"""ckpt_convert to-hf | to-megatron | inspect | verify, also as `rlflow convert ...`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlflow.errors import RLFlowError

from .progress import timed
from .read_ahead import read_ahead

SCOPE = """\
Megatron checkpoints are torch_dist directories or legacy mp_rank_* files of any layout, of Qwen2,
Qwen2.5, Qwen3, Llama, Mistral, Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3, GLM-4.5."""
CODES = """\
exit codes: 0 done, 2 wrong arguments, 3 missing file, 4 damaged file or failed verification,
5 another size than the options say, 6 unknown model or tensor, 7 checkpoint and reference disagree,
8 disk full, 9 OUT exists, 10 unsupported format, 11 hostile file, 130 interrupted
"""
VERIFY_TO_HF = """\
verification: fast checks sizes, counts, finite values, and that every file reads back as it was
written (xxh3); it cannot see a changed byte in the checkpoint. full also checks the checkpoint's
own checksums, maps the result back to compare every byte, and notes sha256; it takes a few times
the memory of the largest tensor. logits runs the result in transformers and the checkpoint in
megatron-core, both on the CPU in float32, and compares; it needs both packages and memory for both
models.
"""
VERIFY_TO_MEGATRON = """\
verification: fast checks sizes, finite values, and that every file reads back as it was written
(xxh3). full also reads the checkpoint with the readers of to-hf and compares every byte with HF; it
takes a few times the memory of the largest tensor. logits runs Megatron's own model on it (with
--spec te its local layers, names apart) and compares with transformers.
"""
SIZES = {
    "tp": ("tensor_parallel", "tensor-parallel ranks"),
    "pp": ("pipeline_parallel", "pipeline stages"),
    "ep": ("expert_parallel", "expert-parallel ranks"),
    "vpp": ("virtual_pipeline_parallel", "virtual pipeline stages per rank"),
    "iteration": ("iteration", "training step; chooses its checkpoint where CKPT holds several"),
    "num-layers": ("layers", "layers"),
    "hidden-size": ("hidden", "hidden size"),
    "num-attention-heads": ("heads", "attention heads"),
    "num-query-groups": ("groups", "key-value heads"),
    "ffn-hidden-size": ("ffn", "intermediate size"),
    "vocab-size": ("vocab", "vocabulary without padding"),
}
"""Options of to-hf: field of the checkpoint or of Architecture, and what it is."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FORMATTER = argparse.RawDescriptionHelpFormatter


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. An error is one line on stderr, with RLFLOW_DEBUG=1
    a traceback."""
    parser = argparse.ArgumentParser(
        prog="ckpt_convert",
        description="Converts checkpoints.\n" + SCOPE,
        epilog=CODES,
        formatter_class=FORMATTER,
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
    texts = {"help": "convert checkpoints", "description": SCOPE, "epilog": CODES}
    add_actions(commands.add_parser("convert", **texts, formatter_class=FORMATTER))


def add_actions(parser: argparse.ArgumentParser) -> None:
    """Adds to-hf, to-megatron, inspect and verify."""
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _add_to_hf(actions)
    _add_to_megatron(actions)
    inspect = actions.add_parser(
        "inspect",
        help="what a checkpoint holds",
        description="Shows what a checkpoint holds.",
    )
    inspect.add_argument("checkpoint", metavar="CKPT", type=Path)
    inspect.add_argument("--all", action="store_true", help="optimizer state and snapshots too")
    inspect.set_defaults(run=run_inspect)
    verify = actions.add_parser(
        "verify",
        help="check an export against its manifest",
        description="Reads every file of an export and compares it with the manifest that to-hf "
        "wrote.",
    )
    verify.add_argument("out", metavar="OUT", type=Path)
    verify.set_defaults(run=run_verify)
    for action in (inspect, verify):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _add_to_hf(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "to-hf",
        help="Megatron checkpoint to HuggingFace directory",
        description="Writes a HuggingFace directory from a checkpoint, in one process and in "
        "bounded memory.\n" + SCOPE,
        epilog=VERIFY_TO_HF + CODES,
        formatter_class=FORMATTER,
    )
    checkpoint = "a checkpoint, a run (its newest one), or Megatron's save directory"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=checkpoint)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    reference = "model directory with config and tokenizer (default: the run's model.path)"
    parser.add_argument("--hf", metavar="REF", type=Path, help=reference)
    _add_writing_options(parser, "such as 4GB (default)")
    sizes = parser.add_argument_group(
        "sizes", "Read from the files; where given, they must agree (exit code 5)."
    )
    for option, (name, what) in SIZES.items():
        sizes.add_argument(f"--{option}", dest=f"size_{name}", type=int, metavar="N", help=what)
    parser.set_defaults(run=run_to_hf)


def _add_to_megatron(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "to-megatron",
        help="HuggingFace directory to Megatron checkpoint",
        description="Writes a Megatron checkpoint of a HuggingFace directory, in one process and "
        "in bounded memory:\nOUT/release and the tracker file that makes Megatron load it as "
        "weights to start from.",
        epilog=VERIFY_TO_MEGATRON + CODES,
        formatter_class=FORMATTER,
    )
    model = "model directory with config.json and safetensors"
    parser.add_argument("model", metavar="HF", type=Path, help=model)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    layout = parser.add_argument_group(
        "layout", "torch_dist loads in every layout; a legacy checkpoint only in its own."
    )
    ranks = {
        "tp": "tensor-parallel ranks",
        "pp": "pipeline-parallel ranks",
        "vpp": "model chunks per pipeline rank",
        "ep": "expert-parallel ranks",
    }
    for name, what in ranks.items():
        how = {"type": parse_count, "default": 1, "metavar": "N", "help": f"{what} (default 1)"}
        layout.add_argument(f"--{name}", **how)
    for end in ("first", "last"):
        what = f"layers of the {end} pipeline rank, where not as many as the others'"
        layout.add_argument(f"--{end}-stage-layers", type=parse_positive, metavar="N", help=what)
    multiple = (
        "pad the vocabulary to a multiple of N x TP (default 128, as make_vocab_size_divisible_by)"
    )
    layout.add_argument(
        "--vocab-multiple", type=parse_positive, default=128, metavar="N", help=multiple
    )
    parser.add_argument(
        "--format",
        choices=("torch_dist", "torch"),
        default="torch_dist",
        help="torch: legacy mp_rank_* files",
    )
    parser.add_argument(
        "--spec",
        choices=("te", "local"),
        default="te",
        help="names of Transformer Engine's or Megatron's own layers",
    )
    _add_writing_options(parser, "of torch_dist files (4GB)")
    parser.set_defaults(run=run_to_megatron)


def _add_writing_options(parser: argparse.ArgumentParser, shards: str) -> None:
    """Adds what both directions take; shards: what --shard-size is of."""
    for name, words, text in (
        ("dtype", ("keep", "bf16", "fp16", "fp32"), "default: keep"),
        ("verify", ("fast", "full", "logits", "none"), "default: fast; see below"),
    ):
        parser.add_argument(f"--{name}", choices=words, default=words[0], help=text)
    parser.add_argument(
        "--shard-size", type=parse_size, default=4 * 10**9, metavar="SIZE", help=shards
    )
    workers = "files written at a time (default 4)"
    parser.add_argument("--workers", type=parse_count, default=4, metavar="N", help=workers)
    for name, text in {
        "overwrite": "replace OUT once the new one is verified",
        "dry-run": "check everything, write nothing",
        "json": "print one JSON object",
    }.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)


def parse_size(text: str) -> int:
    """Bytes of `4GB`, `500MB`, `2GiB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GB or 500MB, found '{text}'")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))


def parse_count(text: str) -> int:
    """A whole number from 1 to 64."""
    if parse_positive(text) > 64:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 64, found '{text}'")
    return int(text)


def parse_positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found '{text}'")
    return int(text)


def run_to_hf(args: argparse.Namespace) -> int:
    from .runs import chosen_checkpoint, reference_of

    args.checkpoint = chosen_checkpoint(args.checkpoint, args.size_iteration)
    args.hf = args.hf or reference_of(args.checkpoint)
    if not args.dry_run:
        read_ahead(args.checkpoint)
    from .export_model import prepare, to_huggingface
    from .options import Options
    from .readers.formats import open_source
    from .writers.directory import check_output

    sizes = {name: getattr(args, f"size_{name}") for name, _ in SIZES.values()}
    options = Options(
        **_writing_options(args),
        check=_logits_check(args, lambda result: (args.checkpoint, result)),
        expected={name: value for name, value in sizes.items() if value is not None},
    )
    if args.dry_run:
        check_output(args.out, args.checkpoint, args.hf, args.overwrite)
        plan = prepare(open_source(args.checkpoint), args.hf, options).plan
        counts = {"tensors": len(plan.targets), "parameters": plan.parameters}
        text = (
            f"would write {len(plan.targets)} tensors, {plan.parameters:,} parameters, "
            f"{plan.nbytes / 1e9:.3f} GB to {args.out}"
        )
        return _say(args, {**counts, "weight_bytes": plan.nbytes}, text)
    report = timed(lambda meter: to_huggingface(args.checkpoint, args.out, args.hf, options, meter))
    return _say(args, report, _written(args.out, f"{report['tensors']} tensors", report))


def run_to_megatron(args: argparse.Namespace) -> int:
    if not args.dry_run:
        read_ahead(args.model)
    from rlflow.models.architecture import huggingface_shapes

    from .import_model import prepare_import, to_megatron
    from .mapping.layout import CheckpointLayout
    from .options import Options
    from .writers.directory import check_output

    sizes = (args.tp, args.pp, args.vpp, args.ep, args.vocab_multiple)
    ends = (args.first_stage_layers, args.last_stage_layers)
    options = Options(
        **_writing_options(args),
        check=_logits_check(args, lambda result: (result, args.model)),
        layout=CheckpointLayout(*sizes, args.spec == "te", *ends),
        format=args.format,
    )
    if args.dry_run:
        check_output(args.out, None, args.model, args.overwrite)
        work, checkpoint, plan = prepare_import(args.model, options)
        files, weights = len(checkpoint.files), plan.nbytes
        tensors = len(huggingface_shapes(work.model))
        report = {"files": files, "tensors": tensors, "weight_bytes": weights}
        text = f"would write {weights / 1e9:.3f} GB of weights in {files} files to {args.out}"
        return _say(args, report, text)
    report = timed(lambda meter: to_megatron(args.model, args.out, options, meter))
    flags, left_out = " ".join(report["flags_to_give"]), report["left_out"]
    text = _written(args.out, report["format"], report)
    text += f"\nMegatron-LM takes sizes from it (--use-checkpoint-args); give as well: {flags}"
    if left_out:
        text += f"\nleft out: {len(left_out)} tensors of multi-token prediction, such as "
        text += left_out[0]
    return _say(args, report, text)


def _writing_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "workers", "overwrite", "verify")
    return {name: getattr(args, name) for name in names} | {"shard_bytes": args.shard_size}


def _logits_check(
    args: argparse.Namespace, sides: Callable[[Path], tuple[Path, Path]]
) -> Callable[[Path], None] | None:
    """The check of `--verify logits`. sides: (checkpoint, model directory) by the result."""

    def check(result: Path) -> None:
        from .oracle.logits import check_logits  # imports torch

        check_logits(*sides(result), args.dtype)

    return check if args.verify == "logits" else None


def _written(out: Path, what: str, report: dict[str, Any]) -> str:
    return (
        f"wrote {out}: {what}, {report['parameters']:,} parameters, "
        f"{report['weight_bytes'] / 1e9:.3f} GB in {report['seconds']:.1f} s, verified: "
        f"{report['verified']}"
    )


def _say(args: argparse.Namespace, report: dict[str, Any], text: str) -> int:
    print(json.dumps(report) if args.json else text)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    from .describe import describe, table
    from .runs import chosen_checkpoint

    report = describe(chosen_checkpoint(args.checkpoint), everything=args.all)
    return _say(args, report, table(report))


def run_verify(args: argparse.Namespace) -> int:
    from .verify import verify_export

    report = verify_export(args.out)
    files, tensors = len(report["files"]), report["tensors"]
    text = f"{args.out}: good; {files} files, {tensors} tensors are what was written"
    return _say(args, report, text)
