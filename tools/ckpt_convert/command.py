"""ckpt_convert to-hf | to-megatron | inspect | verify, also as `rlflow convert ...`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.commands.arguments import Commands, add_command, flag, option
from rlflow.errors import RLFlowError
from rlflow.models.families import FAMILIES
from rlflow.storage.unread import end_quietly

from .progress import timed
from .read_ahead import read_ahead

SCOPE = f"""\
Megatron checkpoints are torch_dist directories or legacy mp_rank_* files of any layout, of models
of these families (model_type in config.json):
{textwrap.fill(", ".join(FAMILIES), 100)}."""
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
    return end_quietly(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="ckpt_convert",
        description="Converts checkpoints.\n" + SCOPE,
        epilog=CODES,
        formatter_class=FORMATTER,
    )
    add_actions(parser)
    args = parser.parse_args(arguments)
    try:
        return args.run(args) or 0
    except RLFlowError as error:
        if os.environ.get("RLFLOW_DEBUG") == "1":
            raise
        print(f"ckpt_convert: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("ckpt_convert: interrupted; OUT is as it was.", file=sys.stderr)
        return 130


def add(commands: Commands) -> None:
    """The plug-in: adds `convert` to the command line of rlflow."""
    texts = {"help": "convert checkpoints", "description": SCOPE, "epilog": CODES}
    add_actions(commands.add_parser("convert", **texts, formatter_class=FORMATTER))


def add_actions(parser: argparse.ArgumentParser) -> None:
    """Adds to-hf, to-megatron, inspect and verify."""
    parser.set_defaults(run=lambda args: parser.print_help())
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _add_to_hf(actions)
    _add_to_megatron(actions)
    text = "Shows what a checkpoint holds."
    inspect = add_command(actions, "inspect", run_inspect, "what a checkpoint holds", text)
    inspect.add_argument("checkpoint", metavar="CKPT", type=Path)
    flag(inspect, "--all", "optimizer state and snapshots too")
    about = "check an export against its manifest"
    text = "Reads every file of an export and compares it with the manifest that to-hf wrote."
    verify = add_command(actions, "verify", run_verify, about, text)
    verify.add_argument("out", metavar="OUT", type=Path)
    for action in (inspect, verify):
        flag(action, "--json", "print one JSON object")


def _add_to_hf(actions: Commands) -> None:
    about = "Megatron checkpoint to HuggingFace directory"
    text = "Writes a HuggingFace directory from a checkpoint, in one process and bounded memory.\n"
    parser = add_command(actions, "to-hf", run_to_hf, about, text + SCOPE)
    parser.epilog = VERIFY_TO_HF + CODES
    checkpoint = "a checkpoint, a run (its newest one), or Megatron's save directory"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=checkpoint)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    reference = "model directory with config and tokenizer (default: the run's model.path)"
    option(parser, "--hf", "REF", reference, type=Path)
    _add_writing_options(parser)
    sizes = parser.add_argument_group(
        "sizes", "Read from the files; where given, they must agree (exit code 5)."
    )
    for name, (field, what) in SIZES.items():
        option(sizes, f"--{name}", "N", what, dest=f"size_{field}", type=int)


def _add_to_megatron(actions: Commands) -> None:
    about = "HuggingFace directory to Megatron checkpoint"
    text = """
        Writes a Megatron checkpoint of a HuggingFace directory, in one process and bounded memory:
        OUT/release and the tracker file that makes Megatron load it as weights to start from.
        """
    parser = add_command(actions, "to-megatron", run_to_megatron, about, text)
    parser.epilog = VERIFY_TO_MEGATRON + CODES
    model = "model directory with config.json and safetensors"
    parser.add_argument("model", metavar="HF", type=Path, help=model)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    layout = parser.add_argument_group(
        "layout", "How tensors are cut; Megatron loads them in every layout."
    )
    for name, what in {
        "tp": "tensor-parallel ranks",
        "pp": "pipeline-parallel ranks",
        "vpp": "model chunks per pipeline rank",
        "ep": "expert-parallel ranks",
    }.items():
        option(layout, f"--{name}", "N", what, 1, type=parse_positive)
    for end in ("first", "last"):
        what = f"layers of the {end} pipeline rank, where not as many as the others'"
        option(layout, f"--{end}-stage-layers", "N", what, type=parse_positive)
    multiple = "pad the vocabulary to a multiple of N x TP, as make_vocab_size_divisible_by"
    option(layout, "--vocab-multiple", "N", multiple, 128, type=parse_positive)
    _add_choice(parser, "format", ("torch_dist",), "legacy mp_rank_* files are only read")
    layers = "names of Transformer Engine's or Megatron's own layers"
    _add_choice(parser, "spec", ("te", "local"), layers)
    _add_writing_options(parser)


def _add_choice(
    parser: argparse.ArgumentParser, name: str, words: Sequence[str], text: str
) -> None:
    """Adds an option whose default is the first of its words."""
    parser.add_argument(f"--{name}", choices=words, default=words[0], help=text)


def _add_writing_options(parser: argparse.ArgumentParser) -> None:
    """Adds what both directions take."""
    _add_choice(parser, "dtype", ("keep", "bf16", "fp16", "fp32"), "default: keep")
    _add_choice(parser, "verify", ("fast", "full", "logits", "none"), "default: fast; see below")
    size = {"dest": "shard_bytes", "type": parse_size}
    option(parser, "--shard-size", "SIZE", "bytes of tensors per file", "4GB", **size)
    option(parser, "--workers", "N", "files written at a time", 4, type=parse_positive)
    flag(parser, "--overwrite", "replace OUT once the new one is verified")
    flag(parser, "--dry-run", "check everything, write nothing")
    flag(parser, "--json", "print one JSON object")


def parse_size(text: str) -> int:
    """Bytes of `4GB`, `500MB`, `2GiB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 4GB or 500MB, found '{text}'")
    return max(1, int(float(match[1]) * UNITS[match[2].upper()]))


def parse_positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found '{text}'")
    return int(text)


def run_to_hf(args: argparse.Namespace) -> None:
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
        expected={name: value for name, value in sizes.items() if value is not None},
    )
    if args.dry_run:
        check_output(args.out, args.overwrite, args.hf, args.checkpoint)
        source = open_source(args.checkpoint)
        plan = prepare(source, args.hf, options).plan
        tensors, weights = len(plan.targets), plan.nbytes
        report = {
            "tensors": tensors,
            "parameters": plan.parameters,
            "weight_bytes": weights,
            "remark": source.remark(),
        }
        amount = f"{plan.parameters:,} parameters, {weights / 1e9:.3f} GB"
        _say_with_remark(args, report, f"would write {tensors} tensors, {amount} to {args.out}")
        return
    report = timed(to_huggingface, args.checkpoint, args.out, args.hf, options)
    _say_with_remark(args, report, _written(args.out, f"{report['tensors']} tensors", report))


def run_to_megatron(args: argparse.Namespace) -> None:
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
        layout=CheckpointLayout(*sizes, args.spec == "te", *ends),
    )
    if args.dry_run:
        check_output(args.out, args.overwrite, args.model)
        work, checkpoint, plan = prepare_import(args.model, options)
        files, weights = len(checkpoint.files), plan.nbytes
        tensors = len(huggingface_shapes(work.model))
        report = {"files": files, "tensors": tensors, "weight_bytes": weights}
        text = f"would write {weights / 1e9:.3f} GB of weights in {files} files to {args.out}"
        _say(args, report, text)
        return
    report = timed(to_megatron, args.model, args.out, options)
    flags, left_out = " ".join(report["flags_to_give"]), report["left_out"]
    text = _written(args.out, report["format"], report)
    text += f"\nMegatron-LM takes sizes from it (--use-checkpoint-args); give as well: {flags}"
    if left_out:
        text += f"\nleft out: {len(left_out)} tensors of multi-token prediction, such as "
        text += left_out[0]
    _say(args, report, text)


def _writing_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "shard_bytes", "workers", "overwrite", "verify")
    return {name: getattr(args, name) for name in names}


def _written(out: Path, what: str, report: dict[str, Any]) -> str:
    return (
        f"wrote {out}: {what}, {report['parameters']:,} parameters, "
        f"{report['weight_bytes'] / 1e9:.3f} GB in {report['seconds']:.1f} s, verified: "
        f"{report['verified']}"
    )


def _say(args: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    print(json.dumps(report) if args.json else text)


def _say_with_remark(args: argparse.Namespace, report: dict[str, Any], text: str) -> None:
    remark = report.get("remark")
    _say(args, report, f"{text}\n{remark}" if remark else text)


def run_inspect(args: argparse.Namespace) -> None:
    from .describe import describe, table
    from .runs import chosen_checkpoint

    report = describe(chosen_checkpoint(args.checkpoint), everything=args.all)
    _say(args, report, table(report))


def run_verify(args: argparse.Namespace) -> None:
    from .verify import verify_export

    report = verify_export(args.out)
    files, tensors = len(report["files"]), report["tensors"]
    text = f"{args.out}: good; {files} files, {tensors} tensors are what was written"
    _say(args, report, text)
