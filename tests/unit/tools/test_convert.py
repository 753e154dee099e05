"""Conversion of genuine megatron-core checkpoints, and what happens to bad ones."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from rlflow_tools.ckpt_convert.export_model import Options, to_huggingface
from rlflow_tools.ckpt_convert.verify import verify_export
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

from rlflow.batching import token_batch
from rlflow.errors import COMMAND_PLUG_INS, ConversionError
from rlflow.models.architecture import architecture, placed_rules
from rlflow.models.huggingface import WeightFiles, digest, iterate_weights, read_config
from rlflow.models.sharding import shard
from rlflow.run.export import _random_rows, check_export
from rlflow.trainer.base import Trainer
from tests import rounding
from tests.unit.tools.spoiled import Payload, convert_with_changed_bytes, when_finished
from tools.ckpt_convert.command import main
from tools.ckpt_convert.writers.files import HashedFile

VOCAB = 301
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3"},  # head_dim is not hidden_size / heads
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Per model: NAME/hf, and its checkpoint NAME/step/trainer with optimizer and a snapshot of other weights."""
    root = tmp_path_factory.mktemp("convert")
    for name, options in MODELS.items():
        model = tiny_model(
            root / name / "hf", tokenizer=name == "qwen2", vocab_size=VOCAB, **options
        )
        trainer = Trainer.from_pretrained(model)
        trainer.snapshot("reference")
        trainer.save(root / name / "step" / "trainer", 7)
        trainer.close()
    return root


@pytest.fixture
def case(made: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """(checkpoint to damage, reference, output) of the untied Qwen2 model."""
    shutil.copytree(made / "qwen2" / "step" / "trainer", tmp_path / "checkpoint")
    shutil.copytree(made / "qwen2" / "hf", tmp_path / "hf")
    return tmp_path / "checkpoint", tmp_path / "hf", tmp_path / "out"


def move_below(file: Path) -> None:
    """Where a critic's would lie: what is left must not be taken for a folder of checkpoints."""
    (file.parent / "critic").mkdir()
    file.rename(file.parent / "critic" / file.name)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("name", MODELS)
def test_export_has_the_trainers_weights_and_computes_what_it_does(
    name: str, made: Path, tmp_path: Path
) -> None:
    model = made / name / "hf"
    manifest = to_huggingface(made / name / "step", tmp_path / "out", model, Options(verify="full"))
    assert digest(iterate_weights(tmp_path / "out")) == digest(iterate_weights(model)), (
        "not bitwise equal"
    )
    assert manifest["source"]["iteration"] == 7
    trainer = Trainer.from_pretrained(model)
    _, bound = rounding.logprobs(
        model, rounding.rows_of(token_batch(_random_rows(VOCAB))), temperature=1.0
    )  # of each side
    assert check_export(trainer, tmp_path / "out") <= 2 * bound
    trainer.close()


def test_output_does_not_depend_on_workers(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks that begin within query groups.
    monkeypatch.setattr("rlflow_tools.ckpt_convert.stream.BLOCK_BYTES", 1000)
    for workers in (1, 5):
        options = Options(workers=workers, shard_bytes=100_000, verify="full")
        to_huggingface(
            made / "qwen2" / "step", tmp_path / str(workers), made / "qwen2" / "hf", options
        )
    single, five = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("1", "5")
    )
    assert single == five
    assert len(WeightFiles(tmp_path / "1")) == len(WeightFiles(made / "qwen2" / "hf"))
    assert {"tokenizer.json", "model.safetensors.index.json", "manifest.json"} <= set(single)
    assert "model.safetensors" not in single


def test_cast_rounds_as_torch_does(made: Path, tmp_path: Path) -> None:
    to_huggingface(
        made / "qwen3" / "step",
        tmp_path / "out",
        made / "qwen3" / "hf",
        Options(dtype="bf16", verify="full"),
    )
    expected = (
        (name, tensor.bfloat16()) for name, tensor in iterate_weights(made / "qwen3" / "hf")
    )
    assert digest(iterate_weights(tmp_path / "out")) == digest(expected)
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"


def write_by_hand(
    model: Path, path: Path, padding: int, output: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Per-layer keys and a padded vocabulary, by torch's own writer; no optimizer. output: an output layer from the
    embedding, for a tied model."""
    files, sizes = WeightFiles(model), architecture(read_config(model))
    state = {}
    for rule, layer in placed_rules(sizes):
        tensor = shard(rule, [files[name] for name in rule.names(layer)], sizes, 0, 1)
        if tensor.shape[0] == VOCAB:
            tensor = torch.cat([tensor, torch.full((padding, tensor.shape[1]), 9.0)])
        state[rule.megatron_name(layer, fused=True)] = tensor
    if output:
        state["output_layer.weight"] = output(state["embedding.word_embeddings.weight"])
    torch_checkpoint.save(
        state, storage_writer=torch_checkpoint.FileSystemWriter(path), no_dist=True
    )
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def test_keys_per_layer_and_padded_vocabulary(made: Path, tmp_path: Path) -> None:
    model = made / "qwen3" / "hf"
    write_by_hand(model, tmp_path / "checkpoint", padding=83)
    to_huggingface(tmp_path / "checkpoint", tmp_path / "out", model, Options(verify="full"))
    assert digest(iterate_weights(tmp_path / "out")) == digest(iterate_weights(model))


def test_plans_of_older_megatrons_beside_the_tables_are_read_over(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.strategies import torch as strategy
    from torch.distributed.checkpoint.planner import SavePlan

    class MCoreSavePlan(SavePlan):
        __module__, __qualname__ = strategy.__name__, "MCoreSavePlan"

    monkeypatch.setattr(strategy, "MCoreSavePlan", MCoreSavePlan, raising=False)
    model, checkpoint = made / "qwen3" / "hf", tmp_path / "checkpoint"
    write_by_hand(model, checkpoint, padding=0)
    tables = pickle.loads((checkpoint / ".metadata").read_bytes())
    tables.all_local_plans = [MCoreSavePlan([])]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(tables))
    to_huggingface(checkpoint, tmp_path / "out", model)


def hostile_metadata(checkpoint: Path, reference: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Payload(checkpoint.parent / "witness")))
    (checkpoint / "trainer.json").unlink()


def hostile_common(checkpoint: Path, reference: Path) -> None:
    torch.save(Payload(checkpoint.parent / "witness"), checkpoint / "common.pt")
    (checkpoint / "trainer.json").unlink()


def truncate(checkpoint: Path, reference: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def drop_layer(checkpoint: Path, reference: Path) -> None:
    edit(reference / "config.json", num_hidden_layers=1)
    (checkpoint / "trainer.json").unlink()


def tracker_names_nothing(checkpoint: Path, reference: Path) -> None:
    (checkpoint / ".metadata").unlink()
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("12")


def optimizer_only(checkpoint: Path, reference: Path) -> None:
    shutil.rmtree(checkpoint)
    state = {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(4)}
    torch_checkpoint.save(
        state, storage_writer=torch_checkpoint.FileSystemWriter(checkpoint), no_dist=True
    )
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def other_heads(checkpoint: Path, reference: Path) -> None:
    """Twice as many heads, half as wide: every shape stays, and only the checkpoint's own description tells."""
    config = json.loads((reference / "config.json").read_text())
    edit(
        reference / "config.json",
        num_attention_heads=8,
        head_dim=config["hidden_size"] // 8,
        num_key_value_heads=4,
    )


def shape_only(**changes: Any) -> Any:
    """Changes of config.json that the shapes contradict, in a checkpoint that does not describe its model."""

    def damage(checkpoint: Path, reference: Path) -> None:
        edit(reference / "config.json", **changes)
        (checkpoint / "trainer.json").unlink()

    return damage


BAD = {
    "missing shard": (
        3,
        "__0_0.distcp: missing",
        lambda ckpt, ref: (ckpt / "__0_0.distcp").unlink(),
    ),
    "no .metadata": (3, "cut short", lambda ckpt, ref: (ckpt / ".metadata").unlink()),
    "no .metadata, but another model's below": (
        3,
        "cut short",
        lambda ckpt, ref: move_below(ckpt / ".metadata"),
    ),
    "truncated": (4, "bytes found", truncate),
    "damaged .metadata": (
        4,
        "damaged",
        lambda ckpt, ref: (ckpt / ".metadata").write_bytes(b"\x80\x04abc"),
    ),
    "unknown family": (
        6,
        "'gpt9' is not supported",
        lambda ckpt, ref: edit(ref / "config.json", model_type="gpt9"),
    ),
    "unmapped tensor": (
        6,
        "have no place",
        lambda ckpt, ref: edit(ref / "config.json", model_type="llama"),
    ),
    "other heads": (
        7,
        "its heads is 4",
        lambda ckpt, ref: edit(ref / "config.json", num_attention_heads=8),
    ),
    "other layers": (7, "1 layers", drop_layer),
    "same shapes, other heads": (7, "its heads is 4", other_heads),
    "other head_dim": (7, "has shape", shape_only(head_dim=32)),
    "larger vocabulary": (7, "has shape", shape_only(vocab_size=VOCAB + 1)),
    "output layer of an untied model": (
        7,
        "is not the embedding",
        shape_only(tie_word_embeddings=True),
    ),
    "tracker without its directory": (3, "names '12'", tracker_names_nothing),
    "tracker with another digit": (
        3,
        "names '\u00b2'",
        lambda ckpt, ref: (
            (ckpt / ".metadata").unlink(),
            (ckpt / "latest_checkpointed_iteration.txt").write_text("\u00b2"),
        ),
    ),
    "no heads": (
        6,
        "'num_attention_heads' is 0",
        lambda ckpt, ref: edit(ref / "config.json", num_attention_heads=0),
    ),
    "optimizer only": (10, "holds no weights", optimizer_only),
    "tied": (
        7,
        "its tied is False",
        lambda ckpt, ref: edit(ref / "config.json", tie_word_embeddings=True),
    ),
    "fsdp": (
        10,
        "'fsdp_dtensor'",
        lambda ckpt, ref: edit(ckpt / "metadata.json", sharded_backend="fsdp_dtensor"),
    ),
    "no checkpoint": (10, "no checkpoint", lambda ckpt, ref: (shutil.rmtree(ckpt), ckpt.mkdir())),
    "another object than tables": (4, "found pathlib.Path.touch", hostile_metadata),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_its_code(
    name: str, case: Any, capsys: Any, tmp_path: Path
) -> None:
    checkpoint, reference, out = case
    code, text, damage = BAD[name]
    damage(checkpoint, reference)
    if name == "unmapped tensor":
        (checkpoint / "trainer.json").unlink()
    assert main(["to-hf", str(checkpoint), str(out), "--hf", str(reference)]) == code
    message = capsys.readouterr().err
    assert text in message and message.count("\n") == 1
    assert (
        not out.exists() and not list(tmp_path.glob("out*")) and not (tmp_path / "witness").exists()
    )


def test_out_is_replaced_only_when_asked_and_never_the_checkpoint(
    case: Any, tmp_path: Path
) -> None:
    checkpoint, reference, out = case
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    call = ["to-hf", str(checkpoint), "--hf", str(reference)]
    assert main([*call, str(out)]) == 9
    assert main([*call, str(out), "--overwrite"]) == 9, "not a model directory"
    assert main([*call, str(checkpoint / "export")]) == 9
    assert main([*call, str(tmp_path), "--overwrite"]) == 9
    assert main([*call, str(reference), "--overwrite"]) == 9
    assert (out / "notes.txt").read_text() == "mine"
    (out / "config.json").write_text('{"model_type": "qwen3"}')
    killed = tmp_path / "out.17.42.partial"
    killed.mkdir()
    (killed / "half").write_text("")
    assert main([*call, str(out), "--overwrite"]) == 0
    assert digest(iterate_weights(out)) == digest(iterate_weights(reference))
    assert not (out / "notes.txt").exists() and not (out / "half").exists() and not killed.exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "tokenizer.json"])
def test_a_source_that_was_saved_over_meanwhile_is_refused(
    name: str, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same size and the same time: only its place on the disk, or the time of the change, is another."""
    checkpoint, reference, out = case
    file = next(place / name for place in (checkpoint, reference) if (place / name).exists())

    def save_over(_: Path) -> None:
        status, content = file.stat(), file.read_bytes()
        file.write_bytes(content)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    when_finished(monkeypatch, save_over)
    with pytest.raises(
        ConversionError, match=f"{name}: was written to while it was read"
    ) as caught:
        to_huggingface(checkpoint, out, reference)
    assert caught.value.exit_code == 4 and not out.exists() and not list(tmp_path.glob("out*"))


def test_full_disk_leaves_nothing(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, reference, out = case
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    assert main(["to-hf", str(checkpoint), str(out), "--hf", str(reference)]) == 8
    assert not out.exists() and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("name", "number"), [("write", 28), ("fsync", 122), ("write", 5)])
def test_a_disk_that_fails_is_one_line(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, number: int
) -> None:
    checkpoint, reference, out = case

    def refuse(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(HashedFile if name == "write" else os, name, refuse)
    assert main(["to-hf", str(checkpoint), str(out), "--hf", str(reference)]) == 8
    message = capsys.readouterr().err
    assert ("is full" in message) == (number != 5) and message.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_tied_output_layer_is_dropped_where_it_is_the_embedding(made: Path, tmp_path: Path) -> None:
    """Megatron's last pipeline stage has a copy of the embedding; a copy that differs would be lost weights."""
    model = made / "qwen2-tied" / "hf"
    write_by_hand(model, tmp_path / "same", padding=3, output=lambda embedding: embedding)
    to_huggingface(tmp_path / "same", tmp_path / "out", model, Options(verify="full"))
    assert digest(iterate_weights(tmp_path / "out")) == digest(iterate_weights(model))
    write_by_hand(model, tmp_path / "other", padding=3, output=lambda embedding: embedding.roll(1))
    with pytest.raises(ConversionError, match="is not the embedding") as caught:
        to_huggingface(tmp_path / "other", tmp_path / "refused", model)
    assert caught.value.exit_code == 7 and not (tmp_path / "refused").exists()


def test_weights_that_are_not_finite_are_refused(made: Path, tmp_path: Path) -> None:
    model = made / "qwen3" / "hf"
    write_by_hand(model, tmp_path / "checkpoint", padding=0)
    file = tmp_path / "checkpoint" / "__0_0.distcp"
    norm = WeightFiles(model)["model.norm.weight"].numpy().tobytes()
    file.write_bytes(
        file.read_bytes().replace(norm, torch.tensor(float("nan")).numpy().tobytes() + norm[4:])
    )
    with pytest.raises(ConversionError) as caught:
        to_huggingface(tmp_path / "checkpoint", tmp_path / "out", model)
    assert caught.value.exit_code == 4 and "NaN" in str(caught.value)


@pytest.mark.parametrize(("count", "seed"), [(25, 0), pytest.param(200, 1, marks=pytest.mark.slow)])
def test_a_changed_byte_never_gives_wrong_weights(case: Any, count: int, seed: int) -> None:
    files = sorted(file for file in case[0].iterdir() if file.is_file())
    convert_with_changed_bytes(case, files, count, seed)


def test_verify_sees_a_changed_byte(case: Any) -> None:
    checkpoint, reference, out = case
    to_huggingface(checkpoint, out, reference)
    assert main(["verify", str(out)]) == 0
    file = out / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConversionError, match="was written; export again"):
        verify_export(out)
    file.unlink()
    assert main(["verify", str(out)]) == 3


def test_inspect_and_dry_run(case: Any, capsys: Any) -> None:
    checkpoint, reference, out = case
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["iteration"] == 7 and report["layout"]["tensor_parallel"] == 1
    assert report["parameters"] == sum(tensor.numel() for _, tensor in iterate_weights(reference))
    assert (
        main(["to-hf", str(checkpoint), str(out), "--hf", str(reference), "--dry-run", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["parameters"] == report["parameters"]
    assert not out.exists()


def test_rlflow_convert_is_a_plugin(
    case: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlflow.commands import cli
    from tools.ckpt_convert import command

    class Entry:
        name = "convert"

        @staticmethod
        def load() -> Any:
            return command.add

    monkeypatch.setattr(
        cli.metadata, "entry_points", lambda group: [Entry] if group == COMMAND_PLUG_INS else []
    )
    checkpoint, reference, out = case
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert cli.main(["convert", "to-hf", str(checkpoint), str(out), "--hf", str(reference)]) == 9
    assert cli.main(["convert", "inspect", str(checkpoint)]) == 0
