"""Where programs that train with Megatron put a checkpoint, and which of their folders hold
something else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlflow.errors import ConversionError

from ..problems import missing, unsupported

TRACKER = "latest_checkpointed_iteration.txt"
"""In a save directory of Megatron or verl: the iteration to load."""
STEP_FOLDERS = ("iter_{:07d}", "global_step_{}", "step_{:06d}", "step_{}")
"""How Megatron, verl and RLinf, rlflow, and NeMo-RL name what they save at a step."""
STEP = re.compile(r"(?:iter_|global_step_?|step_)(\d+)")
INNER = ("trainer", "actor", "dist_ckpt", "policy/weights", "weights", "checkpoints")
"""What lies in such a folder, or around them: rlflow's, RLinf's and verl's, verl's, NeMo-RL's
folders with a checkpoint."""
HUGGINGFACE = ("huggingface", "hf", "hf_checkpoint")
"""What verl, Megatron-Bridge and RLinf name a HuggingFace directory beside a checkpoint."""
DEEPEST = 8
"""Folders within each other; verl has four, RLinf five."""
MOST_NAMED = 4
ADAPTERS_OF_VERL = "adapter_checkpoint"
VERLS_ADAPTERS = "LoRA adapters of verl"
MERGE_THERE = "merge them into their base with verl, and convert the whole"
OTHER_KINDS = (
    (
        "model_world_size_*_rank_*.pt",
        "an FSDP checkpoint of verl, not Megatron's; python -m verl.model_merger merge --backend "
        "fsdp makes a HuggingFace directory of it",
    ),
    (ADAPTERS_OF_VERL, f"{VERLS_ADAPTERS} alone; {MERGE_THERE}"),
    ("*_adapter.pt", f"{VERLS_ADAPTERS} alone; {MERGE_THERE}"),
    (
        "dcp_checkpoint",
        "an FSDP checkpoint of RLinf, not Megatron's; its fsdp_convertor makes a HuggingFace "
        "directory of model_state_dict/full_weights.pt",
    ),
    (
        "local_shard_checkpoint",
        "an FSDP checkpoint of RLinf, not Megatron's; its fsdp_convertor reads it",
    ),
    (
        "model/*.distcp",
        "a DTensor checkpoint of NeMo-RL, not Megatron's; its convert_dcp_to_hf.py makes a "
        "HuggingFace directory of it",
    ),
    (
        "model/*.safetensors",
        "a DTensor checkpoint of NeMo-RL, not Megatron's; its convert_dcp_to_hf.py makes a "
        "HuggingFace directory of it",
    ),
    (
        "adapter_model.safetensors",
        "LoRA adapters alone in PEFT's format; PeftModel.merge_and_unload merges them",
    ),
    (
        "*_model_states.pt",
        "a checkpoint of DeepSpeed, not Megatron's; its zero_to_fp32.py makes weights of it",
    ),
    ("*.safetensors", "weights in HuggingFace's format already; there is nothing to convert"),
)
"""(what is in the folder, what that is and what to do)."""


def locate(path: Path) -> Path:
    """The directory with the files of a checkpoint that lies in `path`: at the step that a tracker
    file names, in the folders that other programs put around it, or the only one there.

    Raises ConversionError (3, 10) that names what lies there instead."""
    if not path.is_dir():
        raise missing(f"{path}: no such checkpoint directory.")
    for _ in range(DEEPEST):
        below = None if _is_checkpoint(path) else _below(path)
        if below is None:
            break
        path = below
    if _is_checkpoint(path):
        return path
    raise _nothing_at(path)


def _is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").is_file() or any(path.glob("mp_rank_*/"))


def _below(path: Path) -> Path | None:
    """The folder within `path` to look in. Raises ConversionError (3) where a tracker file names one
    that is not there."""
    if (path / TRACKER).is_file():
        return _tracked(path / TRACKER)
    if _is_cut_short(path):
        return None
    inner = next((path / name for name in INNER if (path / name).is_dir()), None)
    if inner is not None or _kind(path):
        return inner
    inside = _checkpoints_in(path)
    return path / inside[0] if len(inside) == 1 else None


def _is_cut_short(path: Path) -> bool:
    """Whether torch_dist files lie there without the tables, which are written last."""
    files = ("*.distcp", "metadata.json", "common.pt")
    begun = path.name == "dist_ckpt" or any(any(path.glob(name)) for name in files)
    return begun and not (path / ".metadata").is_file()


def _checkpoints_in(path: Path) -> list[str]:
    """Folders of steps and other checkpoints in a folder, steps in order."""
    steps = {
        int(match[1]): folder.name
        for folder in path.glob("*/")
        if (match := STEP.fullmatch(folder.name))
    }
    patterns = ("*/.metadata", "*/mp_rank_*/", "*/trainer/.metadata")
    files = (file.relative_to(path) for pattern in patterns for file in path.glob(pattern))
    others = {file.parts[0] for file in files} - set(steps.values())
    return [*(name for _, name in sorted(steps.items())), *sorted(others)]


def _kind(path: Path) -> str:
    """What a folder holds that is no checkpoint of Megatron; empty where it is not known."""
    return next((text for pattern, text in OTHER_KINDS if any(path.glob(pattern))), "")


def _nothing_at(path: Path) -> ConversionError:
    if _is_cut_short(path):
        return missing(
            f"{path}/.metadata: missing; it is written last, so the save was cut short. Use an "
            "earlier one."
        )
    if model := _model_beside(path):
        return unsupported(f"{path}: no checkpoint of Megatron. {_converted(model)}")
    if kind := _kind(path):
        return unsupported(f"{path}: holds {kind}.")
    inside = _checkpoints_in(path)
    if inside:
        return missing(f"{path}: holds several checkpoints; name one: {_last_of(inside)}.")
    unfinished = sorted(folder.name for folder in path.glob("tmp_step_*/"))
    if unfinished:
        return missing(
            f"{path}: {unfinished[-1]} is a save that was not finished; no other checkpoint there."
        )
    return unsupported(
        f"{path}: no checkpoint; expected .metadata and *.distcp files, or mp_rank_* directories."
    )


def weights_elsewhere(path: Path) -> str:
    """A sentence on where the weights are, for a checkpoint without any; empty if nobody knows."""
    model = _model_beside(path)
    if model is not None:
        return _converted(model)
    adapters = path.parent / ADAPTERS_OF_VERL
    return f"{adapters} holds {VERLS_ADAPTERS}; {MERGE_THERE}." if adapters.is_dir() else ""


def _converted(model: Path) -> str:
    return f"The model is in {model}, in HuggingFace's format: there is nothing to convert."


def _model_beside(path: Path) -> Path | None:
    """The directory in a checkpoint's folder, or beside verl's, that holds HuggingFace weights."""
    around = (path, path.parent) if path.name == "dist_ckpt" else (path,)
    places = [folder / name for folder in around for name in HUGGINGFACE]
    return next((place for place in places if any(place.glob("*.safetensors"))), None)


def reference_beside(path: Path) -> Path | None:
    """The directory with the model's configuration that verl puts beside a checkpoint."""
    place = path.parent / "huggingface"
    return place if path.name == "dist_ckpt" and (place / "config.json").is_file() else None


def step_of(path: Path, recorded: int | None) -> int | None:
    """The step of a checkpoint. recorded: what it says itself, which the names of the folders
    around it amend: verl records none, NeMo-RL 0 at every step."""
    if recorded or (recorded == 0 and path.name != "iter_0000000"):
        return recorded
    place = path.absolute()
    matches = (STEP.fullmatch(folder.name) for folder in (place, *place.parents[:4]))
    return next((int(match[1]) for match in matches if match and int(match[1])), recorded)


def _last_of(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    text = ", ".join(name[:100] for name in names[-MOST_NAMED:])
    return f"{text} (and {more} more)" if more > 0 else text


def _tracked(tracker: Path) -> Path:
    """The folder that a tracker file names. Raises ConversionError (3)."""
    with tracker.open(errors="replace") as file:
        word = file.read(200).strip()[:100]
    number = word.isascii() and word.isdigit()
    names = [pattern.format(int(word)) for pattern in STEP_FOLDERS] if number else [word]
    paths = [tracker.parent / name for name in names]
    path = next((path for path in paths if path.is_dir()), None)
    if not re.fullmatch(r"\w+", word) or path is None:
        raise missing(f"{tracker}: names '{word}', but {names[0]}/ is not there.")
    return path
