"""Configurations of RLinf and AstraFlow: our recipes have their values, `rlflow train --config THEIRS` tells every key.

The files under foreign/ hold the keys and values of the genuine ones (key by key, without their comments).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlflow.commands.cli import main, parse
from rlflow.commands.eval import asked_evaluation, evaluation_config
from rlflow.config import foreign
from rlflow.config.checks import check_config
from rlflow.config.loading import to_dict
from rlflow.config.schema import RunConfig, load_config
from rlflow.config.yaml_text import read_yaml
from rlflow.errors import ConfigError
from rlflow.run.origin import ModelDirectory

ROOT = Path(__file__).resolve().parents[3]
FILES = Path(__file__).parent / "foreign"
RLINF, RLINF_EVAL, ASTRAFLOW = (
    FILES / name for name in ("rlinf_train.yaml", "rlinf_eval.yaml", "astraflow/experiment.yaml")
)


def translated(path: Path, *overrides: str) -> foreign.Translation:
    theirs = foreign.foreign_file(path)
    assert theirs is not None
    return theirs.translate(overrides)


def told(translation: foreign.Translation, outcome: str) -> dict[str, str]:
    return {key.name: key.told for key in translation.outcomes[outcome]}


def flat(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    entries = (
        dict(enumerate(value))
        if isinstance(value, list) and any(isinstance(item, dict) for item in value)
        else value
    )
    if isinstance(entries, dict) and entries:
        for key, item in entries.items():
            yield from flat(item, (*above, str(key)))
    else:
        yield ".".join(above), value


def differing(theirs: RunConfig, ours: RunConfig) -> set[str]:
    first, second = dict(flat(to_dict(theirs))), dict(flat(to_dict(ours)))
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}


def changed(source: Path, target: Path, **values: Any) -> Path:
    """A copy of a file with other values: {dotted key with __ for dots: value}."""
    content = yaml.safe_load(source.read_text())
    for key, value in values.items():
        *sections, last = key.split("__")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    target.write_text(yaml.safe_dump(content))
    return target


def test_the_searchr1_recipe_differs_from_rlinfs_where_its_comments_say_so() -> None:
    recipe = ROOT / "recipes/searchr1/config/qwen2.5_3b.yaml"
    told_here = {"environment.retriever", "environment.retriever.name", "environment.retriever.urls", "environment.managed",
                 "environment.corpus", "data.val_split",
                     "rollout.engine.max_concurrency", "rollout.engine.transfer"}  # fmt: skip
    of_the_user = {"model.path", "run.name", "environment.train", "environment.val"}
    defaults = {
        "data.curator.shuffle",
        "rollout.engine.arguments.enforce_eager",
    }  # true, and false, without being said
    of_memory = {"trainer.recompute", "trainer.tokens_per_microbatch"}
    translation = translated(RLINF)
    found = differing(translation.config, load_config(recipe))
    assert found == told_here | of_the_user | defaults | of_memory
    assert not told(translation, "not known")
    comments = recipe.read_text()
    for word in (
        "precision",
        "engine",
        "retriever",
        "activations",
        "early_stop_imp_ratio",
        "fp16",
        "SGLang",
        "E5",
        "log-probs",
        "room",
        "unread",
        "validation",
    ):
        assert word in comments


def test_the_asearcher_recipes_differ_from_astraflows_in_where_data_and_retrieval_are() -> None:
    recipe = load_config(ROOT / "recipes/asearcher/config/m2po_delta.yaml")
    places = ("environment.retriever", "environment.managed", "environment.corpus", "environment.pages", "environment.train",
              "environment.val", "environment.reward", "run.name")  # fmt: skip
    found = differing(translated(ASTRAFLOW).config, recipe)
    assert {key for key in found if not key.startswith(places)} == set()
    assert translated(ASTRAFLOW).config.environment["reward"] == {
        "name": recipe.environment["reward"],
        "base": "f1",
    }
    assert (recipe.evaluation.at_start, recipe.trainer.tokens_per_microbatch) == (False, 17408)


@pytest.mark.parametrize("path", [RLINF, RLINF_EVAL, ASTRAFLOW], ids=lambda path: path.stem)
def test_every_key_has_one_outcome_and_none_is_unknown(path: Path) -> None:
    translation = translated(path)
    names = [key.name for keys in translation.outcomes.values() for key in keys]
    beside = path.parent / "raas.yaml"
    assert sorted(names) == sorted(
        key for file in (path, beside) if file.exists() for key, _ in flat(read_yaml(file))
    )
    assert not translation.outcomes["not known"]
    assert all(key.told for keys in translation.outcomes.values() for key in keys)
    check_config(translation.config, components=False)


def test_interpolations_and_arithmetic_of_keys() -> None:
    taken = {
        **told(translated(RLINF), "taken under another name"),
        **told(translated(ASTRAFLOW), "taken under another name"),
    }
    assert taken["algorithm.sampling_params.max_new_tokens"] == "rollout.max_response_tokens: 3000"
    assert taken["actor.lr_sched.lr_warmup_fraction"] == "trainer.schedule.warmup_steps: 188"
    assert taken["trainer_base.train_batch_size"] == "rollout.prompts_per_step: 32"
    assert taken["rollout.max_concurrent_rollouts"] == "rollout.engine.max_concurrency: 64"


def test_what_cannot_be_taken_is_said_with_its_reason(tmp_path: Path) -> None:
    values = {
        "algorithm__kl_beta": 0.01,
        "algorithm__entropy_bonus": 0.001,
        "algorithm__kl_penalty_type": "abs_of_something",
        "runner__max_steps": 40,
        "algorithm__new_idea": 3,
        "rollout__speculative": True,
        "data__train_data_paths": "${oc.env:HOME}",
    }
    translation = translated(changed(RLINF, tmp_path / "theirs.yaml", **values))
    assert (
        translation.config.algorithm.losses[1]["coefficient"] == 0.01
        and translation.config.run.steps == 40
    )
    assert told(translation, "not known") == {
        "algorithm.new_idea": "",
        "rollout.speculative": "",
        "data.train_data_paths": "refers to ${oc.env:HOME}",
    }
    refused = told(translation, "no counterpart")
    assert refused["algorithm.entropy_bonus"] == "always 0.0 here"
    assert refused["algorithm.kl_penalty_type"].startswith("only low_var_kl and ")
    assert refused["actor.model.precision"].endswith("for model.dtype and it is bfloat16")
    assert (
        not translation.config.model.trust_remote_code
        and "actor.tokenizer.trust_remote_code" in refused
    )


def test_a_trainers_own_section_wins_over_the_common_one_and_says_so(tmp_path: Path) -> None:
    path = changed(
        ASTRAFLOW, tmp_path / "experiment.yaml", trainer_model0__actor={"optimizer": {"lr": 1e-6}}
    )
    translation = translated(path)
    assert translation.config.trainer.lr == 1e-6
    assert (
        told(translation, "taken")["trainer_model0.actor.optimizer.lr"]
        == "trainer.lr: 1e-06, in place of 5e-06"
    )


def test_their_training_file_needs_no_validation_questions_of_its_own() -> None:
    assert translated(RLINF).config.data.val_split == "train"
    assert translated(RLINF_EVAL).config.data.val_split == "val"


def test_an_override_of_a_component_drops_what_they_said_of_theirs() -> None:
    assert translated(RLINF, "rollout.engine=embedded").config.rollout.engine == {
        "name": "embedded"
    }


def rlinf_with_fsdp(tmp_path: Path) -> Path:
    """A file in the shape of RLinf's with FSDP in place of Megatron."""
    content = yaml.safe_load(RLINF.read_text())
    content["runner"] |= {"save_interval": -1, "val_check_interval": -1}
    actor = content["actor"]
    for name in ("lr_sched", "megatron", "mcore_gpt", "spec_name"):
        actor.pop(name, None)
    actor |= {"training_backend": "fsdp", "enable_offload": True, "sync_precision": "fp16"}
    actor["model"] = {"precision": "fp32", "model_type": "qwen2.5", "is_lora": False}
    actor["optim"] = {
        "optimizer": "adam",
        "lr": 2e-6,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.25,
        "total_training_steps": 80,
    }
    actor["fsdp_config"] = {
        "strategy": "fsdp2",
        "gradient_checkpointing": False,
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
        "amp_autocast": {"enabled": False},
    }
    path = tmp_path / "fsdp.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_rlinfs_fsdp_file_is_taken_and_minus_one_means_never(tmp_path: Path) -> None:
    translation = translated(rlinf_with_fsdp(tmp_path))
    assert told(translation, "not known") == {}
    config = translation.config
    assert (config.checkpoint.every_steps, config.evaluation.every_steps) == (0, 0)
    assert (config.trainer.backend, config.model.dtype) == ("megatron", "bfloat16")
    assert (config.trainer.lr, config.trainer.recompute) == (2e-6, "none")
    assert config.trainer.schedule == {"name": "cosine", "warmup_steps": 20}
    check_config(config, components=False)


def astraflow_of(tmp_path: Path, **workflow: Any) -> Path:
    """A file in the shape of AstraFlow's recipes whose workflow is this one."""
    content = yaml.safe_load(ASTRAFLOW.read_text())
    dataflow = content["dataflow"]
    dataflow["workflow_spec"] = workflow
    dataflow["rollout_dataset"] = {"dataset_fn": "package.problems:get_train", "max_length": 2000}
    dataflow["eval_workflows"] = {
        "checked": {**workflow, "gconfig_overrides": {"temperature": 0.6}}
    }
    dataflow["eval_datasets"] = {
        "olympiad": {
            "dataset_fn": "package.problems:get_test",
            "repeat": 4,
            "eval_workflow": "checked",
        }
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    (tmp_path / "raas.yaml").write_text("sglang: {context_length: 7168}\n")
    return path


def test_astraflows_mathematics_becomes_a_run_of_mathematics(tmp_path: Path) -> None:
    workflow = {"workflow_cls": "rlvr", "reward_fn": "math_verify", "enable_thinking": False}
    translation = translated(astraflow_of(tmp_path, **workflow))
    config = translation.config
    assert config.environment == {
        "name": "mathematics",
        "train": "data/mathematics/train.jsonl",
        "val": "data/mathematics/val.jsonl",
    }
    assert (config.evaluation.samples_per_prompt, config.evaluation.temperature) == (4, 0.6)
    assert config.rollout.max_total_tokens == 7168 and config.rollout.chat_template
    assert told(translation, "not known") == {}
    check_config(config)


@pytest.mark.parametrize(
    "workflow",
    [
        {"workflow_cls": "alfworld_task_server"},
        {"workflow_cls": "rlvr", "reward_fn": "human_eval_reward"},
    ],
    ids=["other class", "other reward"],
)
def test_a_task_without_a_counterpart_is_refused_by_its_name(
    tmp_path: Path, workflow: dict[str, str]
) -> None:
    path = astraflow_of(tmp_path, **workflow)
    with pytest.raises(ConfigError, match="no counterpart") as refusal:
        translated(path)
    assert all(value in str(refusal.value).partition("found")[2] for value in workflow.values())


def test_eval_reads_theirs_as_train_does_and_its_options_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelDirectory(tmp_path, "mine", None)
    path = changed(RLINF_EVAL, tmp_path / "eval.yaml", runner__new_idea=3, algorithm__group_size=2)
    words = ["eval", "--config", str(path), "--model", str(tmp_path)]
    args = parse([*words, "rollout.engine=embedded"])
    config = evaluation_config(args, model)
    expected = translated(path, "rollout.engine=embedded").config
    expected.model.path = str(tmp_path)
    assert config == expected
    err = capsys.readouterr().err
    assert "a configuration of RLinf" in err and "not known: runner.new_idea" in err
    asked = asked_evaluation(args, config.evaluation)
    assert (asked.questions, asked.samples_per_prompt, asked.temperature) == (1000, 2, 1.0)
    args = parse([*words, "--temperature", "0", "--samples", "3", "--questions", "5"])
    asked = asked_evaluation(args, config.evaluation)
    assert (asked.questions, asked.samples_per_prompt, asked.temperature) == (5, 3, 0.0)


def test_eval_of_a_run_is_greedy_whatever_the_run_evaluates_with(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("evaluation: {temperature: 0.7, samples_per_prompt: 8, questions: 3}\n")
    args = parse(["eval", "--config", str(path), "--model", str(tmp_path)])
    asked = asked_evaluation(args, load_config(path).evaluation)
    assert (asked.questions, asked.samples_per_prompt, asked.temperature) == (None, 1, 0.0)


def test_a_value_of_another_type_is_named_with_the_file(tmp_path: Path) -> None:
    path = changed(RLINF, tmp_path / "theirs.yaml", actor__optim__lr="fast")
    with pytest.raises(
        ConfigError, match=r"theirs\.yaml, read as RLinf's: .*trainer\.lr: expected"
    ):
        translated(path)


@pytest.mark.parametrize(
    "bomb",
    [
        {f"k{n}": f"${{bomb.k{n + 1}}}${{bomb.k{n + 1}}}" for n in range(60)} | {"k60": "xx"},
        {f"k{n}": [f"${{bomb.k{n + 1}}}"] * 9 for n in range(60)} | {"k60": "xx"},
        {"k0": "${bomb.k1}", "k1": "${bomb.k0}"},
        {"k0": "${" * 50_000},
    ],
    ids=["text", "lists", "circle", "open"],
)
def test_references_to_references_cost_no_time(tmp_path: Path, bomb: dict[str, Any]) -> None:
    path = changed(RLINF, tmp_path / "theirs.yaml", bomb=bomb, runner__experiment_name="${bomb.k0}")
    started = time.process_time()
    assert "refers to" in told(translated(path), "not known").get(
        "runner.experiment_name", "refers to"
    )
    assert time.process_time() - started < 3


def test_aliases_of_aliases_are_left_to_the_reader_of_our_files(tmp_path: Path) -> None:
    lines = [
        "a0: &a0 {x: 1}",
        *(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)),
    ]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    (tmp_path / "self.yaml").write_text("a: &a {b: *a}")
    assert (
        foreign.foreign_file(tmp_path / "bomb.yaml") is None
        and foreign.foreign_file(tmp_path / "self.yaml") is None
    )


def test_our_own_files_are_ours() -> None:
    for path in ROOT.glob("recipes/*/config/*.yaml"):
        assert foreign.foreign_file(path) is None


def test_the_command_writes_a_file_that_means_the_same_and_says_how_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FILES, "theirs")
    assert (
        main(["train", "--config", "theirs/rlinf_train.yaml", "run.name=mine", "run.steps=7"]) == 0
    )
    out = capsys.readouterr().out
    assert (
        "algorithm.group_size: 4  ->  rollout.samples_per_prompt: 4" in out
        and "not known: 0" in out
    )
    assert "train --config runs/mine.yaml" in out and not Path("runs/mine").exists()
    assert Path("runs/mine.yaml").stat().st_mode & 0o777 == 0o600, "theirs may hold a key"
    ours = load_config("runs/mine.yaml")
    assert ours == translated(RLINF, "run.name=mine", "run.steps=7").config and ours.run.steps == 7
    assert (
        main(["train", "--config", "theirs/rlinf_train.yaml", "run.name=mine", "run.steps=8"]) == 2
    )
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert main(["train", "--config", "runs/mine.yaml", "--out", "x.yaml"]) == 2
    assert "--out: only for" in capsys.readouterr().err
    Path("eval.yaml").write_bytes(b"\xff")
    assert main(["train", "--config", "theirs/rlinf_eval.yaml", "--out", "eval.yaml"]) == 2
    spaced = ["train", "--config", "theirs/rlinf_eval.yaml", "--out", "my eval.yaml"]
    assert main(spaced) == 0 and "--config 'my eval.yaml' --model" in capsys.readouterr().out
    spaced[-1:] = ["eval.yaml", "--overwrite"]
    assert main(spaced) == 0
    assert (
        "eval --config eval.yaml --model /path/to/eval/model --temperature 1 --samples 1 --questions 1000"
        in capsys.readouterr().out
    )
