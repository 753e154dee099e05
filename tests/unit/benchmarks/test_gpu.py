"""benchmarks/gpu/run.py: without a GPU it says so and ends well; its sections work, tried with tiny shapes on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str, timeout_s: float = 60) -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run.py"), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    lines = done.stdout.strip().splitlines()
    return done.returncode, done.stdout, json.loads(lines[-1]) if lines else {"results": done.stderr}


def test_without_a_gpu_every_line_says_so_and_the_exit_code_is_0() -> None:
    code, out, found = run()
    assert code == 0 and found["gpu"] is None and "no GPU" in out
    assert len(found["results"]) > 12
    assert all(
        not result["rows"] and result["skipped"] == "no NVIDIA GPU that torch sees" for result in found["results"]
    )


@pytest.mark.slow
def test_every_section_works_on_tiny_shapes() -> None:
    code, _, found = run("--device", "cpu", "--quick", timeout_s=290)
    assert code == 0
    by_name = {result["name"]: result for result in found["results"]}
    assert not [name for name, result in by_name.items() if result["skipped"].startswith("failed")], by_name
    gap = next(row for row in by_name["sync and gap"]["rows"] if row["unit"] == "nats")
    assert gap["largest"] < 1e-4  # float32 on both sides
    train = by_name["train tiny local"]["rows"][0]
    assert train["figure"] > 0 and train["utilization"] > 0
    assert by_name["train tiny te"]["skipped"] == "not installed: transformer_engine"
    assert by_name["decode embedded"]["rows"][0]["unit"] == "tokens/s"
    assert by_name["retrieval torch"]["rows"][0]["found_itself"] == 1.0
    assert by_name["GPU tests"]["skipped"] == "they need a GPU"
