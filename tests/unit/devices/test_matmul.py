"""Matrix products: both libraries against double precision, which of them is taken, and what autograd may not follow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rlflow.commands.doctor import machine_rows
from rlflow.devices import matmul as products
from rlflow.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
ROUNDING = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(params=products.LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that every product goes to, small ones too."""
    monkeypatch.setattr(products, "ONEDNN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(products, "PRODUCTS", products.Products())
    products.PRODUCTS.fix(dict.fromkeys(products.CLASSES, request.param))
    return request.param


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[products.Products]:
    """As in a process that has not multiplied yet."""
    monkeypatch.delenv(products.VARIABLE, raising=False)
    monkeypatch.setattr(products, "PRODUCTS", products.Products())
    yield products.PRODUCTS


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 9, 64, 200])
def test_products_equal_double_precision(library: str, rows: int, biased: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs, weight, bias = (
        torch.randn(shape, generator=draw) for shape in ((rows, 8), (6, 8), (6,))
    )
    with torch.no_grad():
        found = products.linear(inputs, weight, bias if biased else None)
    expected = F.linear(inputs.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(found.double(), expected, **ROUNDING)
    assert found.is_contiguous()


@pytest.mark.parametrize("rows", [5, 200])
def test_gradients_of_weights_add_up(library: str, rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs, gradient = torch.randn(rows, 3, generator=draw), torch.randn(rows, 2, generator=draw)
    total = torch.ones(2, 3)
    with torch.no_grad():
        products.accumulate(total, gradient, inputs)
        torch.testing.assert_close(total, 1 + gradient.t() @ inputs, **ROUNDING)
        rough = torch.ones(2, 3)
        products.accumulate(rough, gradient.bfloat16(), inputs.bfloat16())
    torch.testing.assert_close(rough, total, atol=0.3, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 7, 9, 64, 333])
def test_products_in_bfloat16_are_exact_but_for_one_rounding(rows: int) -> None:
    """However rows are cut and filled up: sums in float32, rounded once to 8 bits of mantissa."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 24, generator=draw).bfloat16()
    weight = torch.randn(18, 24, generator=draw).bfloat16()
    bias = torch.randn(18, generator=draw).bfloat16()
    gradient = torch.randn(rows, 18, generator=draw).bfloat16()
    total = torch.ones(18, 24)
    with torch.no_grad():
        found = products.linear(inputs, weight, bias)
        products.accumulate(total, gradient, inputs)
    exact = F.linear(inputs.double(), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-5)
    gathered = 1 + gradient.double().t() @ inputs.double()
    most = gradient.abs().double().t() @ inputs.abs().double()
    assert ((total.double() - gathered).abs() <= 2.0**-8 * most + 1e-5).all()


GROWTH = """
import random, sys
import psutil, torch
from rlflow.devices import matmul

weight = torch.ones(768, 576, dtype=torch.bfloat16)
total = torch.zeros(768, 576)
inputs, gradient = (torch.ones(1024, width, dtype=torch.bfloat16) for width in (576, 768))

def multiply(counts):
    with torch.no_grad():
        for rows in counts:
            matmul.linear(inputs[:rows], weight)
            matmul.linear(gradient[:rows], weight.t())
            matmul.accumulate(total, gradient[:rows], inputs[:rows])

multiply([*matmul.BLOCKS[2:], *range(1, 129)])
before = psutil.Process().memory_info().rss
multiply(random.Random(0).sample(range(129, 1024), 100))
print((psutil.Process().memory_info().rss - before) / 2**20)
"""


def test_memory_does_not_grow_with_every_new_number_of_rows_in_bfloat16() -> None:
    """oneDNN keeps code for every shape: some 0.7 MiB for each of 300, if they came to it as they are."""
    command = [sys.executable, "-c", GROWTH]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) < 20


def test_autograd_gets_a_product_that_it_can_follow(library: str) -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    products.linear(torch.full((20, 3), 2.0), weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 3), 40.0))


def test_onednn_meets_few_shapes_however_many_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps state for each: memory would grow with every micro-batch of another length, and every number of queries."""
    monkeypatch.setattr(products, "ONEDNN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(products, "PRODUCTS", products.Products())
    products.PRODUCTS.fix(dict.fromkeys(products.CLASSES, "onednn"))
    shapes, real = set(), products._onednn

    def recorded(
        inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        shapes.add((inputs.shape, weight.shape))
        return real(inputs, weight, bias)

    monkeypatch.setattr(products, "_onednn", recorded)
    with torch.no_grad():
        for rows in range(1, 700, 3):
            products.linear(torch.ones(rows, 4), torch.ones(16, 4))
            products.accumulate(torch.zeros(16, 4), torch.ones(rows, 16), torch.ones(rows, 4))
        assert 4 <= len(shapes) <= 12
        for queries in range(1, 100):
            products.linear(torch.ones(64, 4), torch.ones(queries, 4))
    assert len(shapes) <= 20


@pytest.mark.parametrize(
    ("mkl_s", "onednn_s", "taken"), [(2.0, 1.0, "onednn"), (1.0, 2.0, "mkl"), (1.1, 1.0, "mkl")]
)
def test_onednn_is_taken_where_it_is_clearly_faster(
    fresh: products.Products,
    monkeypatch: pytest.MonkeyPatch,
    mkl_s: float,
    onednn_s: float,
    taken: str,
) -> None:
    asked = []
    monkeypatch.setattr(products, "_best_s", lambda pair: asked.append(pair) or [mkl_s, onednn_s])
    assert set(fresh.chosen().values()) == {taken}
    fresh.chosen()
    assert len(asked) == len(products.CLASSES), "measured once for the process"


def test_the_choice_takes_some_milliseconds_and_is_one_for_all_threads(
    fresh: products.Products,
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: fresh.chosen(), range(4)))
    assert all(answer is answers[0] for answer in answers)
    assert set(answers[0]) == set(products.CLASSES)


@pytest.mark.parametrize("wanted", products.LIBRARIES)
def test_the_variable_decides(
    fresh: products.Products, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setenv(products.VARIABLE, wanted)
    assert set(fresh.chosen().values()) == {wanted}
    assert dict(machine_rows([]))["products"].startswith(f"{wanted} for few rows, rows, weights")


def test_another_value_of_the_variable_is_one_line(
    fresh: products.Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(products.VARIABLE, "openblas")
    with pytest.raises(
        ConfigError, match=r"RLFLOW_MATMUL: expected mkl, onednn .* or auto, found 'openblas'"
    ):
        fresh.chosen()


@pytest.mark.parametrize(
    ("name", "expected"), [("Intel(R) Xeon(R)", "mkl"), ("AMD EPYC 9554", "onednn")]
)
def test_a_fixed_choice_reads_no_clock(
    fresh: products.Products, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    monkeypatch.setattr(products, "processor_name", lambda: name)
    monkeypatch.setattr(
        products, "measured", lambda: pytest.fail("a deterministic run must not measure")
    )
    fresh.fix()
    assert set(fresh.chosen().values()) == {expected}


@pytest.mark.parametrize(("few", "many"), product(products.LIBRARIES, repeat=2))
def test_the_ranks_take_what_the_driver_has_chosen(
    fresh: products.Products, few: str, many: str
) -> None:
    fresh.fix({"few rows": few, "rows": many, "weights": many})
    assert fresh.chosen() == {"few rows": few, "rows": many, "weights": many}
