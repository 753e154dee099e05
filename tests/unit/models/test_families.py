"""A model family is added by one file: its models are then read, converted and sampled from, and no other file knows its
name."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import to_huggingface
from rlflow_tools.ckpt_convert.import_model import Options, to_megatron
from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
from safetensors.torch import load_file, save_file

from rlflow.models import families, tables
from rlflow.models.architecture import architecture, huggingface_shapes
from rlflow.models.families import FAMILIES
from rlflow.models.flops import forward_flops
from rlflow.models.huggingface import check_loadable, digest, iterate_weights, read_config
from rlflow.rollout.embedded.block_manager import BLOCK_SIZE
from rlflow.rollout.embedded.cache import KeyValueCache
from rlflow.rollout.embedded.decoder import Decoder
from tests import rounding
from tests.unit.sources import ROOT, files, tree

RENAMED = {
    "model.embed_tokens": "net.tokens",
    "model.layers": "net.blocks",
    "model.norm": "net.last_norm",
    "lm_head": "net.head",
    "self_attn": "attention",
    "q_norm": "query_norm",
    "gate_proj": "w1",
}
FILE = f'''
"""The layers of Qwen3 under other names."""

import dataclasses

from rlflow.models.families import qwen3
from rlflow.models.family import ModelFamily

RENAMED = {RENAMED!r}


def renamed(name):
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def with_own_names(rule):
    sources = tuple((renamed(name), shape) for name, shape in rule.sources)
    return dataclasses.replace(rule, sources=sources)


FAMILY = ModelFamily(rules=tuple(with_own_names(rule) for rule in qwen3.FAMILY.rules))
'''


def renamed(name: str) -> str:
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a family whose file lies in a folder that is listed with that of the others."""
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "made_up.py").write_text(FILE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "families")])
    monkeypatch.setitem(FAMILIES, "made_up", families.read_families()["made_up"])
    del sys.modules["rlflow.models.families.made_up"]
    return "made_up"


def write_with_own_names(theirs: Path, path: Path, family: str) -> Path:
    """A Qwen3 directory as the family would publish it."""
    path.mkdir()
    tensors = load_file(theirs / "model.safetensors")
    save_file(
        {renamed(name): tensor for name, tensor in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {**read_config(theirs), "model_type": family}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_is_all_that_a_family_takes(made_up: str, tied: bool, tmp_path: Path) -> None:
    theirs = tiny_model(tmp_path / "qwen3", "qwen3", tokenizer=False, tied=tied)
    path = write_with_own_names(theirs, tmp_path / "hf", made_up)
    check_loadable(path)
    model = architecture(read_config(path))
    assert (model.family, model.qk_norm, model.qkv_bias) == (made_up, True, False)
    # Converted for two ranks of two stages, and exported under the family's names again
    layout = CheckpointLayout(tensor=2, pipeline=2)
    to_megatron(path, tmp_path / "megatron", Options(layout=layout, verify="full"))
    to_huggingface(tmp_path / "megatron", tmp_path / "back", path)
    written = dict(iterate_weights(tmp_path / "back"))
    assert written.keys() == huggingface_shapes(model).keys()
    assert "net.tokens.weight" in written and "net.blocks.1.attention.query_norm.weight" in written
    assert digest(written.items()) == digest(iterate_weights(path))
    # Sampled from: the logits of transformers' Qwen3
    decoder = Decoder(model, torch.float32, torch.device("cpu"))
    decoder.load(written.items())
    row = [5, 17, 301, 44, 90, 8]
    decoder.reserve(BLOCK_SIZE)
    attend = KeyValueCache(model, 2, torch.float32, torch.device("cpu")).prefilling(
        torch.tensor([[1]]), [(0, len(row))]
    )
    found = decoder.forward(torch.tensor(row), torch.arange(len(row)), attend)
    (expected,), bound = rounding.logits(theirs, [row])
    assert (found - expected).abs().max() <= bound


def test_a_script_adds_a_family_by_its_rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (*tables.FAMILIES["qwen2"][:-2], tables.Q_NORM, *tables.FAMILIES["qwen2"][-2:])
    monkeypatch.setitem(tables.FAMILIES, "normed_qwen", rules)
    assert FAMILIES["normed_qwen"].rules == rules
    assert set(tables.FAMILIES) == set(FAMILIES)


def named_families(path: Path) -> list[str]:
    """`line: name` of families that a file compares something with, or lists."""
    places = (ast.Compare, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Match)
    names = set(FAMILIES) | {"qwen", "deepseek", "glm"}  # also beginnings of names
    nodes = [node for node in ast.walk(tree(path)) if isinstance(node, places)]
    nodes += [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "get")
    ]
    return [
        f"{path.relative_to(ROOT)}:{inner.lineno}: {inner.value}"
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and inner.value in names
    ]


def test_what_is_computed_depends_on_no_name_of_a_family() -> None:
    outside = [
        path
        for path in files("rlflow", "tools")
        if ROOT / "rlflow" / "models" / "families" not in path.parents
    ]
    assert not [name for path in outside for name in named_families(path)]


def test_a_window_counts_the_pairs_that_it_leaves() -> None:
    """Of the layer with a window of 4 in rows of 10 tokens: 1 + 2 + 3 + 7 x 4 of the 55 pairs, 4 operations for each of
    2 heads of 8 numbers."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
             "num_hidden_layers": 2, "vocab_size": 64}  # fmt: skip
    config = {"model_type": "gemma3_text", **sizes, "sliding_window": 4}
    narrow = architecture({**config, "layer_types": ["sliding_attention", "full_attention"]})
    wide = architecture({**config, "layer_types": ["full_attention", "full_attention"]})
    difference = forward_flops(wide, [10, 3], 5) - forward_flops(narrow, [10, 3], 5)
    assert difference == (55 - 34) * 4 * 2 * 8
