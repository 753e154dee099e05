"""`import rlflow` is light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys, time
import torch, yaml
before, start = set(sys.modules), time.perf_counter()
import rlflow
dir(rlflow)
print(json.dumps({"seconds": time.perf_counter() - start, "loaded": sorted(set(sys.modules) - before),
                  "all": sorted(sys.modules)}))
"""


def report() -> dict:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_needs_torch_and_yaml_only_and_takes_under_a_second_beyond_them() -> None:
    found = report()
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


def test_on_cpus_megatron_loads_without_the_compiler() -> None:
    """Which is a third of the import's time. An optimizer loads dynamo later, and no inductor."""
    program = "import sys, torch, rlflow.trainer.megatron; print([torch.cuda.is_available(), *sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    on_gpu, *loaded = ast.literal_eval(done.stdout)
    assert on_gpu or not {"torch._dynamo", "torch._inductor.compile_fx"} & set(loaded)
    assert "megatron.core" in loaded
