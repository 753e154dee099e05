"""Checkpoints are found where other programs put them; what is none is named in one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from rlflow_tools.ckpt_convert.readers.folders import locate
from rlflow_tools.ckpt_convert.readers.formats import open_source

from rlflow.models.huggingface import digest, iterate_weights
from tests.unit.tools.legacy_files import write_checkpoint
from tools.ckpt_convert.command import main

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf/, and its checkpoints torch/release and torch_dist/release."""
    root = tmp_path_factory.mktemp("folders")
    model = tiny_model(root / "hf", "qwen2", tokenizer=False, vocab_size=101)
    for name in ("torch", "torch_dist"):
        write_checkpoint(model, root / name, name, CheckpointLayout())
    return root


def put(made: Path, format: str, place: Path, tracked: str = "") -> None:
    """A checkpoint in `place`, its files linked; tracked: what the tracker file beside it says."""
    shutil.copytree(made / format / "release", place, copy_function=os.link)
    if tracked:
        (place.parent / TRACKER).write_text(tracked)


def verl(made: Path, root: Path) -> None:
    for step in (7, 8, 10):
        actor = root / f"global_step_{step}" / "actor"
        put(made, "torch_dist", actor / "dist_ckpt")
        (actor / "huggingface").mkdir()
        shutil.copy(made / "hf" / "config.json", actor / "huggingface")
        (actor / "transformer_config.json").write_text("{}")
        (actor.parent / "data.pt").touch()
    (root / TRACKER).write_text("8")


def nemo_rl(made: Path, root: Path) -> None:
    step = root / "step_57"
    put(made, "torch_dist", step / "policy" / "weights" / "iter_0000000", "0")
    (step / "policy" / "weights" / "latest_train_state.pt").touch()
    (step / "policy" / "tokenizer").mkdir()
    for name in ("training_info.json", "config.yaml"):
        (step / name).write_text("{}")
    shutil.copytree(step, root / "tmp_step_58")


def bridge(made: Path, root: Path) -> None:
    put(made, "torch_dist", root / "iter_0000057", "57")
    (root / "iter_0000057" / "run_config.yaml").write_text("model: {}")
    (root / "latest_train_state.pt").touch()


def slime(made: Path, root: Path) -> None:
    for step in (5, 7):
        put(made, "torch_dist", root / f"iter_{step:07d}", "7")
    (root / "rollout").mkdir()


def rlinf(made: Path, root: Path) -> None:
    step = root / "checkpoints" / "global_step_20"
    for role in ("actor", "critic"):
        put(made, "torch", step / role / "iter_0000020", "20")
    (step / "data").mkdir()
    (root / "log").mkdir()


PROGRAMS: dict[str, tuple[Callable[[Path, Path], None], tuple[str, ...], tuple[str, ...]]] = {
    "verl": (
        verl,
        ("global_step_8", "actor", "dist_ckpt"),
        (".", "global_step_8", "global_step_8/actor", "global_step_8/actor/dist_ckpt"),
    ),
    "NeMo-RL": (
        nemo_rl,
        ("step_57", "policy", "weights", "iter_0000000"),
        (".", "step_57", "step_57/policy", "step_57/policy/weights"),
    ),
    "Megatron-Bridge": (bridge, ("iter_0000057",), (".", "iter_0000057")),
    "slime": (slime, ("iter_0000007",), (".", "iter_0000007")),
    "RLinf": (
        rlinf,
        ("checkpoints", "global_step_20", "actor", "iter_0000020"),
        (".", "checkpoints", "checkpoints/global_step_20", "checkpoints/global_step_20/actor"),
    ),
}
"""Per program: what makes its folder, where the checkpoint is, and what a user may point at."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_checkpoint_is_found_from_every_folder_around_it(
    name: str, made: Path, tmp_path: Path, capsys: Any
) -> None:
    build, inner, starts = PROGRAMS[name]
    root = tmp_path / "root"
    build(made, root)
    place = root.joinpath(*inner)
    for start in starts:
        assert locate(root / start) == place, start
    out = tmp_path / "out"
    call = ["to-hf", str(root), str(out), "--hf", str(made / "hf")]
    assert main(call) == 0
    assert digest(iterate_weights(out)) == digest(iterate_weights(made / "hf"))


def test_the_step_is_read_from_the_folders_where_the_files_have_none(
    made: Path, tmp_path: Path
) -> None:
    nemo_rl(made, tmp_path / "nemo")
    assert open_source(tmp_path / "nemo").iteration == 57  # recorded is 0
    verl(made, tmp_path / "verl")
    common = tmp_path / "verl/global_step_8/actor/dist_ckpt/common.pt"
    common.unlink()
    torch.save({"lr_scheduler": {}}, common)  # all of verl's
    assert open_source(tmp_path / "verl").iteration == 8


def test_the_iteration_option_chooses_among_the_steps_of_other_programs(
    made: Path, tmp_path: Path
) -> None:
    verl(made, tmp_path / "verl")
    for common in tmp_path.glob("verl/*/actor/dist_ckpt/common.pt"):
        common.unlink()
        torch.save({}, common)
    call = ["to-hf", str(tmp_path / "verl"), str(tmp_path / "out"), "--dry-run"]
    assert main([*call, "--iteration", "10"]) == 0
    assert main([*call, "--iteration", "11"]) == 5


def test_verls_configuration_beside_the_checkpoint_is_the_reference(
    made: Path, tmp_path: Path
) -> None:
    verl(made, tmp_path / "verl")
    assert main(["to-hf", str(tmp_path / "verl"), str(tmp_path / "out")]) == 0
    assert digest(iterate_weights(tmp_path / "out")) == digest(iterate_weights(made / "hf"))


def half_written(made: Path, root: Path) -> None:
    place = root / "global_step_9" / "actor" / "dist_ckpt"
    put(made, "torch_dist", place)
    (place / ".metadata").unlink()
    (root / TRACKER).write_text("9")


def files(*names: str) -> Callable[[Path, Path], None]:
    def build(made: Path, root: Path) -> None:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()

    return build


def only_begun(made: Path, root: Path) -> None:
    (root / "global_step_9" / "actor" / "dist_ckpt").mkdir(parents=True)


def gone(made: Path, root: Path) -> None:
    put(made, "torch_dist", root / "global_step_7" / "actor" / "dist_ckpt")
    (root / TRACKER).write_text("8")


def many(made: Path, root: Path) -> None:
    for step in range(9, 12):
        put(made, "torch_dist", root / f"step_{step}" / "policy" / "weights" / "iter_0000000")


def unfinished(made: Path, root: Path) -> None:
    nemo_rl(made, root)
    shutil.rmtree(root / "step_57")


def fsdp_tables(made: Path, root: Path) -> None:
    dcp.save({"a": torch.zeros(2)}, checkpoint_id=root, no_dist=True)


def adapters(names: tuple[str, ...]) -> Callable[[Path, Path], None]:
    def build(made: Path, root: Path) -> None:
        place = root / "iter_0000003"
        state = {name: torch.zeros(2, 4) for name in names}
        dcp.save(state, checkpoint_id=place, no_dist=True)
        (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (root / TRACKER).write_text("3")

    return build


def optimizer_and_adapters(made: Path, root: Path) -> None:
    only_optimizer(made, root)
    shutil.rmtree(root / "global_step_8" / "actor" / "huggingface")
    (root / "global_step_8" / "actor" / "adapter_checkpoint").mkdir()


def only_optimizer(made: Path, root: Path) -> None:
    """verl with its bridge: weights in HuggingFace's format, the rest in dist_ckpt."""
    actor = root / "global_step_8" / "actor"
    dcp.save(
        {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(2)},
        checkpoint_id=actor / "dist_ckpt",
        no_dist=True,
    )
    (actor / "dist_ckpt" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    shutil.copytree(made / "hf", actor / "huggingface")


LAYER = "decoder.layers.self_attention.linear_qkv"
ADAPTER = (f"{LAYER}.adapter.linear_in.weight", f"{LAYER}.adapter.linear_out.weight")
NAMED: dict[str, tuple[int, str, Callable[[Path, Path], None]]] = {
    "half-written": (3, "actor/dist_ckpt/.metadata: missing; it is written last", half_written),
    "only begun": (3, "cut short", only_begun),
    "only common.pt": (3, "cut short", files("iter_0000003/common.pt")),
    "step that is gone": (3, "names '8', but", gone),
    "many": (3, "name one: step_9, step_10, step_11", many),
    "unfinished": (3, "tmp_step_58 is a save that was not finished", unfinished),
    "FSDP's tables": (3, "(FSDP) is not read", fsdp_tables),
    "FSDP of verl": (
        10,
        "FSDP checkpoint of verl",
        files("global_step_8/actor/model_world_size_2_rank_0.pt", "global_step_8/data.pt"),
    ),
    "adapters of verl": (
        10,
        "LoRA adapters of verl alone",
        files("global_step_8/actor/adapter_checkpoint/mp_rank_00_adapter.pt"),
    ),
    "FSDP of RLinf": (
        10,
        "FSDP checkpoint of RLinf",
        files("checkpoints/global_step_2/actor/dcp_checkpoint/.metadata"),
    ),
    "DTensor of NeMo-RL": (
        10,
        "DTensor checkpoint of NeMo-RL",
        files("step_5/policy/weights/model/__0_0.distcp", "step_5/policy/weights/model/.metadata"),
    ),
    "PEFT": (10, "LoRA adapters alone in PEFT's format", files("adapter_model.safetensors")),
    "DeepSpeed": (10, "DeepSpeed", files("global_step5/mp_rank_00_model_states.pt")),
    "HuggingFace": (10, "HuggingFace's format", files("config.json", "model.safetensors")),
    "weights beside the optimizer": (10, "The model is in", only_optimizer),
    "adapters beside the optimizer": (10, "LoRA adapters of verl", optimizer_and_adapters),
    "adapters of Bridge": (10, "adapters of Megatron-Bridge alone (2 tensors", adapters(ADAPTER)),
    "adapters and weights": (
        10,
        "adapters of Megatron-Bridge beside its weights",
        adapters((*ADAPTER, f"{LAYER}.weight")),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", NAMED)
def test_what_is_no_checkpoint_is_named_in_one_line(
    name: str, made: Path, tmp_path: Path, capsys: Any
) -> None:
    code, text, build = NAMED[name]
    root = tmp_path / "root"
    build(made, root)
    assert main(["to-hf", str(root), str(tmp_path / "out"), "--hf", str(made / "hf")]) == code
    message = capsys.readouterr().err
    assert text in message and message.count("\n") == 1 and len(message) < 700, message


RLINFS_OPTIONS = """
load-path save-path num-layers iteration attn-type use-q-lora use-qkv-bias use-qk-norm mlp-type
num-experts use-shared-experts use-expert-bias use-shared-experts-gate first-dense
tie-word-embeddings use-gpu-num use-gpu-index process-num router-trans linear-trans layernorm-trans
model model-type te-ln-linear-qkv te-ln-linear-mlp_fc1 te-extra-state-check-none tp-size pp-size
tpe-size ep-size schedular pp-stages disable-tqdm num-attention-heads num-query-groups head-dim
hf-shared-experts-prefix
"""
"""Of convert_mg_to_middle_file and convert_middle_file_to_hf."""


def test_the_page_says_what_becomes_of_every_option_of_rlinfs_two_steps() -> None:
    page = (Path(__file__).parents[3] / "docs" / "convert.md").read_text()
    table = page.split("| RLinf | here |")[1].split("| other programs | here |")[0]
    first = " ".join(line.split(" | ")[0] for line in table.splitlines())
    assert [name for name in RLINFS_OPTIONS.split() if f"`--{name}`" not in first] == []
