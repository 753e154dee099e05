"""What errors tell the user to do."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from rlflow import errors
from rlflow.errors import did_you_mean, install_command

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_is_installed_again_from_where_it_is() -> None:
    assert install_command("search") == f"pip install -e '{ROOT}[search]'"
    assert install_command() == f"pip install -e '{ROOT}'"


def test_transformer_engine_is_built_against_the_installed_torch() -> None:
    tools, command = install_command("gpu").split(" && ")
    assert tools == "pip install 'cuda-toolkit[crt,cccl]' setuptools wheel ninja"
    setting, command = command.split(" ", 1)
    assert setting == "NVTE_BUILD_USE_NVIDIA_WHEELS=1"
    assert (
        command
        == f"pip install --no-build-isolation -e '{ROOT}[gpu]' -c '{ROOT}/constraints/gpu.txt'"
    )


@pytest.mark.parametrize(
    ("noted", "source"),
    [
        (
            {"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "c"}},
            "git+https://host/x.git",
        ),
        ({"url": "file:///wheels/rlflow-0.1.0.whl"}, "file:///wheels/rlflow-0.1.0.whl"),
        (None, "PATH_OR_GIT_URL"),
    ],
)
def test_an_installed_package_is_installed_from_its_source_and_never_by_its_bare_name(
    noted: dict[str, object] | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noted:
        def read_text(self, name: str) -> str | None:
            return json.dumps(noted) if noted and name == "direct_url.json" else None

    monkeypatch.setattr(errors, "__file__", str(tmp_path / "rlflow" / "errors.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Noted())
    assert install_command("ray") == f"pip install 'rlflow[ray] @ {source}'"


def test_of_equally_close_words_that_with_the_same_letters_is_meant() -> None:
    assert did_you_mean("gpro", ["gspo", "grpo", "ppo"]) == " Did you mean 'grpo'?"
    assert did_you_mean("train", ["trian", "strain"]) == " Did you mean 'trian'?"
    assert did_you_mean("xyz", ["grpo"]) == ""
