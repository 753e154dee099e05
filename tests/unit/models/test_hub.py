"""A model by its name on the hub, against a local server that speaks what huggingface_hub asks a hub, and against the cache that
huggingface_hub wrote. The library reads its variables once, so each claim has a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.errors import ConfigError
from rlflow.models.hub import is_hub_name
from tests.fixtures import tiny_model
from tests.unit.recipes.hub_stub import COMMIT, Hub, served

ROOT = Path(__file__).resolve().parents[3]
NAME = "Someone/Tiny-1.5B-Instruct"
PROGRAM = """
import sys
from rlflow.errors import ModelError
from rlflow.models.hub import local_model
try:
    found = local_model(sys.argv[1], weights=sys.argv[2] == "weights")
except ModelError as problem:
    sys.exit(f"ModelError: {problem}")
print(found.path, *found.notes, sep="\\n")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model in two files of weights, with what else lies in such repositories."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_model(folder)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink()
    others = {
        "README.md": b"read me",
        "consolidated.safetensors": b"x" * 100,
        "pytorch_model.bin": b"x",
        "modeling.py": b"import os",
    }
    return {**{file.name: file.read_bytes() for file in folder.iterdir()}, **others}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with served(Hub({NAME: files})) as state:
        yield state


def ask(
    name: str, home: Path, endpoint: str, what: str = "weights", offline: str = "0"
) -> subprocess.CompletedProcess[str]:
    variables = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run([sys.executable, "-c", PROGRAM, name, what], env={**os.environ, **variables}, cwd=ROOT,
                          capture_output=True, text=True, timeout=120)  # fmt: skip


def test_only_what_is_needed_is_fetched_and_only_once(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    done = ask(NAME, tmp_path, hub.endpoint)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == COMMIT and folder.is_relative_to(tmp_path)
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    weights = set(json.loads(files["model.safetensors.index.json"])["weight_map"].values())
    assert (
        len(weights) > 1
        and weights <= found.keys()
        and {"config.json", "tokenizer.json"} <= found.keys()
    )
    assert all(found[name] == files[name] for name in found)
    assert (
        not {"README.md", "consolidated.safetensors", "pytorch_model.bin", "modeling.py"}
        & found.keys()
    )
    assert "%" in done.stderr  # a progress bar
    fetched = len(hub.sent)
    assert (
        ask(f"{NAME}@main", tmp_path, hub.endpoint).stdout == done.stdout
        and len(hub.sent) == fetched
    )


def test_without_weights_the_small_files_are_fetched_and_the_rest_is_told(
    hub: Hub, tmp_path: Path
) -> None:
    done = ask(NAME, tmp_path, hub.endpoint, "small")
    assert done.returncode == 0, done.stderr
    path, note = done.stdout.splitlines()
    assert (
        not list(Path(path).glob("*.safetensors"))
        and "weight file(s) of Someone/Tiny-1.5B-Instruct are not in the cache yet" in note
    )


def test_what_is_cached_is_found_without_a_network(hub: Hub, tmp_path: Path) -> None:
    path = ask(NAME, tmp_path, hub.endpoint).stdout
    for endpoint, offline in (("http://127.0.0.1:9", "0"), (hub.endpoint, "1")):
        done = ask(NAME, tmp_path, endpoint, offline=offline)
        assert (done.returncode, done.stdout) == (0, path), done.stderr


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_one_line_names_both_ways_out(tmp_path: Path, offline: str) -> None:
    done = ask(NAME, tmp_path, "http://127.0.0.1:9", offline=offline)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and line.startswith(
        "ModelError: model.path: Someone/Tiny-1.5B-Instruct: no directory of that name here"
    )
    for way in ("--model DIR", "HF_ENDPOINT=", "HF_HOME=", "HF_HUB_OFFLINE=1"):
        assert way in line
    assert ("HF_HUB_OFFLINE is set" in line) == (offline == "1")


def test_a_name_that_the_hub_does_not_have_is_one_line(hub: Hub, tmp_path: Path) -> None:
    done = ask("Nobody/Nothing", tmp_path, hub.endpoint)
    assert (
        done.returncode == 1
        and "does not have it, or shows it to some accounts only" in done.stderr
    )


def test_a_repository_without_safetensors_is_refused(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    pickled = {name: content for name, content in files.items() if "safetensors" not in name}
    with served(Hub({NAME: pickled})) as hub:
        done = ask(NAME, tmp_path, hub.endpoint)
    assert (
        done.returncode == 1 and "only models with safetensors weights can be read" in done.stderr
    )


@pytest.mark.parametrize(
    "given", ["Qwen/Qwen2.5-1.5B-Instruct", "a/b@main", "mistralai/Mistral-7B-v0.3@abc123"]
)
def test_names_of_the_hub_are_recognised(given: str) -> None:
    assert is_hub_name(given)


@pytest.mark.parametrize(
    "given",
    ["", "Qwen2.5", "/abs/olute", "./a", "../a/b", "a/b/c", "~/x", "rlflow/models", "a/", "a b/c"],
)
def test_paths_are_not(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert not is_hub_name(given)


def test_a_directory_that_is_missing_is_still_an_error_of_the_option() -> None:
    from rlflow.commands.arguments import option_overrides
    from tests.unit.commands.test_cli import train_arguments

    assert option_overrides(train_arguments("--model", "Qwen/Qwen3-0.6B"), "train") == [
        "model.path='Qwen/Qwen3-0.6B'"
    ]
    with pytest.raises(ConfigError, match="no such file or directory"):
        option_overrides(train_arguments("--model", "/no/such/model"), "train")
