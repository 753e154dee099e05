"""The fused operations against the formulas that they fuse, in double precision, and against megatron-core's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlflow.devices import matmul as products
from rlflow.trainer.megatron import layers


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_swiglu_and_its_gradient(draw: torch.Generator) -> None:
    module = layers.SwiGLU(TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1))
    both = torch.randn(3, 2, 10, generator=draw, dtype=torch.float64, requires_grad=True)
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(module(both), F.silu(gate) * up)
    assert torch.autograd.gradcheck(module, both)


@pytest.mark.parametrize("library", products.LIBRARIES)
@pytest.mark.parametrize("buffered", [False, True])
def test_a_linear_layer_and_its_gradients(
    draw: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    library: products.Library,
    buffered: bool,
) -> None:
    """Against double precision; the weight's gradient is added to Megatron's buffer where there is one."""
    monkeypatch.setattr(products, "ONEDNN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(products, "PRODUCTS", products.Products())
    products.PRODUCTS.fix(dict.fromkeys(products.CLASSES, library))
    values = [torch.randn(shape, generator=draw) for shape in ((5, 2, 8), (6, 8), (6,))]
    inputs, weight, bias = (value.clone().requires_grad_() for value in values)
    exact = [value.double().requires_grad_() for value in values]
    if buffered:
        weight.main_grad = torch.ones(6, 8)
    share = torch.randn(5, 2, 6, generator=draw)
    result = layers._Linear.apply(inputs, weight, bias, None, False, False)
    expected = F.linear(*exact)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
    result.backward(share)
    expected.backward(share.double())
    of_weight = weight.main_grad - 1 if buffered else weight.grad
    assert (weight.grad is None) == buffered
    for found, one in zip((inputs.grad, of_weight, bias.grad), exact, strict=True):
        torch.testing.assert_close(found.double(), one.grad, atol=1e-5, rtol=1e-5)


def angles(positions: int, dimensions: int) -> Tensor:
    """(positions, 1, 1, dimensions) in two equal halves, as Megatron's RotaryEmbedding makes them."""
    half = torch.arange(positions)[:, None] * 10.0 ** -torch.arange(0.0, dimensions // 2)
    return torch.cat([half, half], dim=-1)[:, None, None].double()


@pytest.mark.parametrize("rotated", [8, 4])
def test_rotation_equals_megatrons_and_its_gradient_turns_back(
    draw: torch.Generator, rotated: int
) -> None:
    """With all dimensions rotated, and with the last half of them passed through."""
    values = torch.randn(6, 2, 3, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    turned = layers.rotate(values, angles(6, rotated))
    torch.testing.assert_close(
        turned, rope_utils._apply_rotary_pos_emb_bshd(values, angles(6, rotated))
    )
    assert torch.autograd.gradcheck(lambda given: layers.rotate(given, angles(6, rotated)), values)
    (back,) = torch.autograd.grad(turned, values, turned.detach())
    torch.testing.assert_close(back, values.detach())  # a rotation's transpose is its inverse


def test_packed_rows_each_begin_at_position_0(draw: torch.Generator) -> None:
    first, second = torch.randn(4, 1, 3, 8, generator=draw), torch.randn(2, 1, 3, 8, generator=draw)
    turned = layers.rotate_packed(
        torch.cat([first, second]).squeeze(1), torch.tensor([0, 4, 6]), angles(4, 8).float()
    )
    alone = [layers.rotate(row, angles(len(row), 8).float()).squeeze(1) for row in (first, second)]
    torch.testing.assert_close(turned, torch.cat(alone))
