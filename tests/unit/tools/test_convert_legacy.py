"""Legacy checkpoints, one file per rank: every layout round-trips, and what is wrong with one is said in a line.

The files are made by legacy_files.py, whose logits in Megatron are checked in test_convert_logits.py, and damaged here. Files of
genuine ranks are read in test_convert_families.py and dist/test_convert_matrix.py."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_config, tiny_model
from rlflow_tools.ckpt_convert.describe import describe
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from rlflow_tools.ckpt_convert.readers.arguments import contradictions
from rlflow_tools.ckpt_convert.readers.legacy import read_legacy

from rlflow.errors import RLFlowError
from rlflow.models.architecture import stored_architecture
from rlflow.models.huggingface import digest, iterate_weights
from tests.unit.tools.legacy_files import write_checkpoint, write_legacy
from tests.unit.tools.spoiled import Payload, convert_with_changed_bytes
from tools.ckpt_convert.command import main

DENSE = (
    CheckpointLayout(),
    CheckpointLayout(4, 1),
    CheckpointLayout(2, 2, vocab_multiple=3),
    CheckpointLayout(1, 2, 2, fused=False),
    CheckpointLayout(2, fused=False),
)
SPARSE = (
    CheckpointLayout(expert=2),
    CheckpointLayout(2, 2, 2, 2),
    CheckpointLayout(2, expert=4, fused=False),
)
WITH_EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v3")
ROUND_TRIPS: list[Any] = [
    *(("qwen2", {"tied": True, "num_key_value_heads": 4}, layout) for layout in DENSE),
    ("deepseek_v2", {}, SPARSE[0]),
    ("qwen2_moe", {}, SPARSE[1]),
    ("deepseek_v3", {}, SPARSE[2]),
    *(
        pytest.param(family, {}, CheckpointLayout(expert=ranks), marks=pytest.mark.slow)
        for family in WITH_EXPERTS
        for ranks in (1, 2, 4)
    ),
]


@pytest.mark.parametrize("saved", ("torch_dist", "torch"))
@pytest.mark.parametrize(
    ("family", "sizes", "layout"), ROUND_TRIPS, ids=lambda value: str(value).replace(" ", "")
)
def test_there_and_back_is_bit_exact(
    family: str, sizes: dict[str, Any], layout: CheckpointLayout, saved: str, tmp_path: Path
) -> None:
    model = tiny_model(
        tmp_path / "hf", family, tokenizer=False, vocab_size=101, num_hidden_layers=4, **sizes
    )
    write_checkpoint(model, tmp_path / "megatron", saved, layout)
    to_huggingface(
        tmp_path / "megatron", tmp_path / "back", model
    )  # full: test_convert_families.py
    assert digest(iterate_weights(tmp_path / "back")) == digest(iterate_weights(model))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with hf/ and its checkpoint megatron/ of two tensor and two pipeline ranks."""
    root = tmp_path_factory.mktemp("legacy")
    model = tiny_model(root / "hf", "qwen3", tokenizer=False, vocab_size=101)
    write_legacy(model, root / "megatron", CheckpointLayout(2, 2))
    return root


@pytest.fixture
def case(whole: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """(checkpoint to damage, reference, output)."""
    shutil.copytree(whole / "megatron", tmp_path / "megatron")
    return tmp_path / "megatron", whole / "hf", tmp_path / "out"


RANKS = ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001")


def file_of(checkpoint: Path, rank: str) -> Path:
    return checkpoint / "release" / rank / "model_optim_rng.pt"


def edit(
    change: Callable[[dict[str, Any]], Any], rank: str = "mp_rank_01_001"
) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        state = torch.load(file_of(checkpoint, rank), weights_only=False)
        change(state)
        torch.save(state, file_of(checkpoint, rank))

    return damage


def drop_rank(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "release" / "mp_rank_01_001")


def truncate(checkpoint: Path) -> None:
    file = file_of(checkpoint, "mp_rank_00_000")
    file.write_bytes(file.read_bytes()[:-1000])


def norms(state: dict[str, Any]) -> None:
    state["model"]["decoder.final_layernorm.weight"][0] += 1


def exchange(first: str, second: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        files = file_of(checkpoint, first), file_of(checkpoint, second)
        for file, content in zip(files, [file.read_bytes() for file in reversed(files)]):
            file.write_bytes(content)

    return damage


def duplicate(checkpoint: Path) -> None:
    for rank in RANKS:  # as of a tool that saves all ranks in one process
        edit(lambda state: vars(state["args"]).update(rank=0), rank)(checkpoint)
    shutil.copy(file_of(checkpoint, "mp_rank_00_001"), file_of(checkpoint, "mp_rank_01_001"))


def hostile_weight(state: dict[str, Any]) -> None:
    state["model"]["output_layer.weight"] = Payload(Path("/witness"))


BAD: dict[str, tuple[int, str, Callable[[Path], None]]] = {
    "missing rank": (3, "tensor rank 1, pipeline rank 1 is missing", drop_rank),
    "missing file": (3, "missing", lambda path: file_of(path, "mp_rank_00_001").unlink()),
    "missing stage": (
        3,
        "pipeline parallel 2",
        lambda path: (
            [shutil.rmtree(directory) for directory in path.glob("release/*_001")] and None
        ),
    ),
    "truncated": (4, "damaged", truncate),
    "not an archive": (
        4,
        "before 1.6",
        lambda path: file_of(path, "mp_rank_00_000").write_bytes(b"\x80\x02}q.") and None,
    ),
    "two iterations": (5, "of iteration 9", edit(lambda state: state.update(iteration=9))),
    "replicas differ": (5, "is not what another rank has", edit(norms)),
    "tensor ranks exchanged": (
        5,
        "tensor rank 1, and lies in",
        exchange("mp_rank_00_000", "mp_rank_01_000"),
    ),
    "all ranks exchanged": (5, "and lies in", exchange("mp_rank_01_000", "mp_rank_00_001")),
    "a rank twice": (5, "is a copy of the other", duplicate),
    "shapes differ": (
        5,
        "ranks disagree in 'output_layer.weight'",
        edit(lambda state: state["model"].update({"output_layer.weight": torch.zeros(3, 64)})),
    ),
    "tensor of one rank": (
        6,
        "mlp.extra.weight",
        edit(
            lambda state: state["model"].update(
                {"decoder.layers.0.mlp.extra.weight": torch.zeros(3)}
            )
        ),
    ),
    "no weights": (10, "holds no weights", edit(lambda state: state.pop("model"))),
    "before megatron-core": (
        10,
        "language_model",
        edit(lambda state: state.update(model={"language_model": {}})),
    ),
    "grouped GEMM": (
        10,
        "moe_use_legacy_grouped_gemm",
        edit(
            lambda state: state["model"].update(
                {"decoder.layers.0.mlp.experts.weight1": torch.zeros(3)}
            )
        ),
    ),
    "an object for a weight": (
        10,
        "'output_layer.weight' is an object of pathlib.Path.touch",
        edit(hostile_weight),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_its_code(
    name: str, case: Any, capsys: Any, tmp_path: Path
) -> None:
    checkpoint, reference, out = case
    code, text, damage = BAD[name]
    damage(checkpoint)
    assert main(["to-hf", str(checkpoint), str(out), "--hf", str(reference)]) == code
    message = capsys.readouterr().err
    assert text in message and message.count("\n") == 1, message
    assert not out.exists() and not (tmp_path / "witness").exists()


def test_layout_is_read_from_the_files(case: Any) -> None:
    checkpoint, reference, out = case
    call = ["to-hf", str(checkpoint), str(out), "--hf", str(reference), "--dry-run", "--pp", "2"]
    assert main([*call, "--tp", "2"]) == 0
    assert main([*call, "--tp", "4"]) == 5
    report = describe(checkpoint)
    assert report["format"] == "torch" and report["layout"]["tensor_parallel"] == 2


def test_stages_need_not_have_as_many_layers(case: Any) -> None:
    """The second layer's tensors move from the last stage, where they are layer 0, to the first stage's end."""
    checkpoint, reference, out = case
    for tensor in ("00", "01"):
        states = [
            torch.load(file_of(checkpoint, f"mp_rank_{tensor}_00{stage}"), weights_only=False)
            for stage in (0, 1)
        ]
        first, last = (state["model"] for state in states)
        for name in [name for name in last if name.startswith("decoder.layers.0.")]:
            first[name.replace("layers.0.", "layers.1.")] = last.pop(name)
        for stage, state in enumerate(states):
            torch.save(state, file_of(checkpoint, f"mp_rank_{tensor}_00{stage}"))
    to_huggingface(checkpoint, out, reference, Options(verify="full"))
    assert digest(iterate_weights(out)) == digest(iterate_weights(reference))


def test_a_file_without_permission_is_one_line(
    case: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, reference, out = case
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "model_optim_rng.pt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert main(["to-hf", str(checkpoint), str(out), "--hf", str(reference)]) == 4
    message = capsys.readouterr().err
    assert (
        "model_optim_rng.pt: cannot be read (Permission denied)" in message
        and message.count("\n") == 1
    )


def test_files_that_say_which_rank_saved_them_convert(case: Any) -> None:
    """Numbered as Megatron-LM's processes are: tensor ranks in turn, per stage."""
    checkpoint, reference, out = case
    said = [
        vars(torch.load(file_of(checkpoint, rank), weights_only=False)["args"]) for rank in RANKS
    ]
    assert [(args["rank"], args["world_size"]) for args in said] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    to_huggingface(checkpoint, out, reference)
    assert digest(iterate_weights(out)) == digest(iterate_weights(reference))


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "norm_eps": {"norm_epsilon": None, "layernorm_epsilon": 0.25},
    "groups": {"group_query_attention": False},
    "vocab_size": {"vocab_size": 120},
    "use_rope_scaling": {"use_rope_scaling": True},
    "rotary_seq_len_interpolation_factor": {"rotary_seq_len_interpolation_factor": 4},
    "rotary_percent": {"rotary_percent": 0.5},
    "window_size": {"window_size": (128, 0)},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_arguments_that_contradict_the_reference_are_refused(name: str, case: Any) -> None:
    checkpoint, reference, out = case
    for rank in RANKS:
        edit(lambda state: vars(state["args"]).update(CONTRADICTIONS[name]), rank)(checkpoint)
    with pytest.raises(RLFlowError, match=name) as caught:
        to_huggingface(checkpoint, out, reference)
    assert caught.value.exit_code == 7 and not out.exists()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
WINDOW = {"sliding_window": 64, "use_sliding_window": True}
ROUTED = {"num_experts_per_tok": 2, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GROUPED = {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2}
SINGLE = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
GROUPS = {
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}
ORDINARY = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "no_rope_freq": None,
    "softmax_scale": None,
    "qk_layernorm": False,
}
"""As Megatron-LM keeps them of a Llama."""
OTHERS = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "quick_geglu": True,
    "rotary_interleaved": True,
    "apply_layernorm_1p": True,
    "layernorm_zero_centered_gamma": True,
    "apply_residual_connection_post_layernorm": True,
    "no_rope_freq": [0, 1],
    "softmax_scale": 0.5,
    "softmax_type": "off-by-one",
    "qk_layernorm": True,
    "qk_l2_norm": True,
}


@pytest.mark.parametrize(
    ("family", "config", "args", "expected"),
    [
        (
            "llama",
            {"rope_scaling": LLAMA3},
            {"use_rope_scaling": True, "rope_scaling_factor": 8},
            [],
        ),
        ("llama", {"rope_scaling": LLAMA3}, {"use_rope_scaling": False}, ["use_rope_scaling"]),
        (
            "llama",
            {"rope_scaling": LLAMA3},
            {"use_rope_scaling": True, "rope_scaling_factor": 32},
            ["rope_scaling_factor"],
        ),
        ("qwen2", WINDOW, {"window_size": [63, 0], "seq_length": 4096}, []),
        ("qwen2", WINDOW, {"window_size": None, "seq_length": 64}, []),
        ("qwen2", WINDOW, {"window_size": None, "seq_length": 65}, ["window_size"]),
        (
            "qwen2",
            {**WINDOW, "use_sliding_window": False},
            {"window_size": None, "seq_length": 65},
            [],
        ),
        ("qwen2", {}, {"vocab_size": 90, "seq_length": 65}, []),
        ("qwen3_moe", ROUTED, {"moe_router_topk": 2, "moe_router_pre_softmax": False}, []),
        ("qwen3_moe", ROUTED, {"moe_router_topk": 8}, ["moe_router_topk"]),
        (
            "qwen3_moe",
            {**ROUTED, "norm_topk_prob": False},
            {"moe_router_pre_softmax": False},
            ["moe_router_pre_softmax"],
        ),
        (
            "deepseek_v3",
            ROUTED,
            {"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"},
            [],
        ),
        (
            "deepseek_v3",
            ROUTED,
            {"moe_router_score_function": "softmax"},
            ["moe_router_score_function"],
        ),
        ("llama", {}, ORDINARY, []),
        *(("llama", {}, {name: value}, [name]) for name, value in OTHERS.items()),
        ("qwen3", {}, {"qk_layernorm": True, "softmax_scale": 32**-0.5}, []),
        ("qwen2", {"rope_parameters": YARN}, {"position_embedding_type": "yarn"}, []),
        (
            "deepseek_v3",
            {"rope_parameters": YARN},
            {**ORDINARY, "qk_layernorm": True, "rope_type": "yarn"},
            [],
        ),
        ("deepseek_v3", {}, {"position_embedding_type": "none", "softmax_scale": 0.5}, []),
        ("deepseek_v3", GROUPED, GROUPS, []),
        ("deepseek_v3", GROUPED, dict.fromkeys(GROUPS), list(GROUPS)),
        ("deepseek_v3", SINGLE, GROUPS, list(GROUPS)),
        ("deepseek_v3", SINGLE, dict.fromkeys(GROUPS), []),
        ("deepseek_v3", SINGLE, dict.fromkeys(GROUPS, 1), []),
        ("qwen3_moe", ROUTED, dict.fromkeys(GROUPS), []),
        ("qwen3_moe", ROUTED, GROUPS, list(GROUPS)),
    ],
)
def test_what_contradicts(
    family: str, config: dict[str, Any], args: dict[str, Any], expected: list[str]
) -> None:
    whole = tiny_config(family, **{"rope_parameters": None, **config})
    found = [name for name, _, _ in contradictions(args, whole, stored_architecture(whole))]
    assert found == expected


def test_two_numbers_are_tensor_and_expert_where_there_is_no_pipeline(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "hf", "qwen3_moe", tokenizer=False)
    write_legacy(model, tmp_path / "megatron", CheckpointLayout(tensor=1, expert=2))
    assert sorted(path.name for path in (tmp_path / "megatron" / "release").iterdir()) == [
        "mp_rank_00_000",
        "mp_rank_00_001",
    ]
    found = read_legacy(tmp_path / "megatron" / "release").layout
    assert (found["pipeline_parallel"], found["expert_parallel"]) == (1, 2)


def test_training_state_beside_the_weights_is_read_and_ignored(case: Any) -> None:
    """What Megatron-LM and numpy leave in such a file: arguments, optimizer, states of generators, fp8 recipes."""
    import io
    import signal

    checkpoint, reference, out = case
    numpy = pytest.importorskip("numpy")

    def add(state: dict[str, Any]) -> None:
        state["args"] = argparse.Namespace(
            **vars(state["args"]), exit_signal=signal.SIGTERM, save=Path("/somewhere")
        )
        state["rng_state"] = [
            {"np_rng_state": numpy.random.RandomState(0).get_state(), "random": (3, (1, 2), None)}
        ]
        main = torch.ones(3)  # of the bf16 optimizer, which copies the parameter's attributes
        main.tensor_model_parallel, main.partition_dim = True, 0  # type: ignore[attr-defined]
        state["optimizer"] = {
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]},
            "fp32_from_fp16_params": [[main, torch.nn.Parameter(main)]],
        }
        state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"recipe")
        state["model"]["rotary_pos_emb.inv_freq"] = torch.ones(4)

    edit(add)(checkpoint)
    to_huggingface(checkpoint, out, reference, Options(verify="full"))
    assert digest(iterate_weights(out)) == digest(iterate_weights(reference))


@pytest.mark.parametrize(("count", "seed"), [(25, 0), pytest.param(200, 1, marks=pytest.mark.slow)])
def test_a_changed_byte_never_gives_wrong_weights(case: Any, count: int, seed: int) -> None:
    files = sorted(case[0].rglob("*.pt"))
    convert_with_changed_bytes(case, files, count, seed)
