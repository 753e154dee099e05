"""`import rlflow` is light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys, time
import torch, yaml
before, start = set(sys.modules), time.perf_counter()
import rlflow
dir(rlflow)
found = {"seconds": time.perf_counter() - start, "loaded": sorted(set(sys.modules) - before),
         "all": sorted(sys.modules)}
import rlflow.trainer.megatron
print(json.dumps({**found, "with megatron": sorted(sys.modules), "gpu": torch.cuda.is_available()}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What an interpreter of its own says of rlflow's import, and of the trainer's after it."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_needs_torch_and_yaml_only_and_takes_under_a_second_beyond_them(
    found: dict[str, Any],
) -> None:
    packages = {name.split(".")[0] for name in found["loaded"]}
    foreign = packages - {"rlflow"} - set(sys.stdlib_module_names)
    assert not foreign, f"import rlflow loads {sorted(foreign)} beyond torch and yaml"
    heavy = {"megatron", "faiss", "ray", "vllm", "transformers"} & {
        name.split(".")[0] for name in found["all"]
    }
    assert not heavy
    assert found["seconds"] < 1.0


def test_a_command_line_is_read_without_torch() -> None:
    program = "import sys, rlflow.commands.cli as cli; cli.make_parser(); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, (
        done.stderr or "rlflow.commands.cli imports torch: import it where it is used"
    )


def test_on_cpus_megatron_loads_without_the_compiler(found: dict[str, Any]) -> None:
    """Which is a third of the import's time. An optimizer loads dynamo later, and no inductor."""
    loaded = set(found["with megatron"])
    assert found["gpu"] or not {"torch._dynamo", "torch._inductor.compile_fx"} & loaded
    assert "megatron.core" in loaded
