"""The trainers that keep the same promises."""

from __future__ import annotations

import pytest

from tests.reference import ORACLE

BACKENDS = ("megatron", pytest.param(ORACLE, id="reference"))
