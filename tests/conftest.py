"""What every test runs under: one thread per process, no hub, GPU tests skipped where there is no GPU."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

# Set before torch is imported, and inherited by the ranks that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a download is a mistake
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if (
    "XDG_STATE_HOME" not in os.environ
):  # runs mark what they write with a key of the user's; not of who runs the tests
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rlflow-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# A shell starts background jobs with SIGINT ignored, which Python and its children inherit; the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """What a test leaves in the place of Ctrl-C would end, or not end, the tests after it; it may give back what a fixture
    of its module took."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in usual}
    yield
    left = {number: signal.getsignal(number) for number in usual}
    assert all(left[number] in (before[number], usual[number]) for number in usual), (before, left)


MATRICES = (
    "dist/test_layouts.py", "dist/test_kernels.py", "dist/test_lora.py", "dist/test_critic.py", "dist/test_teacher_layouts.py",
    "dist/test_resume_layouts.py", "dist/test_convert_matrix.py", "dist/test_convert_uneven.py", "dist/test_convert_versions.py",
    "flow/test_presets.py", "unit/trainer/test_experts.py", "unit/trainer/test_balancing.py", "unit/tools/test_convert_legacy.py",
    "unit/tools/test_convert_logits.py",
)  # fmt: skip
"""Whose slow tests hold the claims of the fast ones in every layout, family, preset or version: `run.sh --matrix`."""


def pytest_collection_finish() -> None:
    """What is imported by now stays: every collection would look through it, 0.4 s each time. A run of a test freezes nothing
    beside it, nor gives it back."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the slow tests of MATRICES; skips the tests marked `gpu` where torch sees no GPU."""
    for item in items:
        if item.get_closest_marker("slow") and item.path.as_posix().endswith(MATRICES):
            item.add_marker(pytest.mark.matrix)
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
