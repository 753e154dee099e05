"""Matrix products: oneDNN's and torch's own against double precision, and what autograd may not follow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlflow import matmul as products

ROUNDING = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(params=[0, 1 << 62], ids=["oneDNN", "torch"])
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN_MULTIPLICATIONS", request.param)


@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_double_precision(threshold: None, biased: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs, weight, bias = (torch.randn(shape, generator=draw) for shape in ((9, 8), (6, 8), (6,)))
    with torch.no_grad():
        found = products.linear(inputs, weight, bias if biased else None)
    expected = F.linear(inputs.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(found.double(), expected, **ROUNDING)


def test_gradients_of_weights_add_up(threshold: None) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs, gradient, total = torch.randn(5, 3, generator=draw), torch.randn(5, 2, generator=draw), torch.ones(2, 3)
    with torch.no_grad():
        products.accumulate(total, gradient, inputs)
        torch.testing.assert_close(total, 1 + gradient.t() @ inputs, **ROUNDING)
        rough = torch.ones(2, 3)
        products.accumulate(rough, gradient.bfloat16(), inputs.bfloat16())
    torch.testing.assert_close(rough, total, atol=5e-2, rtol=2e-2)


def test_autograd_gets_a_product_that_it_can_follow(threshold: None) -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    products.linear(torch.full((2, 3), 2.0), weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 3), 4.0))
