"""Transformer Engine's own Python without its extension, for a process under `fake_cuda`.

Its modules, their parameters, names and signatures, and FusedAdam's step are Transformer Engine's;
what would run in kernels is plain torch. `install` comes before any import of megatron.core, which
looks for the package once.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGES = "RLFLOW_TE_PACKAGES"
"""Environment variable: a folder with the package transformer-engine (its wheel holds Python only)."""
ABSENT = ("transformer_engine_torch", "onnx", "onnxscript", "triton")
"""Packages whose every module and name is a stub while Transformer Engine is imported."""


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is absent."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __version__="0")

    def exec_module(self, module: Any) -> None:
        pass


def install(packages: str | Path) -> list[dict[str, Any]]:
    """Makes `transformer_engine` importable from the folder. Returns a list that gets the arguments
    of each call of attention, of the rotary kernel ("rope") and of Adam's ("step")."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # loads no library
    sys.path.append(str(packages))
    stubs = _Stubs()
    sys.meta_path.append(stubs)
    extension = importlib.import_module(ABSENT[0])
    for name, members in _mirrored(Path(packages) / "transformer_engine" / "pytorch").items():
        setattr(extension, name, enum.IntEnum(name, members, start=0))
    calls: list[dict[str, Any]] = []
    extension.multi_tensor_adam = lambda *args: _adam(calls, *args)
    extension.multi_tensor_l2norm = _norm

    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda _: None

    import transformer_engine.pytorch as engine
    from transformer_engine.pytorch.attention import rope

    sys.meta_path.remove(stubs)
    for name in [name for name, module in sys.modules.items() if isinstance(module, MagicMock)]:
        if name.startswith("triton"):  # others look for it, and then use it
            del sys.modules[name]
    engine.Linear.forward = _like(engine.Linear.forward, _linear)
    engine.LayerNormLinear.forward = _like(engine.LayerNormLinear.forward, _norm_linear)
    engine.RMSNorm.forward = lambda self, hidden: _rms_norm(hidden, self.weight, self.eps)
    signature = inspect.signature(engine.DotProductAttention.forward)

    def attention(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(self, *args, **kwargs).arguments
        calls.append({"call": "attention", **given})
        return _attention(given)

    engine.DotProductAttention.forward = attention
    rope.FusedRoPEFunc.apply = lambda *args: _rope(calls, *args)
    return calls


def _mirrored(folder: Path) -> dict[str, list[str]]:
    """{enumeration of the extension: its members} of those that the Python side mirrors and checks."""
    found: dict[str, list[str]] = {}
    for file in ("constants.py", "cpp_extensions/fused_attn.py"):
        text = (folder / file).read_text(encoding="utf-8")
        for name, member in re.findall(r"= int\((?:tex\.)?(\w+)\.(\w+)\)", text):
            found.setdefault(name, []).append(member)
    return found


def _like(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in, called with what the original takes."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        signature.bind(self, *args, **kwargs)
        return stand_in(self, args[0])

    return forward


def _linear(self: Any, inputs: Tensor) -> Any:
    output = F.linear(inputs, self.weight)
    bias = self.bias if self.use_bias else None
    if bias is not None and self.apply_bias and not self.gemm_bias_unfused_add:
        output = output + bias
    return (output, bias) if self.return_bias else output


def _norm_linear(self: Any, inputs: Tensor) -> Any:
    return _linear(self, _rms_norm(inputs, self.layer_norm_weight, self.eps))


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(hidden.dtype)


def _attention(given: dict[str, Any]) -> Tensor:
    from rlflow.trainer.megatron import layers

    module, parts = given["self"], [given[f"{name}_layer"] for name in ("query", "key", "value")]
    if (given.get("qkv_format") or module.qkv_format) != "thd":
        assert given["attn_mask_type"] == "causal"
        return layers._attend(*parts)
    bounds = given["cu_seqlens_q"]
    assert bounds.dtype is torch.int32 and bounds.is_cuda
    assert given["max_seqlen_q"] and given["max_seqlen_kv"]
    assert given["attn_mask_type"] == "padding_causal"
    return rows_apart(layers._attend, parts, bounds)


def rows_apart(attend: Callable[..., Tensor], parts: list[Tensor], bounds: Tensor) -> Tensor:
    """Attention of packed rows, one after the other: (tokens, heads, D) each -> (tokens, heads * D).
    What a kernel does without the host is not counted as a wait."""
    edges = Tensor.tolist(bounds.as_subclass(Tensor))
    rows = [slice(*pair) for pair in itertools.pairwise(edges)]
    return torch.cat(
        [attend(*(part[row].unsqueeze(1) for part in parts)).squeeze(1) for row in rows]
    )


def _rope(calls: list[dict[str, Any]], *args: Any) -> Tensor:
    """FusedRoPEFunc.apply, whose arguments are positional."""
    from transformer_engine.pytorch.attention.rope import FusedRoPEFunc

    from rlflow.trainer.megatron import layers

    names = list(inspect.signature(FusedRoPEFunc.forward).parameters)[1:]
    given = dict(zip(names, args, strict=False))
    calls.append({"call": "rope", **given})
    values, angles = given["t"], given["freqs"]
    if given["tensor_format"] == "thd":
        ranks = (given.get("cp_size", 1), given.get("cp_rank", 0))
        return layers.rotate_packed(values, given["cu_seqlens"], angles, *ranks)
    return layers.rotate(values, angles)


def _norm(chunk: int, skip: Tensor, lists: list[list[Tensor]], *_: Any) -> tuple[Tensor, Any]:
    parts = torch.stack([value.float().square().sum() for value in lists[0]])
    return parts.sum().sqrt().view(1), None


@torch.no_grad()
def _adam(
    calls: list[dict[str, Any]], chunk: int, skip: Tensor, lists: list[list[Tensor]], lr: float,
    beta1: float, beta2: float, eps: float, step: int, mode: int, correction: int, decay: float, *_: Any,
) -> None:  # fmt: skip
    """Adam with decoupled weight decay, as the kernel computes it."""
    calls.append({"call": "adam", "step": step})
    first = 1 - beta1**step if correction else 1.0
    second = 1 - beta2**step if correction else 1.0
    for gradient, value, mean, square in zip(*lists[:4], strict=True):
        assert gradient.is_cuda and value.is_cuda and mean.is_cuda and square.is_cuda
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        value.sub_(lr * ((mean / first) / ((square / second).sqrt() + eps) + decay * value))
