"""What a user can get wrong is said in one line, before anything is built or written, and the corrected command then works."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlflow.commands import cli
from tests.fixtures import tiny_model
from tests.flow.letters import REFERENCE, letters_config, write_config, write_letters_model


@dataclass
class Place:
    """A directory with a configuration that works, and files that are broken in various ways."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "letters.yaml"

    @property
    def runs(self) -> Path:
        return self.path / "runs"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("place"))
    model = write_letters_model(place.path / "model")
    options = (
        "run.steps=1",
        "evaluation.at_start=false",
        "checkpoint.export=false",
        "metrics.picture=false",
    )
    write_config(letters_config(model, place.runs, *options), place.config)
    _break_models(place.path, model)
    rows = [{"question": f"Who is {number}?", "answer": "me"} for number in range(5)]
    (place.path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[3] = {"question": "Who?"}
    (place.path / "bad.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + "{not json\n"
    )
    (place.path / "corpus.jsonl").write_text(
        json.dumps({"id": "0", "contents": '"Me"\nMyself'}) + "\n"
    )
    (place.path / "not.yaml").write_text("run: [unclosed\n")
    (place.path / "file").write_text("a file, no directory")
    (place.path / "cut.py").write_text("import os\n\nclass Thing(:\n")
    (place.path / "failing.py").write_text("import os\n\nThing = 1 / 0\n")
    (place.path / "leaving.py").write_text("import sys\n\nsys.exit('good\\nbye')\n")
    (place.path / "needy.py").write_text("import nowhere_at_all\n")
    (place.path / "other.py").write_text(
        "from rlflow import Environment\n\nNUMBER = 3\n\nclass Plain: ...\n\nclass Half(Environment): ...\n\n"
        "def five(): return 5\n"
    )
    return place


def _break_models(path: Path, model: Path) -> None:
    """Copies of the model, each with one fault."""
    for name in (
        "without_config",
        "without_weights",
        "without_tokenizer",
        "cut_weights",
        "gpt2",
        "broken_config",
    ):
        (path / name).mkdir()
        for file in model.iterdir():
            (path / name / file.name).write_bytes(file.read_bytes())
    (path / "without_config" / "config.json").unlink()
    (path / "without_weights" / "model.safetensors").unlink()
    for file in (path / "without_tokenizer").glob("tokenizer*"):
        file.unlink()
    cut = path / "cut_weights" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    config = json.loads((model / "config.json").read_text())
    (path / "gpt2" / "config.json").write_text(
        json.dumps({**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    (path / "broken_config" / "config.json").write_text("{")


SEARCH = (
    "environment={{name: search, train: {place}/good.jsonl, val: {place}/good.jsonl, corpus: {place}/corpus.jsonl, "
    "retriever: bm25}}"
)

# What is wrong -> (arguments after those of a good run, what the one line must say: what, where, how to fix it)
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["rollout.sample_per_prompt=4"], ["rollout.sample_per_prompt", "Did you mean", "samples_per_prompt"]),
    "unknown section": (["rolout.max_turns=4"], ["rolout", "Did you mean 'rollout'"]),
    "wrong type": (["run.steps=many"], ["command line", "run.steps", "whole number", "many"]),
    "out of range": (["trainer.lr=-1"], ["trainer.lr", "above 0", "-1"]),
    "unknown choice": (["trainer.backend=megatro"], ["trainer.backend", "Did you mean 'megatron'"]),
    "configuration not YAML": (["--config", "{place}/not.yaml"], ["not.yaml"]),
    "configuration missing": (["--config", "{place}/none.yaml"], ["none.yaml"]),
    "no model named": (["model.path=''"], ["model.path", "--model"]),
    "missing model": (["model.path={place}/nowhere"], ["{place}/nowhere", "no such model directory", "config.json"]),
    "missing model, short option": (["--model", "{place}/nowhere"], ["--model", "{place}/nowhere"]),
    "model without config": (["model.path={place}/without_config"], ["without_config/config.json", "missing"]),
    "model with a broken config": (["model.path={place}/broken_config"], ["broken_config/config.json"]),
    "model without weights": (["model.path={place}/without_weights"], ["without_weights", "safetensors"]),
    "model with cut weights": (["model.path={place}/cut_weights"], ["cut_weights/model.safetensors"]),
    "model without tokenizer": (["model.path={place}/without_tokenizer"], ["without_tokenizer", "tokenizer"]),
    "unsupported family": (["model.path={place}/gpt2"], ["gpt2", "qwen2"]),
    "tensor parallelism that divides no heads": (
        ["trainer.tensor_parallel=3", "cluster.ranks=3"],
        ["trainer.tensor_parallel=3", "4 attention heads", "possible: 1, 2, 4"]),
    "pipeline that divides no layers": (
        ["trainer.pipeline_parallel=4", "cluster.ranks=4"], ["trainer.pipeline_parallel=4", "2 layers", "possible: 1, 2"]),
    "layout without ranks": (["trainer.tensor_parallel=2"], ["cluster.ranks", "2 x 1 x 1 = 2"]),
    "unknown environment": (["environment={{name: serch}}"], ["environment", "Did you mean 'search'"]),
    "environment's module missing": (["environment={{name: 'nowhere:Thing'}}"], ["nowhere", "no module"]),
    "environment's file missing": (["environment={{name: '{place}/no.py:Thing'}}"], ["no.py", "no such file"]),
    "environment's file not Python": (
        ["environment={{name: '{place}/cut.py:Thing'}}"], ["cut.py:3", "SyntaxError"]),
    "environment's file raises": (
        ["environment={{name: '{place}/failing.py:Thing'}}"], ["failing.py:3", "ZeroDivisionError in"]),
    "environment's file exits": (
        ["environment={{name: '{place}/leaving.py:Thing'}}"], ["leaving.py:3", "SystemExit", "good bye"]),
    "environment's file needs a package": (
        ["environment={{name: '{place}/needy.py:Thing'}}"], ["needy.py:1", "nowhere_at_all"]),
    "environment is a number": (
        ["environment={{name: '{place}/other.py:NUMBER'}}"], ["expected a class or a function", "3"]),
    "environment is another class": (
        ["environment={{name: '{place}/other.py:Plain'}}"], ["Plain", "expected an rlflow.Environment"]),
    "environment is half written": (["environment={{name: '{place}/other.py:Half'}}"], ["Half", "without step, tasks"]),
    "environment's function makes none": (
        ["environment={{name: '{place}/other.py:five'}}"], ["other.py:five", "it returned int"]),
    "huge seed": (["run.seed=18446744073709551616"], ["run.seed", "from 0 to 4294967295"]),
    "prompts without end": (
        ["rollout.prompts_per_step=1000000000"], ["rollout.prompts_per_step", "at most 1,000,000 trajectories"]),
    "GPUs that are not there": (
        ["cluster.ranks=64", "cluster.gpus_per_rank=1"],
        ["cluster.ranks", "64 ranks and 1 engines of 1 on", "Lower cluster.ranks"]),
    "environment's keyword unknown": (["environment.taks=3"], ["taks", "Did you mean 'tasks'"]),
    "missing data": ([SEARCH, "--train-data", "{place}/none.jsonl"], ["--train-data", "{place}/none.jsonl", "no such file"]),
    "missing data, as a key": ([SEARCH, "environment.train={place}/none.jsonl"], ["{place}/none.jsonl", "train questions"]),
    "missing corpus": ([SEARCH, "environment.corpus={place}/none.jsonl"], ["{place}/none.jsonl", "corpus"]),
    "malformed rows": (
        [SEARCH, "environment.train={place}/bad.jsonl"],
        ["bad.jsonl", "2 of 6 rows", "line 4: no gold answer", "line 6: not JSON", "Fix or remove"]),
    "unknown retriever": ([SEARCH, "environment.retriever=bm52"], ["retriever", "Did you mean 'bm25'"]),
    "unknown reward": ([SEARCH, "environment.reward=em"], ["environment.reward", "searchr1_em"]),
    "unknown engine": (["rollout.engine.name=vlm"], ["engine", "vlm", "embedded"]),
    "an interpreter that is not there, for workers": (
        ["rollout.engine={{name: vllm, python: '{place}/no_python'}}", "cluster.rollout_workers=2"],
        ["rollout.engine.python", "{place}/no_python"]),
    "an interpreter without vLLM": (
        [f"rollout.engine={{{{name: vllm, python: '{sys.executable}'}}}}"], ["rollout.engine.python", "has no vLLM"]),
    "unknown loss": (["algorithm.losses=[{{name: ppo_clp}}]"], ["algorithm.losses", "Did you mean 'ppo_clip'"]),
    "unknown keyword of a loss": (["algorithm.losses.0.clip_hihg=0.3"], ["clip_hihg", "Did you mean 'clip_high'"]),
    "a correction applied twice": (
        ["algorithm.transforms=[tis]"], ["tis", "ppo_clip", "applied twice", "anchor: proximal"]),
    "unknown advantage": (["algorithm.advantage={{name: grp}}"], ["algorithm.advantage", "Did you mean 'grpo'"]),
    "all prompts too long": (["data.max_prompt_tokens=1"], ["split 'train'", "all 36 prompts", "data.max_prompt_tokens"]),
    "run directory below a file": (["run.directory={place}/file/run"], ["run.directory", "{place}/file"]),
    "run directory that nobody can write": (["run.directory=/proc/rlflow"], ["run.directory", "/proc"]),
    "run directory with another placeholder": (["run.directory={place}/runs/{{title}}"], ["run.directory", "title", "{{name}}"]),
    "run name with a slash": (["run.name=a/b"], ["run.name", "a/b"]),
    "resume and overwrite": (["--resume", "--overwrite"], ["run.resume", "run.overwrite"]),
}  # fmt: skip


def run(place: Place, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, stderr) of `rlflow train` in this process, on top of the configuration that works."""
    config = [] if "--config" in arguments else ["--config", str(place.config)]
    capsys.readouterr()
    code = cli.main(
        ["train", *config, *(argument.format(place=place.path) for argument in arguments)]
    )
    return code, capsys.readouterr().err


def contents(place: Place) -> list[str]:
    return sorted(str(path) for path in place.path.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_how_to_mend_it_and_leaves_no_trace(
    mistake: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = MISTAKES[mistake]
    before = contents(place)
    code, err = run(place, arguments, capsys)
    assert code == 2, err
    assert len(err.splitlines()) == 1 and err.startswith("rlflow: "), err
    for word in words:
        assert word.format(place=place.path) in err, err
    assert len(err) < 500 + 4 * len(str(place.path)) and "Traceback" not in err
    assert contents(place) == before


@pytest.mark.parametrize(
    "package, arguments",
    [
        ("ray", ["cluster.ranks=1"]),
        ("tensorboard", ["metrics.sinks=[tensorboard]"]),
        ("wandb", ["metrics.sinks=[wandb]"]),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str,
    arguments: list[str],
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, package, None
    )  # what Python itself does for a package that must not be found
    before = contents(place)
    code, err = run(place, arguments, capsys)
    assert code == 2 and len(err.splitlines()) == 1
    assert (
        f"'{package}' is not installed" in err
        and "pip install -e '" in err
        and f"[{package}]'" in err
    )
    assert contents(place) == before


def test_rows_that_nobody_can_read_are_counted_even_when_there_are_many(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "Who?"}\n' * 1000 + '{"question": "Who?", "answer": "me"}\n')
    code, err = run(place, [SEARCH, f"environment.val={data}"], capsys)
    assert (
        code == 2
        and "1000 of 1001 rows" in err
        and "and 997 more" in err
        and len(err.splitlines()) == 1
    )


def test_prompts_over_the_limit_are_dropped_counted_and_said(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "uneven.py"
    source.write_text(
        "from rlflow import Environment, Step, Task\n\n\nclass Uneven(Environment):\n    def tasks(self, split):\n"
        "        return [Task(str(n), 'a' * (2 + 8 * (n % 3 == 0))) for n in range(12)]\n\n"
        "    async def step(self, episode, response):\n        return Step(reward=float(response == 'a'), terminated=True)\n"
    )
    arguments = [
        f"environment={{name: '{source}:Uneven'}}",
        f"run.directory={tmp_path}/run",
        "data.max_prompt_tokens=9",
    ]
    code, err = run(
        place, [word.replace("{", "{{").replace("}", "}}") for word in arguments], capsys
    )
    assert code == 0, err
    assert "split 'train': 4 of 12 prompts over 9 tokens dropped" in err
    assert (
        json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])[
            "data/prompts_dropped"
        ]
        == 4
    )
    assert (
        "4 of 12 prompts" in (tmp_path / "run/log.txt").read_text()
    )  # said before the directory was there


def test_the_corrected_command_starts_at_once(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a start that was killed before its first step, or that failed on what only the environment finds."""
    directory = place.path / "corrected" / "run"
    where = f"run.directory={directory}"
    assert (
        run(place, [where, "data.max_prompt_tokens=1"], capsys)[0] == 2 and not directory.exists()
    )
    directory.mkdir(parents=True)
    for name in (
        "run.lock",
        "log.txt",
        "config.yaml",
        "metrics.jsonl",
    ):  # as a kill in the middle of the start leaves it
        (directory / name).touch()
    code, err = run(place, [where], capsys)
    assert code == 0, err
    code, err = run(place, [where], capsys)
    assert code == 2 and "already holds a run" in err


def test_a_directory_that_only_looks_like_a_failed_start_is_not_taken(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    code, err = run(place, [f"run.directory={tmp_path}"], capsys)
    assert code == 2 and "already holds" in err and (tmp_path / "config.yaml").read_text() == "mine"


def test_the_layout_is_checked_before_anything_is_built(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment would fail as soon as it is made; the layout's error comes first."""
    source = tmp_path / "expensive.py"
    source.write_text(
        "from rlflow import Environment\n\n\nclass Expensive(Environment):\n    def __init__(self):\n"
        f"        open({str(tmp_path / 'built')!r}, 'w').close()\n\n    def tasks(self, split):\n        return []\n\n"
        "    async def step(self, episode, response):\n        raise NotImplementedError\n"
    )
    named = f"environment={{{{name: '{source}:Expensive'}}}}"
    code, err = run(place, [named, "trainer.tensor_parallel=3", "cluster.ranks=3"], capsys)
    assert code == 2 and "4 attention heads" in err and not (tmp_path / "built").exists()
    code, err = run(place, [named], capsys)
    assert code == 2 and "no tasks" in err and (tmp_path / "built").exists()


@pytest.mark.parametrize("name", ["environment_error", "tokens_beyond_the_model"])
def test_what_fails_in_the_first_step_is_one_line_too(
    name: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: dict[str, Callable[[], tuple[list[str], str]]] = {
        "environment_error": lambda: (_failing(tmp_path), "episodes were aborted"),
        "tokens_beyond_the_model": lambda: (
            [f"model.path={_small_vocabulary(tmp_path)}"],
            "vocabulary",
        ),
    }
    overrides, words = arguments[name]()
    code, err = run(place, [f"run.directory={tmp_path}/run", *overrides], capsys)
    last = err.splitlines()[-1]
    assert code == 2 and words in last and last.startswith("rlflow: ") and "Traceback" not in err
    assert len(err.splitlines()) <= 2  # how many episodes were aborted, and the error
    assert (
        run(place, [f"run.directory={tmp_path}/run"], capsys)[0] == 0
    )  # nothing was measured: the name is free


@pytest.mark.parametrize(
    ("method", "code", "words"),
    [("report", 2, "Odd.report: expected a dict of numbers, found KeyError: 'lost'"),
     ("shutdown", 0, "Odd.shutdown failed, what it started may still be running: KeyError: 'lost'")],
)  # fmt: skip
def test_an_environment_that_fails_outside_of_episodes_is_one_line(
    method: str,
    code: int,
    words: str,
    place: Place,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the run's own exit code: what fails after the end takes nothing from what was reached."""
    (tmp_path / "odd.py").write_text(
        "from rlflow import Environment, Step, Task\n\n\nclass Odd(Environment):\n    def tasks(self, split):\n"
        "        return [Task('0', 'a?')]\n\n    async def step(self, episode, response):\n"
        f"        return Step(reward=1.0, terminated=True)\n\n    def {method}(self):\n        raise KeyError('lost')\n"
    )
    named = f"environment={{{{name: '{tmp_path}/odd.py:Odd'}}}}"
    found, err = run(place, [f"run.directory={tmp_path}/run", named], capsys)
    said = [
        line for line in err.splitlines() if "no gradient" not in line
    ]  # of a task that is always solved
    assert found == code and len(said) == 1 and words in said[0], err


def _failing(path: Path) -> list[str]:
    (path / "failing.py").write_text(
        "from rlflow import Environment, Task\n\n\nclass Failing(Environment):\n    def tasks(self, split):\n"
        "        return [Task('0', 'a?')]\n\n    async def step(self, episode, response):\n        raise OSError('no network')\n"
    )
    return [f"environment={{{{name: '{path}/failing.py:Failing'}}}}"]


def _small_vocabulary(path: Path) -> Path:
    """A model whose tokenizer knows more tokens than it has embeddings for."""
    model = write_letters_model(path / "model")
    return tiny_model(model, tokenizer=False, vocab_size=4, hidden_size=32, intermediate_size=64)


def test_a_configuration_that_works_does(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistakes above are found in this one, so it has to be sound."""
    code, err = run(place, [f"run.directory={tmp_path}/run"], capsys)
    assert code == 0 and err == ""
    assert REFERENCE in place.config.read_text()
