"""Checkpoints of one rank: exact resume, damage, foreign and hostile files."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.readers.formats import open_source
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rlflow.errors import CheckpointError, DamagedCheckpointError
from rlflow.models.huggingface import digest
from rlflow.storage.integrity import fingerprint, read_fingerprints, read_sealed, write_manifest
from tests.unit.tools.spoiled import Payload
from tests.unit.trainer.backends import BACKENDS
from tests.unit.trainer.batches import VOCAB, make_batch, policy_gradient


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_continues_bit_for_bit(make: Any, tmp_path: Path, dtype: str) -> None:
    options = {
        "schedule": {"name": "cosine", "decay_steps": 6},
        "tokens_per_microbatch": 40,
        "dtype": dtype,
    }
    whole, resumed = make(**options), make(**options)
    whole.snapshot("reference")
    for number in range(2):
        whole.update(make_batch(seed=number), policy_gradient)
    whole.save(tmp_path / "checkpoint", 7)
    assert resumed.load(tmp_path / "checkpoint") == 7
    for number in range(2, 5):
        batch = make_batch(seed=number)
        assert whole.update(batch, policy_gradient) == resumed.update(batch, policy_gradient)
        assert torch.equal(
            whole.score(batch, "reference")["logprobs"],
            resumed.score(batch, "reference")["logprobs"],
        )
    assert digest(whole.weights()) == digest(resumed.weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_before_the_first_update(make: Any, tmp_path: Path, dtype: str) -> None:
    whole, resumed = make(dtype=dtype), make(dtype=dtype)
    whole.save(tmp_path, 0)
    resumed.load(tmp_path)
    for _ in range(2):
        assert whole.update(make_batch(), policy_gradient) == resumed.update(
            make_batch(), policy_gradient
        )


def test_optimizer_options_are_those_of_the_resumed_run(make: Any, tmp_path: Path) -> None:
    make(optimizer={"name": "adamw", "weight_decay": 0.1}).save(tmp_path, 0)
    resumed = make(optimizer={"name": "adamw", "weight_decay": 0.2}, lr=1e-2)
    resumed.load(tmp_path)
    assert resumed.update(make_batch(), policy_gradient)["lr"] == 1e-2
    assert [group["weight_decay"] for group in resumed._optimizer.param_groups] == [0.2, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_damage_to_any_file_is_one_clear_error(make: Any, backend: str, tmp_path: Path) -> None:
    """A flipped byte at the start, in the middle and at the end, a lost tail, lost content, a lost file."""
    trainer, place = make(backend=backend), tmp_path / "checkpoint"
    trainer.snapshot("reference")
    trainer.save(place, 1)
    with pytest.raises(CheckpointError, match="absent: no such checkpoint"):
        trainer.load(tmp_path / "absent")
    files = sorted(place.iterdir())
    assert len(files) > 3
    for file in files:
        content = file.read_bytes()
        places = (0, len(content) // 2, len(content) - 1)
        flipped = [bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]]) for at in places]
        for other in (*flipped, content[:-2], b"", None):
            file.write_bytes(other) if other is not None else file.unlink()
            with pytest.raises(DamagedCheckpointError, match=f"^[^\n]*{file.name}: [^\n]*$"):
                trainer.load(place)
        file.write_bytes(content)
    assert trainer.load(place) == 1


def test_a_checkpoint_cannot_run_code(make: Any, tmp_path: Path) -> None:
    trainer, place, witness = make(), tmp_path / "checkpoint", tmp_path / "witness"
    for name in (".metadata", "common.pt"):
        trainer.save(place, 1)
        write = (
            torch.save
            if name == "common.pt"
            else lambda value, file: file.write_bytes(pickle.dumps(value))
        )
        write(Payload(witness), place / name)
        manifest = read_sealed(place / "trainer.json")
        files = {**read_fingerprints(manifest, place), name: fingerprint(place / name)}
        write_manifest(place / "trainer.json", manifest, files)
        with pytest.raises(CheckpointError, match="damaged \\("):
            trainer.load(place)
        assert not witness.exists()


def test_a_checkpoint_written_on_python_3_11_2_is_read(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's Python pickles a member of an enum as `getattr(Enum, name)`."""
    trainer, place = make(), tmp_path / "checkpoint"
    with monkeypatch.context() as patched:
        patched.setattr(
            _MEM_FORMAT_ENCODING,
            "__reduce_ex__",
            lambda self, protocol: (getattr, (self.__class__, self._name_)),
        )
        trainer.save(place, 1)
    assert b"getattr" in (place / ".metadata").read_bytes()
    assert trainer.load(place) == 1
    assert open_source(place).iteration == 1


def test_objects_between_tensors_cannot_run_code(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.distributed reads them with weights_only=False."""
    from rlflow.trainer.megatron import checkpoint

    trainer, witness = make(), tmp_path / "witness"
    sharded = checkpoint._sharded_rng
    with monkeypatch.context() as patched:
        patched.setattr(
            checkpoint, "_sharded_rng", lambda world: replace(sharded(world), data=Payload(witness))
        )
        trainer.save(tmp_path / "checkpoint", 1)
    with pytest.raises(CheckpointError, match=r"weights_only|Weights only"):
        trainer.load(tmp_path / "checkpoint")
    assert not witness.exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_snapshot_that_the_checkpoint_lacks_survives_loading(
    make: Any, backend: str, tmp_path: Path
) -> None:
    """So that a run can be resumed with a KL term that it began without: the reference is the starting policy."""
    batch, first = make_batch(), make(backend=backend)
    start = first.score(batch)["logprobs"]
    first.update(batch, policy_gradient)
    first.save(tmp_path / "checkpoint", 1)
    resumed = make(backend=backend)
    resumed.snapshot("reference")
    resumed.load(tmp_path / "checkpoint")
    assert torch.equal(resumed.score(batch, "reference")["logprobs"], start)
    assert not torch.equal(resumed.score(batch)["logprobs"], start)


class Copies(TorchDispatchMode):
    """`most`: copies of a tensor of this shape and type that were there at the same time, of those made inside."""

    MAKING = (
        torch.ops.aten.clone.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.cat.default,
    )

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.most = (shape, dtype), 0
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.MAKING and (tuple(result.shape), result.dtype) == self.kind:
            self._made.append(StorageWeakRef(result.untyped_storage()))
            self.most = max(self.most, sum(not made.expired() for made in self._made))
        return result


def test_a_snapshot_made_or_loaded_anew_is_never_there_twice(make: Any, tmp_path: Path) -> None:
    """A run that trained ran out of GPU memory where it was resumed (three copies) or its reference renewed (two)."""
    trainer, resumed, batch = make(dtype="bfloat16"), make(dtype="bfloat16"), make_batch()
    copies = [Copies((VOCAB, 32), torch.bfloat16) for _ in range(2)]
    with copies[0]:
        trainer.snapshot("reference")
        trainer.update(batch, policy_gradient)
        trainer.snapshot("reference")
    trainer.save(tmp_path, 1)
    with copies[1]:
        resumed.snapshot("reference")
        resumed.load(tmp_path)
    assert [one.most for one in copies] == [1, 1]
    moved = trainer.score(batch)["logprobs"]
    for one in (trainer, resumed):
        one.update(batch, policy_gradient)  # a snapshot shares nothing with the weights
        assert torch.equal(one.score(batch, "reference")["logprobs"], moved)


def test_gate_and_up_are_loaded_into_one_tensor_without_a_copy(make: Any, tmp_path: Path) -> None:
    """Megatron loads the halves apart; put together in new tensors they are half a copy of weights and moments."""
    trainer = make(dtype="bfloat16")
    trainer.save(tmp_path, 1)
    copies = [Copies((2 * 48, 32), dtype) for dtype in (torch.bfloat16, torch.float32)]
    with copies[0], copies[1]:
        trainer.load(tmp_path)
    assert [one.most for one in copies] == [0, 0]


def test_checkpoint_of_another_model_is_refused(make: Any, tmp_path: Path) -> None:
    make().save(tmp_path / "checkpoint", 1)
    sizes = {"vocab_size": VOCAB + 7, "hidden_size": 32, "intermediate_size": 48}
    other = make(tiny_model(tmp_path / "other", "qwen2", tied=True, tokenizer=False, **sizes))
    with pytest.raises(
        CheckpointError, match=f"vocab is {VOCAB}, that of model.path is {VOCAB + 7}"
    ):
        other.load(tmp_path / "checkpoint")


def test_a_save_replaces_what_a_killed_one_left(make: Any, tmp_path: Path) -> None:
    (tmp_path / "__3_0.distcp").write_bytes(b"left over")
    trainer = make()
    trainer.save(tmp_path, 1)
    assert not (tmp_path / "__3_0.distcp").exists()
    assert set(json.loads((tmp_path / "trainer.json").read_text())["files"]) == {
        file.name for file in tmp_path.iterdir()
    } - {"trainer.json"}
