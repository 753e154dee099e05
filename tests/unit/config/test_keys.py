"""Keys are found in the terminal, and under the names that other libraries give them."""

from __future__ import annotations

import pytest

from rlflow.commands import cli
from rlflow.config.keys import FIELD_NAMES, described_keys
from rlflow.config.loading import config_keys
from rlflow.config.schema import RunConfig, load_config
from rlflow.errors import ConfigError

KEYS = list(described_keys(RunConfig))


def test_every_key_is_described_and_has_its_default() -> None:
    names = [key.name for key in KEYS]
    assert names == config_keys(RunConfig) and len(names) == len(set(names))
    assert {"rollout.faults.call_s", "algorithm.critic.lr", "trainer.lora.rank"} <= set(names)
    assert not [key.name for key in KEYS if not (key.meaning or key.kind)]
    found = {key.name: key for key in KEYS}
    assert (found["trainer.lr"].default, found["trainer.lr"].type) == (1e-6, "a number above 0")
    assert found["rollout.asynchronous.max_staleness"].default == 0


@pytest.mark.parametrize("other", FIELD_NAMES)
def test_another_librarys_name_leads_to_a_key_that_is_there(other: str) -> None:
    ours = FIELD_NAMES[other]
    assert any(ours.partition("=")[0].startswith(key.name) for key in KEYS)
    if "=" in ours:
        load_config(None, [ours])
    for section in ("", "trainer.", "rollout."):
        with pytest.raises(ConfigError) as told:
            load_config(None, [f"{section}{other}=1"])
        assert f"Did you mean '{ours}'?" in str(told.value)


def test_keys_are_searched_by_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def found(*word: str) -> str:
        assert cli.main(["config", *word]) == 0
        return capsys.readouterr().out

    assert found("learning_rate").startswith(
        "trainer.lr=1e-06\n    learning rate of the optimizer; a number above 0"
    )
    assert "ppo_clip: clip_high" in found(
        "clip_high"
    ) and "rollout.samples_per_prompt=8\n" in found("num_generations")
    everything = found()
    assert all(f"{key.name}=" in everything for key in KEYS)
    wide = [line for line in everything.splitlines() if len(line) > 80]
    assert not [line for line in wide if line.startswith(" ")], (
        "what is told is wrapped; a default stands in one line"
    )
    with pytest.raises(SystemExit):
        cli.main(["train", "--learning-rate", "1e-4"])
    assert "Did you mean 'trainer.lr'?" in capsys.readouterr().err
