"""Whose a run is: code that a stranger's configuration names does not run unasked."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from rlflow.commands import cli
from rlflow.commands.eval import evaluation_config
from rlflow.config.loading import save_config
from rlflow.errors import ConfigError
from rlflow.run.model_directory import ModelDirectory
from rlflow.run.origin import ORIGIN, is_own, mark_own
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
    save_config(letters_config(tmp_path, tmp_path, named, "model.trust_remote_code=true"), run / "config.yaml")
    return run / "config.yaml"


def chosen(config: Path, *overrides: str, allow_code: bool = False) -> object:
    given = {"config": None, "data": None, "env": None, "allow_code": allow_code, "overrides": list(overrides)}
    options = dict.fromkeys(vars(cli.parse(["eval", "--model", "x"]))) | given
    return evaluation_config(argparse.Namespace(**options), ModelDirectory(config.parent / "export", "run", config))


def test_a_strangers_run_shows_the_code_that_it_asks_for_and_needs_a_flag(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (config.parent / "export", config.parent):
        assert cli.main(["eval", "--model", str(given)]) == 2
        said = capsys.readouterr().err
        assert "evil.py:Evil" in said and "environment.reward = other:Thing" in said and "--allow-code" in said
        assert "model.trust_remote_code = True" in said and len(said.splitlines()) == 1 and not (tmp_path / "ran").exists()
    assert cli.main(["eval", "--model", str(config.parent), "--allow-code"]) == 2  # it holds no Evil
    assert (tmp_path / "ran").exists()


def test_a_run_of_this_user_needs_no_flag_until_it_is_changed(config: Path, tmp_path: Path) -> None:
    mark_own(config)
    assert is_own(config) and chosen(config)
    shutil.copytree(config.parent, tmp_path / "copy")
    assert is_own(tmp_path / "copy" / "config.yaml")
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ConfigError, match="--allow-code"):
        chosen(config)


def test_nobody_can_mark_a_run_for_another_user(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_code_that_the_user_names_is_the_users(config: Path) -> None:
    mine = [f"environment.name={config.parent}/evil.py:Evil", "environment.reward=em", "model.trust_remote_code=false"]
    assert chosen(config, *mine)
    with pytest.raises(ConfigError, match=r"your rights: environment\.reward = other:Thing\. Read"):
        chosen(config, mine[0], mine[2])
    assert chosen(config, "environment=mine", mine[2])  # another component: what the first one's keywords named is gone
