"""Pickles that name torch's classes without torch, read by torch."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import torch
from rlflow_tools.ckpt_convert.dtypes import BFLOAT16
from rlflow_tools.ckpt_convert.mapping.plan import Target
from rlflow_tools.ckpt_convert.writers.torch_dist import OutputChunk, _Tables
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as of_torch

ROOT = Path(__file__).resolve().parents[3]


def test_metadata_is_what_torch_makes_of_the_same_tables() -> None:
    tables = _Tables()
    for row in (0, 2):
        target = Target(f"a@{row}", (2, 3), BFLOAT16, 3, ())
        tables.add(OutputChunk("a", (4, 3), (row, 0), target), "__0_0.distcp", 100 * row, 50)
    tables.add_object("state/shard_0_1", "__0_0.distcp", 400, 9)
    chunks = [of_torch.ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((2, 3))) for row in (0, 2)]
    tensor = of_torch.TensorStorageMetadata(of_torch.TensorProperties(torch.bfloat16), torch.Size((4, 3)), chunks)
    place = filesystem._StorageInfo
    places = {
        of_torch.MetadataIndex("a", (row, 0), number): place("__0_0.distcp", 100 * row, 50)
        for number, row in enumerate((0, 2))
    }
    places[of_torch.MetadataIndex("state/shard_0_1")] = place("__0_0.distcp", 400, 9)
    expected = of_torch.Metadata({"a": tensor, "state/shard_0_1": of_torch.BytesStorageMetadata()}, None, places)
    found = pickle.loads(tables.pickled())
    assert found == expected and {name.index for name in found.storage_data} == {0, 1, None}
    assert isinstance(found.state_dict_metadata["a"].size, torch.Size)


def test_conversions_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """In both directions, with the default verification."""
    from fixtures import tiny_model

    model = tiny_model(tmp_path / "model", tokenizer=False)
    program = (
        "import sys; from tools.ckpt_convert.command import main\n"
        "there = main(['to-megatron', *sys.argv[1:3], '--tp', '2'])\n"
        "back = main(['to-hf', *sys.argv[2:4], '--hf', sys.argv[1], '--dtype', 'bf16'])\n"
        "legacy = main(['to-megatron', sys.argv[1], sys.argv[4], '--format', 'torch'])\n"
        "assert (there, back, legacy) == (0, 0, 0)\n"
        "print(sorted({'torch', 'transformers', 'safetensors', 'megatron'} & set(sys.modules)))"
    )
    paths = [str(model), *(str(tmp_path / name) for name in ("megatron", "back", "legacy"))]
    done = subprocess.run([sys.executable, "-c", program, *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
