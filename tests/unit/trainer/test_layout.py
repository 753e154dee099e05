"""Layouts that contradict themselves or the model are refused by name; where each layer lies is Megatron's rule."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.errors import ConfigError
from rlflow.models.architecture import Architecture, architecture, placed_rules
from rlflow.trainer.layout import ParallelLayout, stage_of
from rlflow.trainer.megatron.model_weights import parameter_name
from rlflow.trainer.options import TrainerOptions


def model(layers: int = 2, **changes: Any) -> Architecture:
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 101,
    }
    return architecture({**config, **changes})


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel: expected a whole number above 0, found 0"),
        ({"context_parallel": 1.5}, "context_parallel: expected a whole number above 0, found 1.5"),
        (
            {"sequence_parallel": True},
            "sequence_parallel: .* expected trainer.tensor_parallel of at least 2, found 1",
        ),
        (
            {"virtual_pipeline": 2},
            "virtual_pipeline=2: .* expected trainer.pipeline_parallel of at least 2, found 1",
        ),
    ],
)
def test_contradicting_sizes_are_refused(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"tensor_parallel": 3},
            "tensor_parallel=3 does not divide the model's 8 attention heads; possible: 1, 2, 4, 8",
        ),
        (
            {"tensor_parallel": 8},
            "tensor_parallel=8 does not divide the model's 4 key-value heads; possible: 1, 2, 4",
        ),
        (
            {"pipeline_parallel": 4},
            "pipeline_parallel=4 does not divide the model's 2 layers; possible: 1, 2",
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            "virtual_pipeline=2 does not divide the model's 1 layers per pipeline rank; possible: 1",
        ),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_refused(
    sizes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelLayout(**sizes).check_model(model())
    ParallelLayout(4, 2, context_parallel=5, sequence_parallel=True).check_model(model())


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"expert_parallel": 3},
            "expert_parallel=3 does not divide the model's 4 experts; possible: 1, 2, 4",
        ),
        ({"tensor_parallel": 2}, "sequence_parallel: expected true for a model with experts"),
    ],
)
def test_layouts_that_experts_do_not_allow_are_refused(sizes: dict[str, Any], words: str) -> None:
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    }
    with pytest.raises(ConfigError, match=words):
        ParallelLayout(**sizes).check_model(model(**experts))
    ParallelLayout(tensor_parallel=2, sequence_parallel=True, expert_parallel=4).check_model(
        model(**experts)
    )
    with pytest.raises(ConfigError, match="expert_parallel=2: the model has no experts"):
        ParallelLayout(expert_parallel=2).check_model(model())
    ParallelLayout(expert_parallel=2).check_frozen(model())


def test_experts_are_dealt_out_over_the_ranks_of_a_stage() -> None:
    layout = ParallelLayout(
        tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True, expert_parallel=4
    )
    assert layout.data_parallel(8) == 2
    with pytest.raises(ConfigError, match="a divisor of the ranks of a pipeline stage, 2, found 4"):
        layout.data_parallel(4)


def test_what_the_model_does_not_fill_is_data_parallel() -> None:
    layout = TrainerOptions(
        tensor_parallel=2, pipeline_parallel=2, context_parallel=2, virtual_pipeline=4
    ).layout
    assert layout.data_parallel(16) == 2
    assert ParallelLayout().data_parallel(0) == 1
    with pytest.raises(ConfigError, match=r"= 2 x 2 x 2 = 8, found 12; set cluster\.ranks=16"):
        layout.data_parallel(12)


def test_pipeline_ranks_take_turns_with_their_chunks_by_hand() -> None:
    """8 layers, 2 ranks of 2 chunks: [0 1][4 5] and [2 3][6 7] (megatron-core's get_num_layers_to_build)."""
    layout, eight = ParallelLayout(pipeline_parallel=2, virtual_pipeline=2), model(8)
    places = {
        layer: (
            stage_of(rule, layer, eight, layout),
            parameter_name(rule, layer, eight, layout, fused=False),
        )
        for rule, layer in placed_rules(eight)
        if rule.megatron.endswith("linear_fc2.weight")
    }
    assert [place for place, _ in places.values()] == [(0, 0)] * 2 + [(1, 0)] * 2 + [(0, 1)] * 2 + [
        (1, 1)
    ] * 2
    assert [name.split(".")[2] for _, name in places.values()] == ["0", "1"] * 4
    ends = [
        stage_of(rule, 0, eight, layout) for rule, _ in placed_rules(eight) if not rule.per_layer
    ]
    assert ends == [(0, 0), (1, 1), (1, 1)]  # embedding; final norm and output
