"""What `rlflow eval --model` takes without a converter of rlflow's own: directories, exports, converters of other packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from rlflow.config.loading import save_config
from rlflow.config.schema import load_config
from rlflow.errors import ConfigError, ConversionError, ExitCode, ModelError
from rlflow.run.checkpoints import Checkpoints
from rlflow.run.origin import CONVERTERS, ModelDirectory, model_directory


class Copying:
    """A converter of checkpoints that hold a file `weights`."""

    @staticmethod
    def check(checkpoint: Path) -> None:
        if not (checkpoint / "weights").is_file():
            raise ConversionError(f"{checkpoint}: has no weights.", ExitCode.MISSING)

    @staticmethod
    def convert(checkpoint: Path, out: Path, reference: Path, say: Callable[[str], None]) -> None:
        out.mkdir()
        (out / "config.json").write_bytes((reference / "config.json").read_bytes())


class Refusing(Copying):
    @staticmethod
    def check(checkpoint: Path) -> None:
        raise ConversionError(f"{checkpoint}: not mine.", ExitCode.UNSUPPORTED)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs these converters, and no others."""

    def install(*names: str) -> None:
        entries = [metadata.EntryPoint(name, f"{__name__}:{name}", CONVERTERS) for name in names]
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: entries if group == CONVERTERS else []
        )

    return install


def resolve(given: Path, reference: Path | None = None) -> ModelDirectory:
    with model_directory(given, reference, print) as model:
        return model


@pytest.fixture
def start(tmp_path: Path) -> Path:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("{}")
    return tmp_path / "start"


def test_directories_and_exports_need_no_converter(
    start: Path, tmp_path: Path, installed: Callable[..., None]
) -> None:
    installed()
    assert resolve(start) == ModelDirectory(start, "start", None)
    run = tmp_path / "run"
    save_config(load_config(None, []), run / "config.yaml")
    start.rename(run / "export")
    assert (
        resolve(run)
        == resolve(run / "export")
        == ModelDirectory(run / "export", "run", run / "config.yaml")
    )


def test_a_checkpoint_without_an_installed_converter_is_one_clear_error(
    tmp_path: Path, installed: Callable[..., None]
) -> None:
    installed()
    with pytest.raises(
        ConfigError,
        match=r"no config\.json, and no installed package converts.*'rlflow\.converters'",
    ):
        resolve(tmp_path)


def test_the_first_converter_that_reads_the_checkpoint_converts_it(
    start: Path, tmp_path: Path, installed: Callable[..., None]
) -> None:
    installed("Refusing", "Copying")
    (tmp_path / "lone").mkdir()
    with pytest.raises(ConversionError, match="not mine"):
        resolve(tmp_path / "lone", start)
    (tmp_path / "lone" / "weights").write_text("")
    assert resolve(tmp_path / "lone", start) == ModelDirectory(tmp_path / "lone.hf", "lone", None)


def test_a_checkpoint_that_is_read_outlives_the_newer_ones(
    start: Path, tmp_path: Path, installed: Callable[..., None]
) -> None:
    installed("Copying")
    saved = Checkpoints(tmp_path / "checkpoints")

    def save(step: int) -> None:
        (saved.begin(step) / "weights").write_text("")
        saved.commit(step, keep=1)

    save(1)
    with model_directory(saved.path(1), start, print) as model:
        save(2)
        assert saved.steps() == [1, 2] and (model.path / "config.json").is_file()
    with model_directory(model.path, None, print):
        save(3)
        assert saved.steps() == [1, 3]
    save(4)
    assert saved.steps() == [4]


def test_rlflows_own_converter_is_installed() -> None:
    (entry,) = metadata.entry_points(group=CONVERTERS, name="megatron")
    converter = entry.load()
    assert callable(converter.check) and callable(converter.convert)


def test_a_lora_adapter_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="a LoRA adapter"), model_directory(tmp_path, None, print):
        pass
