"""Configuration: what YAML and overrides mean, and what every mistake says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from rlflow.config.loading import config_keys, config_text, load_config, save_config, to_dict
from rlflow.config.schema import RunConfig
from rlflow.config.schema import load_config as load_run_config
from rlflow.errors import ConfigError
from rlflow.storage.redaction import redact, redact_text
from rlflow.trainer.options import TrainerOptions


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def error_of(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_file_and_no_override_is_the_defaults() -> None:
    assert load_run_config() == RunConfig()


def test_files_merge_over_their_bases_and_overrides_over_files(tmp_path: Path) -> None:
    write(
        tmp_path / "root.yaml",
        "trainer: {lr: 1e-3, max_gradient_norm: 0.5, logits_chunk_mib: 1e-7}\nrun: {name: root}\n",
    )
    (tmp_path / "sub").mkdir()
    write(
        tmp_path / "sub" / "middle.yaml",
        "base: ../root.yaml\ntrainer: {max_gradient_norm: 0.6, logits_chunk_mib: 1e-6}\n",
    )
    top = write(tmp_path / "top.yaml", "base: sub/middle.yaml\ntrainer: {logits_chunk_mib: 1e-5}\n")
    config = load_run_config(top, ["trainer.logits_chunk_mib=1e-4"])
    trainer = config.trainer
    assert (trainer.lr, trainer.max_gradient_norm, trainer.logits_chunk_mib, config.run.name) == (
        1e-3,
        0.6,
        1e-4,
        "root",
    )


def test_a_preset_replaces_the_algorithm_of_a_file_and_overrides_go_over_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "algorithm: {losses: [sft], minibatches_per_step: 4, epochs_per_step: 3}\ntrainer: {lr: 0.5}\n"
    )
    config = load_config(
        tmp_path / "mine.yaml", ["algorithm.losses.0.clip_high=0.3"], RunConfig, preset="grpo"
    )
    assert [loss["name"] for loss in config.algorithm.losses] == ["ppo_clip", "kl"]
    assert config.algorithm.losses[0] == {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3}
    assert (
        config.algorithm.minibatches_per_step,
        config.algorithm.epochs_per_step,
        config.trainer.lr,
    ) == (1, 1, 0.5)


def test_a_file_may_be_based_on_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: preset:grpo\nalgorithm: {epochs_per_step: 3}\n")
    section = load_config(tmp_path / "mine.yaml", [], RunConfig).algorithm
    assert (section.losses[1]["name"], section.epochs_per_step, section.aggregate) == (
        "kl",
        3,
        {"name": "trajectory_mean"},
    )
    (tmp_path / "mine.yaml").write_text("base: preset:grop\n")
    with pytest.raises(
        ConfigError, match=r"mine.yaml: base: unknown preset 'grop'. Did you mean 'grpo'"
    ):
        load_config(tmp_path / "mine.yaml", [], RunConfig)


def test_bases_that_lead_in_a_circle_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "leads back" in error_of(file=tmp_path / "a.yaml")


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", ".000001", "+1e-6"])
def test_every_spelling_of_a_small_float_is_that_float(text: str) -> None:
    config = load_run_config(None, [f"trainer.lr={text}", f"environment.rate={text}"])
    assert config.trainer.lr == 1e-6 and config.environment["rate"] == 1e-6


def test_whole_numbers_become_floats_where_floats_belong_and_nowhere_else() -> None:
    config = load_run_config(None, ["trainer.lr=1"])
    assert config.trainer.lr == 1.0 and isinstance(config.trainer.lr, float)
    assert "expected a whole number above 0, found 2.0 (number)" in error_of(
        "rollout.max_turns=2.0"
    )


@pytest.mark.parametrize("value", ["yes", "1", "'true'", "null"])
def test_booleans_are_true_or_false_only(value: str) -> None:
    assert "run.resume: expected true or false" in error_of(f"run.resume={value}")


def test_whole_numbers_are_decimal() -> None:
    """As YAML 1.2 says; with a leading 0 they were octal in 1.1."""
    config = load_run_config(
        None, ["run.steps=0100", "run.seed=08", "data.max_prompt_tokens=1_000"]
    )
    assert (config.run.steps, config.run.seed, config.data.max_prompt_tokens) == (100, 8, 1000)
    assert "expected an index below 1, found '²'" in error_of("algorithm.losses.².clip=1")


def test_a_boolean_is_not_a_number() -> None:
    assert "found true" in error_of("rollout.max_turns=true")
    assert "found true" in error_of("trainer.lr=true")


def test_overrides_reach_into_components_and_lists() -> None:
    config = load_run_config(
        None,
        ["environment.reader.top_k=5", "environment.name=search", "algorithm.losses.0.clip_low=.1"],
    )
    assert config.environment == {"name": "search", "reader": {"top_k": 5}}
    assert config.algorithm.losses == [{"name": "ppo_clip", "clip_low": 0.1}]
    assert "algorithm.losses' is a list of 1" in error_of("algorithm.losses.1.x=1")


def test_another_component_name_drops_the_keywords_of_the_first_in_any_order(
    tmp_path: Path,
) -> None:
    file = write(tmp_path / "c.yaml", "environment: {name: search, corpus: c.jsonl}\n")
    for overrides in (
        ["environment.name=guess", "environment.highest=3"],
        ["environment.highest=3", "environment.name=guess"],
    ):
        assert load_run_config(file, overrides).environment == {"name": "guess", "highest": 3}
    assert load_run_config(file, ["environment.name=search"]).environment == {
        "name": "search",
        "corpus": "c.jsonl",
    }


def test_a_bare_name_is_a_component_everywhere(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        "environment: guess\nalgorithm: {advantage: rloo, losses: [sft, {name: kl, clamp: 3}]}\n",
    )
    config = load_run_config(
        file,
        ["rollout.engine=other", "algorithm.losses.0=ppo_clip", "algorithm.losses.0.clip_low=.1"],
    )
    assert config.environment == {"name": "guess"} and config.rollout.engine == {"name": "other"}
    assert config.algorithm.advantage == {"name": "rloo"}
    assert config.algorithm.losses == [
        {"name": "ppo_clip", "clip_low": 0.1},
        {"name": "kl", "clamp": 3},
    ]
    for overrides in (
        ["environment=new", "environment.highest=3"],
        ["environment.highest=3", "environment=new"],
    ):
        assert load_run_config(file, overrides).environment == {"name": "new", "highest": 3}
    for override in ("algorithm.losses=[sft]", "algorithm.losses=sft"):
        assert load_run_config(file, [override]).algorithm.losses == [{"name": "sft"}]


def test_a_run_name_is_no_component_name() -> None:
    assert load_run_config(None, ["run.seed=3", "run.name=other"]).run.seed == 3


def test_defaults_are_not_shared_between_configurations() -> None:
    load_run_config(None, ["algorithm.losses.0.clip_low=.1", "environment.top_k=5"])
    assert load_run_config() == RunConfig()


def test_null_is_allowed_where_a_key_is_optional_only() -> None:
    assert load_run_config(None, ["run.max_minutes=null"]).run.max_minutes is None
    assert "found null" in error_of("run.steps=null")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.lrr=1", "trainer.lrr: unknown key. Did you mean 'trainer.lr'?"),
        ("trainner.lr=1", "Did you mean 'trainer'?"),
        ("lr=1", "Did you mean 'trainer.lr'?"),
        ("rollout.lr=1", "Did you mean 'trainer.lr'?"),
        ("rollout.temprature=1", "Did you mean 'rollout.temperature'?"),
        ("rollout.qqq=1", "Known keys of rollout: engine, prompts_per_step"),
        (
            "rollout.max_turns=four",
            "rollout.max_turns: expected a whole number above 0, found 'four' (text)",
        ),
        ("metrics.sinks=3", "metrics.sinks: expected a list"),
        ("trainer=3", "trainer: expected a section with keys, found 3"),
        ("rollout.max_turns", "expected section.key=value, found 'rollout.max_turns'"),
        ("trainer.lr.x=1", "'trainer.lr' is 1e-06 (number), it has no keys"),
        ("trainer.lr=[", "is not a YAML value"),
        ("trainer.lr=" + "[" * 600 + "]" * 600, "nested too deeply"),
        ("trainer.lr=" + "9" * 5000, "is not a YAML value"),
        (
            "trainer.lr_schedule=cosine",
            "trainer.lr_schedule: unknown key. Did you mean 'trainer.schedule'?",
        ),
        ("trainer.lr_warmup_steps=5", "Did you mean 'trainer.schedule.warmup_steps'?"),
        ("trainer.min_lr=1e-7", "Did you mean 'trainer.schedule.min_lr'?"),
        ("trainer.beta2=0.9", "Did you mean 'trainer.optimizer.beta2'?"),
        ("trainer.offload_optimizer=true", "Did you mean 'trainer.optimizer'?"),
        ("metrics.tensorboard=true", "Did you mean 'metrics.sinks'?"),
        ("metrics.wandb_project=x", "Did you mean 'metrics.sinks'?"),
        ("evaluation.steps=3", "Did you mean 'evaluation.every_steps'?"),
        ("rollout.max_observation_tokens=a", "expected a whole number above 0 or null"),
    ],
)
def test_mistakes_say_where_what_and_how(override: str, expected: str) -> None:
    message = error_of(override)
    assert message.startswith("command line: ") and expected in message


def test_mistakes_in_files_name_the_file_that_holds_them(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "rollout: {max_turns: many}\n")
    top = write(tmp_path / "top.yaml", "base: base.yaml\ntrainer: {lr: 1}\n")
    assert error_of(file=top).startswith(
        f"{tmp_path / 'base.yaml'}: rollout.max_turns: expected a whole number"
    )
    assert "demo.yaml: no such configuration file. Did you mean 'demos.yaml'?" in error_of(
        file=write(tmp_path / "demos.yaml", "").with_name("demo.yaml")
    )
    assert f"{top}:3: not YAML: key 'lr' stands twice" in error_of(
        file=write(top, "trainer:\n  lr: 1\n  lr: 2\n")
    )
    assert "expected sections" in error_of(file=write(top, "- 1\n"))
    for value in ("!!bool x", '!!float ""', "!!timestamp x"):
        assert "does not fit its tag" in error_of(file=write(top, f"run: {{name: {value}}}\n"))


def test_saved_configuration_loads_to_the_same(tmp_path: Path) -> None:
    overrides = [
        "trainer.lr=1e-7",
        "environment={name: x, list: [1, {a: é}], none: null}",
        "run.target=0.5",
    ]
    config = load_run_config(None, overrides)
    save_config(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_secrets_are_redacted_and_look_alikes_are_not() -> None:
    secret = {
        "api_key": "k",
        "hf_token": "t",
        "nested": [{"db_password": "p"}],
        "url": "https://me:pw@host/x",
        "secret": "s",
        "secret_key": "s",
        "api_keys": ["k", "l"],
        "query": "https://host/x?hf_token=t&top=3&api-key=k#part",
        "redis": "redis://:pw@host/0",
    }
    plain = {
        "max_tokens": 5,
        "eos_token": "</s>",
        "tokenizer": "path",
        "token_budget": 3,
        "monkey": "m",
        "url": "http://host:80/x?topk=3&format=json#part",
    }
    text = config_text({"a": secret, "b": plain})
    shown = yaml.safe_load(text)
    assert shown["b"] == plain
    assert shown["a"] == {"api_key": "***", "hf_token": "***", "nested": [{"db_password": "***"}],
                          "url": "https://***@host/x", "secret": "***", "secret_key": "***",
                          "api_keys": ["***", "***"], "query": "https://host/x?hf_token=***&top=3&api-key=***#part",
                          "redis": "redis://***@host/0"}  # fmt: skip
    assert redact({"api_key": None}) == {"api_key": None}


@pytest.mark.parametrize(
    "key",
    ["openai_key", "pwd", "Cookie", "bearer", "jwt", "apikey", "X-Api-Key", "wandb-key", "db_pwd", "auth", "x-auth", "pass",
     "openaiApiKey", "sig", "authToken", "OPENAI_API_KEY", "dbPass", "sessionCookie", "passwordOfMine", "hmac-signature"],
)  # fmt: skip
def test_whatever_is_called_a_secret_is_one(key: str) -> None:
    assert redact({key: "s3cret"}) == {key: "***"}
    assert redact({key: {"a": ["s3cret", 1234, None, True]}}) == {
        key: {"a": ["***", "***", None, True]}
    }


def test_every_header_is_a_secret_but_for_those_that_are_known() -> None:
    headers = {
        "auth": "a",
        "x-auth": "b",
        "pass": "c",
        "openaiApiKey": "d",
        "sig": "e",
        "X-Made-Up": "f",
        "Accept": "text/html",
    }
    shown = {**dict.fromkeys(headers, "***"), "Accept": "text/html"}
    for key in ("headers", "extra_headers", "defaultHeaders", "header"):
        assert redact({key: headers}) == {key: shown}
    assert redact({"headers": ["X-A: s3cret", ["X-B", "s3cret"]]}) == {
        "headers": ["***", ["***", "***"]]
    }


@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "a://" * 10**5, "://@" * 10**5, "?a=" * 10**5 + "://", "x:" * 10**5, "#" * 10**6],
)
def test_a_long_text_costs_no_more_than_its_length(text: str) -> None:
    began = time.process_time()
    redact_text(text)
    assert time.process_time() - began < 2.0


def test_what_may_hold_a_secret_is_for_its_user_alone(tmp_path: Path) -> None:
    save_config(RunConfig(), tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "key",
    ["key", "question_key", "answer_key", "cache_key", "keyword", "bearers_name", "api_key_variable", "questionKey", "key_file",
     "eosToken", "tokenizer", "token_budget", "passage", "passages", "author"],
)  # fmt: skip
def test_names_of_columns_are_no_secrets(key: str) -> None:
    assert redact({key: "question"}) == {key: "question"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://hf_s3cret@host/x", "https://***@host/x"),
        ("http://host/search?key=s3cret&top=3", "http://host/search?key=***&top=3"),
        ("http://host/search?api-key=s3cret", "http://host/search?api-key=***"),
        ("http://host/x?sig=s3cret&made_up=s3cret", "http://host/x?sig=***&made_up=***"),
        ("http://host/x?s3cret", "http://host/x?***"),
        ("http://host/x#access_token=s3cret", "http://host/x#access_token=***"),
        ("cannot reach http://me:s3cr@et@host:80/x", "cannot reach http://***@host:80/x"),
        ("redis://:s3cret@host/0 and http://u:s3cret@h", "redis://***@host/0 and http://***@h"),
        ("http://u:s3cret@h,http://v:s3cret@h", "http://***@h,http://***@h"),
        ("Authorization: Basic dTpwYXNz", "Authorization: Basic ***"),
        ("{'authorization': 'Token s3cret'}", "{'authorization': 'Token ***'}"),
        ("Which? a=b&c=d", "Which? a=b&c=d"),
        ("Authorization: Bearer abcdef0123456789", "Authorization: Bearer ***"),
        (
            "mail me@host or see http://host:80/x, ssh://git@host",
            "mail me@host or see http://host:80/x, ssh://git@host",
        ),
    ],
)
def test_secrets_in_texts_are_not_shown(text: str, shown: str) -> None:
    assert redact_text(text) == shown and redact({"text": text}) == {"text": shown}


def test_keys_cover_every_section() -> None:
    keys = config_keys(RunConfig)
    assert {key.split(".")[0] for key in keys} == set(to_dict(RunConfig()))
    assert "algorithm.losses" in keys and "environment" in keys and len(keys) == len(set(keys))


def test_any_dataclass_is_a_schema() -> None:
    assert load_config(None, ["lr=2"], TrainerOptions) == TrainerOptions(lr=2.0)
