"""`train --dry-run` and `doctor --config` open all that a run needs: what is wrong is a line each, all of it, and
nothing is left behind."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rlflow import errors
from rlflow.commands import cli
from rlflow.config.schema import load_config
from rlflow.errors import ConfigError, StorageError
from rlflow.preflight import examine, start
from rlflow.preflight.estimates import checkpoint_bytes, run_sizes
from rlflow.preflight.start import check_start
from rlflow.trainer.layout import ParallelLayout
from tests.fixtures import tiny_model
from tests.unit.rollout.chat_templates import QWEN3

ROOT = Path(__file__).resolve().parents[3]
POLICY = ROOT / "recipes" / "searchr1" / "starting_policy"


@dataclass
class Place:
    """A folder with a configuration that works. free: a port that nobody listens on."""

    path: Path
    free: int

    @property
    def config(self) -> Path:
        return self.path / "search.yaml"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("dry")
    rows = [{"question": f"Who is number {number}?", "answer": "me"} for number in range(4)]
    (path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "questions.csv").write_text("question,answer\nWho?,me\n")
    (path / "malformed.jsonl").write_text(
        json.dumps(rows[0]) + "\n" + '{"question": "Who?"' + "\n" + json.dumps({"question": "x"})
    )
    (path / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"id": str(n), "contents": f'"Me {n}"\nMyself'}) + "\n" for n in range(3)
        )
    )
    (path / "broken.jsonl").write_text(
        json.dumps({"id": "0", "contents": '"Me"\nMyself'}) + "\n[1]\n"
    )
    for name in ("no_tokenizer", "half", "other_tokenizer"):
        shutil.copytree(POLICY, path / name)
    for file in (path / "no_tokenizer").glob("tokenizer*"):
        file.unlink()
    _leave_out_a_tensor(path / "half")
    shutil.copytree(POLICY, path / "other_family")
    other = json.loads((path / "other_family" / "config.json").read_text()) | {"model_type": "gpt2"}
    (path / "other_family" / "config.json").write_text(json.dumps(other))
    tiny_model(path / "other_tokenizer")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    place = Place(path, free)
    data = (
        f"train: {path}/questions.jsonl, val: {path}/questions.jsonl, corpus: {path}/corpus.jsonl"
    )
    place.config.write_text(
        f"run: {{directory: '{path}/run', steps: 1}}\nmodel: {{path: '{POLICY}'}}\n"
        f"environment: {{name: search, {data}, retriever: bm25}}\n"
        "rollout: {prompts_per_step: 2, samples_per_prompt: 2, max_total_tokens: 512, max_response_tokens: 40}\n"
        "metrics: {picture: false}\n"
    )
    return place


def _leave_out_a_tensor(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, model / "model.safetensors")


@pytest.fixture
def untouched(place: Place) -> Iterator[None]:
    before = sorted(place.path.rglob("*"))
    yield
    assert sorted(place.path.rglob("*")) == before


def dry(
    place: Place, capsys: pytest.CaptureFixture[str], *overrides: str
) -> tuple[int, str, list[str]]:
    """(exit code, what it says, the problems)."""
    code = cli.main(["train", "--config", str(place.config), "--dry-run", *overrides])
    out, err = capsys.readouterr()
    return code, out, [line for line in err.splitlines() if line.startswith("rlflow: ")]


def test_a_configuration_that_works_is_ready(
    place: Place,
    untouched: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # no table is folded
    code, out, problems = dry(place, capsys)
    assert (code, problems) == (0, [])
    assert "ready: nothing is in the way of this run." in out and "prompts_per_step: 2" in out
    assert "note: split 'train': 4 tasks; prompts of them take up to" in out
    assert "process, update" in out and "optimizer" in out and "keys and values" in out
    assert "(run.steps = 1) if every episode fills its budget" in out and "estimate" in out
    assert "note: 1 x 2 prompts are 0.5 epochs of the 4 tasks of split 'train'" in out
    assert "note: 4 of 4 tasks of split 'val' are also in split 'train'" in out
    places = [
        out.index(text)
        for text in (
            "ready: ",
            "note: ",
            "the run: at most",
            "# batch plan",
            "# resolved configuration",
        )
    ]
    assert places == sorted(places), "what decides comes first"


def test_long_prompts_before_fitting_ones_are_no_problem(
    place: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examine, "PROMPTS_READ", 2)
    questions = ["Who is it? " * 99] * 3 + ["Who?"] * 2
    rows = [
        {"id": str(number), "question": question, "answer": "me"}
        for number, question in enumerate(questions)
    ]
    (tmp_path / "sorted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = dry(
        place, capsys, f"environment.train={tmp_path}/sorted.jsonl", "data.max_prompt_tokens=300"
    )
    assert code == 0 and "prompts of them take up to" in out and "3 are too long" in out


def test_answers_that_could_not_be_right_are_said(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A task's own answer, in the form that its prompt asks for: some that are worth nothing are a note, all of them a problem."""

    def rows(name: str, *answers: str) -> str:
        file = tmp_path / f"{name}.jsonl"
        row = {"question": "How many are {} of {}? Put it behind ####."}
        found = [
            row | {"question": row["question"].format(number, name), "answer": answer}
            for number, answer in enumerate(answers)
        ]
        file.write_text("".join(json.dumps(one) + "\n" for one in found))
        return f"environment={{name: mathematics, val: {file}, train: {tmp_path}/train.jsonl, checks: numbers, prompt: '{{question}}'}}"

    rows("train", "7", "8", "9", "10", "11")
    good = rows("good", "1", "2", "3", "4")
    code, out, problems = dry(place, capsys, good)
    assert (code, problems) == (0, []) and "could not be solved" not in out
    code, out, _ = dry(place, capsys, rows("some", "1,000", "7.", "$5$", "x\ny"))
    assert code == 0 and "split 'val': 2 of the 4 tasks that were looked at could not be" in out
    code, _, problems = dry(place, capsys, rows("all", "$7$", "x\ny"))
    assert code == 2 and "'#### $7$' is read as '7'" in problems[0]


def test_prompts_without_the_models_template_are_said(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A chat model that is fed bare questions answers badly; prompts that went through its template are right as they stand."""
    model, bare = (
        f"model.path={place.path}/other_tokenizer",
        "hold no token of the model's chat template",
    )
    assert bare in dry(place, capsys, model)[1]
    assert bare not in dry(place, capsys, model, "rollout.chat_template=true")[1]
    row = {
        "prompt": "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
        "solutions": ["me"],
    }
    (tmp_path / "templated.jsonl").write_text(json.dumps(row))
    templated = f"{tmp_path}/templated.jsonl"
    assert (
        bare
        not in dry(
            place, capsys, model, f"environment.train={templated}", f"environment.val={templated}"
        )[1]
    )


def test_a_template_that_forgets_thoughts_is_said(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(place.path / "other_tokenizer", tmp_path / "thinking"))
    (path / "chat_template.jinja").write_text(QWEN3)
    model, note = f"model.path={path}", "note: the chat template rewrites earlier turns"
    out = dry(place, capsys, model, "rollout.chat_template=true")[1]
    assert out.count(note) == 1 and "rollout/forks" in out
    assert (
        note
        not in dry(place, capsys, model, "rollout.chat_template=true", "rollout.history=exact")[1]
    )
    assert note not in dry(place, capsys, model)[1]


def test_options_of_the_chat_template_that_change_nothing_are_said(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(place.path / "other_tokenizer", tmp_path / "thinking"))
    template = QWEN3 + "{%- if enable_thinking is false %}<think></think>{%- endif %}"
    (path / "chat_template.jinja").write_text(template)
    model, option = f"model.path={path}", "rollout.chat_template_options.enable_thinking=false"
    note = "rollout.chat_template_options change nothing"
    assert note in dry(place, capsys, model, option)[1]
    assert note not in dry(place, capsys, model, option, "rollout.chat_template=true")[1]
    code, _, problems = dry(place, capsys, model, option.replace("thinking", "thinkin"))
    assert (
        code == 2 and "never reads 'enable_thinkin'. Did you mean 'enable_thinking'?" in problems[0]
    )


def test_what_bfloat16_does_to_adapters_is_said(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    lora, half, merged = "trainer.lora.rank=4", "model.dtype=bfloat16", "trainer.lora.sync=merged"
    coarse = " ".join(dry(place, capsys, lora, half, merged)[1].split())
    assert "trainer.lora.sync=merged: the engine gets whole weights, rounded to bfloat16" in coarse
    assert "rollout.engine.dtype=float32 keeps it" in coarse
    for others in ((lora, half), (half,)):
        assert "whole weights" not in dry(place, capsys, *others)[1]


FAULTS = {
    "a model directory that is none": ("model.path=recipes", "recipes/config.json: missing"),
    "a model without a tokenizer": ("model.path={path}/no_tokenizer", "no tokenizer"),
    "weights that lack a tensor": ("model.path={path}/half", "tensor 'model.norm.weight' is missing, which config.json implies"),
    "a family that cannot be trained": (
        "model.path={path}/other_family", "'gpt2' is not supported; supported: "),
    "a misspelt retriever": ("environment.retriever=bm52", "environment.retriever: unknown name 'bm52'. Did you mean 'bm25'?"),
    "an unknown option of a retriever": ("environment.retriever={name: bm25, k2: 1}", "unknown keyword 'k2'"),
    "an index that is not there": (
        "environment.retriever={name: bm25, path: {path}/index}", "{path}/index: expected an index made by"),
    "malformed questions": (
        "environment.train={path}/malformed.jsonl", "2 of 3 rows of the train questions are bad: line 2: not JSON"),
    "questions that are not there": (
        "environment.val={path}/none.jsonl", "none.jsonl: expected the val questions (environment.val, --val-data FILE)"),
    "questions in CSV": (
        "environment.train={path}/questions.csv", "questions.csv: found CSV, expected the train questions as JSON"),
    "a corpus in CSV": (
        "environment.corpus={path}/questions.csv", "questions.csv: found CSV, expected the corpus as JSON Lines"),
    "a misspelt filter": ("algorithm.filters=[dynamic_sampler]", "filters[0]: unknown name 'dynamic_sampler'. Did you mean"),
    "a misspelt transform": ("algorithm.transforms=[tiss]", "algorithm.transforms[0]: unknown name 'tiss'"),
    "a misspelt loss": ("algorithm.losses=[ppo_clop]", "algorithm.losses[0]: unknown name 'ppo_clop'"),
    "a broken corpus": (
        "environment.corpus={path}/broken.jsonl", "1 of 2 rows of the corpus are bad: line 2: expected a JSON object"),
    "no corpus": ("environment.corpus=null", "no corpus. Set environment.corpus"),
    "a misspelt protocol": ("environment.protocol=searchr2", "environment.protocol: unknown name 'searchr2'"),
    "a misspelt reward": ("environment.reward=searchr1_en", "environment.reward: unknown name 'searchr1_en'"),
    "pages that are not there": ("environment.pages={path}/pages.jsonl", "pages.jsonl"),
    "an option of a managed service": ("environment.managed={wait: 3}", "unknown keyword 'wait'. Did you mean 'wait_s'?"),
    "a retrieval server that is not there": (
        "environment.retriever={name: http, url: 'http://127.0.0.1:{free}'}", "no retrieval server answers: 127.0.0.1:{free}"),
    "prompts that do not fit": ("data={max_prompt_tokens: 3, val_split: train}", "all 4 prompts are longer than 3 tokens"),
    "an observation limit below its frame": ("rollout.max_observation_tokens=2", "rollout.max_observation_tokens: 2 tokens hold"),
    "a chat template that is asked for and missing": ("rollout.chat_template=true", "it has no chat template"),
    "options of a chat template that is missing": (
        "rollout.chat_template_options.enable_thinking=false", "'enable_thinking' is for a chat template, and the tokenizer has none"),
    "a teacher that nobody listens to": ("algorithm.teacher={name: model, path: {policy}}", "no part of the algorithm learns"),
    "a teacher with another vocabulary": (
        "algorithm={advantage: opd, losses: [ppo_clip], teacher: {name: model, path: '{path}/other_tokenizer'}}",
        "another vocabulary than the policy"),
    "a teacher's server that is not there": (
        "algorithm={advantage: opd, losses: [ppo_clip], teacher: {name: server, url: 'http://127.0.0.1:{free}/v1', model: x}}",
        "algorithm.teacher.url: nobody answers at 127.0.0.1:{free}"),
    "a cluster that is not there": (
        "cluster={ranks: 1, address: '127.0.0.1:{free}'}", "cluster.address: nobody answers at 127.0.0.1:{free}"),
    "GPUs that are not there": ("cluster={ranks: 2, gpus_per_rank: 1}", "2 ranks and 1 engines of 1 on 0 GPUs"),
    "memory of a GPU that is not there": ("trainer.offload_snapshots=true", "the trainer has no GPU whose memory it could spare"),
    "an optimizer on a GPU that is not there": (
        "trainer.optimizer={name: adamw, offload: true}", "trainer.optimizer.offload: found true, but the trainer has no GPU"),
    "an engine on a GPU that is not there": ("rollout.engine={name: embedded, device: cuda}", "torch finds no GPU here"),
    "CUDA graphs without a GPU": ("rollout.engine={name: embedded, cuda_graphs: true}", "engine.cuda_graphs: they need a GPU"),
    "memory that this machine has not": (
        "rollout.max_total_tokens=1000000000", "this machine has"),
    "a layout that the model cannot have": ("trainer.pipeline_parallel=2", "expected a multiple of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(
    place: Place, untouched: None, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    override, expected = (
        text.replace("{path}", str(place.path))
        .replace("{free}", str(place.free))
        .replace("{policy}", str(POLICY))
        for text in FAULTS[fault]
    )
    code, out, problems = dry(place, capsys, override)
    assert code == 2 and len(problems) == 1, problems
    assert expected in problems[0]
    assert "1 problem found, nothing was started." in out


def test_a_start_ends_with_the_problem_that_a_dry_run_tells(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded: in the same words, of the same list of checks."""
    for override in (
        "trainer.offload_snapshots=true",
        "rollout.engine={name: embedded, device: cuda}",
    ):
        _, _, problems = dry(place, capsys, override)
        with pytest.raises(ConfigError) as refused:
            check_start(load_config(place.config, [override]))
        assert problems == [f"rlflow: ConfigError: {refused.value}"]


def test_a_start_asks_for_the_secrets_that_an_earlier_run_does_not_hold(
    place: Place, untouched: None
) -> None:
    teacher = "teacher: {name: server, url: 'http://***@h/v1', model: x}"
    config = load_config(
        place.config, [f"algorithm={{advantage: opd, losses: [ppo_clip], {teacher}}}"]
    )
    with pytest.raises(
        ConfigError, match=r"algorithm\.teacher\.url: expected a value, found \*\*\*"
    ):
        check_start(config)


OWN_PARTS = """
from rlflow.algorithms.base import Transform

def per_token(logprobs, advantages):
    return -(logprobs * advantages)

def whole_reward(batch):
    return batch.rewards.sum()

def nothing(batch):
    pass

def of_rows(batch):
    return batch.loss_mask.sum(dim=1)

def fine(output, batch):
    return -output.logprobs * batch.loss_mask, {}

def of_the_run(output, batch):
    return output.logprobs * batch.require("reference_logprobs", "of_the_run"), {}

class Closing(Transform):
    def __call__(self, batch):
        print("called")
        return batch

    def close(self):
        print("closed")
"""


def test_the_users_own_parts_are_called_once(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN_PARTS)
    shape = "returned a tensor of shape"
    faults = {
        f"algorithm.losses=[ppo_clip, {own}:per_token]": f"algorithm.losses[1] '{own}:per_token': the loss raised TypeError: "
        f"unsupported operand type(s) for *: 'PolicyOutput' and 'Batch' ({own}:5 in per_token); a loss takes (output: ",
        f"algorithm.advantage={own}:whole_reward": f"algorithm.advantage '{own}:whole_reward': the advantage {shape} (), "
        "where (B, T) is (17, 13); an advantage takes (batch: Batch)",
        f"algorithm.transforms=[{own}:nothing]": f"algorithm.transforms[0] '{own}:nothing': the transform returned None",
        f"algorithm.aggregate={own}:of_rows": f"algorithm.aggregate '{own}:of_rows': the aggregate {shape} (17,)",
    }
    code, _, problems = dry(place, capsys, *faults)
    assert code == 2 and len(problems) == len(faults)
    assert all(any(expected in problem for problem in problems) for expected in faults.values())
    code, out, _ = dry(
        place,
        capsys,
        f"algorithm.losses=[{own}:fine, {own}:of_the_run]",
        f"algorithm.transforms=[{own}:Closing]",
    )
    assert code == 0 and out.startswith("called\nclosed\n")


def test_a_step_that_repeats_its_tasks_is_told(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = dry(place, capsys, "rollout.prompts_per_step=6", "run.steps=331")
    assert (
        code == 0
        and "note: split 'train' has 4 tasks for 6 prompts per step: each step repeats tasks" in out
    )
    assert "note: 331 x 6 prompts are 496 epochs of the 4 tasks" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_tables_fit_a_terminal_of_80_columns(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = dry(place, capsys)
    tables = out.partition("# batch plan")[2].partition("# resolved")[0].splitlines()
    assert len(tables) > 15 and max(map(len, tables)) <= 80


@pytest.mark.parametrize(("engine", "options", "expected"), [
    ("{name: vllm, engines: 4}", ["cluster.rollout_workers=2"], "set cluster.rollout_workers=8 and rollout.engine.engines=1"),
    ("{name: vllm_server, url: 'http://a:1'}", ["cluster.rollout_workers=2"], "load their weights into the same servers"),
    ("{name: vllm_server, url: ['http://a:1', 'http://b:1']}", ["cluster.rollout_workers=1"], "every url is an engine"),
    ("{name: vllm, tensor_parallel: 4}", ["cluster={rollout_workers: 1, gpus_per_rank: 2, address: auto}"],
     "cluster.gpus_per_rank: found 2, expected at most 1"),
    ("{name: vllm, transfer: ipc}", ["cluster={ranks: 2, rollout_workers: 2, gpus_per_rank: 0.5, address: auto}"],
     "'ipc' needs the engines in the run's process"),
    ("{name: vllm}", ["cluster.rollout_workers=2"], None),
    ("{name: vllm, engines: 4}", [], None),
])  # fmt: skip
def test_what_rollout_workers_cannot_be_made_with_is_told(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: str,
    options: list[str],
    expected: str | None,
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")  # answers as one that has vLLM
    python.chmod(0o755)
    monkeypatch.setenv("RLFLOW_VLLM_PYTHON", str(python))
    code, _, problems = dry(place, capsys, f"rollout.engine={engine}", *options)
    assert code == (2 if expected else 0) and len(problems) == (1 if expected else 0), problems
    assert expected is None or expected in problems[0]


def test_the_command_that_converts_csv_does_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, (problem,) = dry(place, capsys, f"environment.train={place.path}/questions.csv")
    made = place.path / "questions_of_csv.jsonl"
    command = re.search("Convert it by `(.*)`", problem)[1].replace("questions.jsonl", made.name)
    subprocess.run(["bash", "-c", command], check=True)
    assert dry(place, capsys, f"environment.train={made}")[0] == 0
    made.unlink()


def test_all_faults_are_told_and_not_only_the_first(
    place: Place, untouched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["model.path=recipes", "environment.retriever=bm52", f"environment.train={place.path}/malformed.jsonl",
                 f"environment.corpus={place.path}/broken.jsonl", "environment.reward=nothing", "environment.top_k=0",
                 "algorithm.minibatches_per_step=3", "algorithm.losses=[ppo_clop]", "run.name=a/b"]  # fmt: skip
    code, _, problems = dry(place, capsys, *overrides)
    assert code == 2
    for word in ("config.json: missing", "bm52", "malformed.jsonl", "broken.jsonl", "'nothing'", "top_k", "minibatches_per_step",
                 "ppo_clop", "run.name"):  # fmt: skip
        assert sum(word in problem for problem in problems) == 1, (word, problems)


def test_a_model_that_cannot_be_fetched_hides_nothing_else(
    place: Place, untouched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, problems = dry(
        place, capsys, "model.path=Nobody/Nothing", "environment.retriever=bm52"
    )
    assert code == 2 and len(problems) == 2 and "# batch plan" in out
    assert (
        "ModelError: model.path: Nobody/Nothing: no directory of that name here" in problems[0]
        and "HF_HOME=" in problems[0]
    )
    assert "unknown name 'bm52'" in problems[1]


def test_a_megatron_that_imports_triton_where_there_is_none_is_told(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, version = start.importlib.util.find_spec, errors.metadata.version
    monkeypatch.setattr(
        start.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    told = "trainer.backend=megatron: the package 'triton' is not installed:"
    for found, expected in (("0.17.1", 0), ("0.18.0", 1)):
        monkeypatch.setattr(
            errors.metadata,
            "version",
            lambda name, found=found: found if "mega" in name else version(name),
        )
        _, _, problems = dry(place, capsys)
        assert sum(told in problem for problem in problems) == expected


def test_a_value_of_another_kind_is_told_alone(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, problems = dry(place, capsys, "rollout.faults={call_s: -1}")
    assert code == 2 and len(problems) == 1 and "rollout.faults" in problems[0]


def test_the_embedded_world_is_looked_at_and_not_written(
    place: Place, untouched: None, capsys: pytest.CaptureFixture[str]
) -> None:
    world = f"environment.world={{directory: '{place.path}/world', size: 0.2, train_questions: 20, val_questions: 8}}"
    none = [f"environment.{key}=null" for key in ("train", "val", "corpus")]
    code, out, problems = dry(place, capsys, world, *none)
    assert (code, problems) == (0, []) and "split 'train': 20 tasks" in out


def test_a_disk_that_is_too_small_is_told(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(place.path)
    monkeypatch.setattr(examine.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    code, _, problems = dry(place, capsys)
    assert code == 2 and len(problems) == 1 and "GiB are free. Lower checkpoint.keep" in problems[0]


def test_checkpoints_that_a_run_replaces_are_room_for_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    options = [f"run.directory={tmp_path}", "checkpoint.keep=2", "checkpoint.export=false"]
    config = load_config(place.config, options)
    sizes = run_sizes(config, start.policy_architecture(config.model.path))
    each, _ = checkpoint_bytes(sizes)
    for step in (1, 2):
        path = tmp_path / "checkpoints" / f"step_{step:06d}"
        path.mkdir(parents=True)
        with open(path / "weights", "wb") as file:
            file.truncate(each)
    monkeypatch.setattr(examine.shutil, "disk_usage", lambda path: usage._replace(free=each))
    for flag in ("run.resume=true", "run.overwrite=true"):
        examine._check_disk(
            load_config(place.config, [*options, flag]).run, config.checkpoint, sizes
        )
    with pytest.raises(StorageError, match="GiB are free"):
        examine._check_disk(config.run, config.checkpoint, sizes)


def test_a_dense_teacher_may_stand_beside_a_policy_with_experts() -> None:
    layout = ParallelLayout(expert_parallel=2)
    examine._check_teacher({"name": "model", "path": str(POLICY)}, layout, None)


@pytest.mark.parametrize(
    ("attributes", "buffer", "problem"),
    [
        ("stop = ('<|im_end|> now',)", 1, "stop string '<|im_end|> now' cannot be said"),
        (
            "stop = ('</answer>')",
            1,
            "Strange: stop: expected a tuple of non-empty strings, found '</answer>'",
        ),
        ("max_turns = 9", 4000, ""),  # more than rollout.max_turns allows by itself
        (
            "max_turns = 1",
            2000,
            "overlong: expected a buffer of at most the 512 tokens, found 2000",
        ),
    ],
)
def test_an_environment_that_does_not_fit_is_told(
    tmp_path: Path, attributes: str, buffer: int, problem: str
) -> None:
    source = tmp_path / "strange.py"
    methods = "def tasks(self, split): return [Task('0', 'a')]\n    def step(self, episode, response): return Step()"
    source.write_text(
        f"from rlflow import *\n\nclass Strange(Environment):\n    {attributes}\n    {methods}\n"
    )
    tiny_model(tmp_path / "model")
    overlong = f"algorithm.transforms=[{{name: overlong, buffer: {buffer}}}]"
    shared = [f"environment={source}:Strange", f"run.directory={tmp_path}/run", overlong]
    found = examine.examine(load_config(None, [f"model.path={tmp_path}/model", *shared]))
    assert [problem in str(one) for one in found.problems] == [True] * bool(problem)


def test_the_doctor_looks_at_a_configuration_too(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--config", str(place.config)]) in (0, 1)
    assert "ready: nothing is in the way of this run." in capsys.readouterr().out
    assert cli.main(["doctor", "--config", str(place.config), "environment.retriever=bm52"]) == 2
    assert "unknown name 'bm52'" in capsys.readouterr().err
