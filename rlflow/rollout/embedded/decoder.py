"""A lean decoder (Qwen2, Qwen3, Llama, Mistral) in plain torch, made for decoding: flat tokens,
fused projections, an external cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from rlflow.errors import ModelError, did_you_mean
from rlflow.matmul import linear
from rlflow.models.architecture import Architecture, huggingface_shapes
from rlflow.rollout.engine import check_weight

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries (N, heads, head_dim), keys and values (N, 2 * groups * head_dim)) -> (N, heads *
head_dim). Stores the keys and values in the cache first."""


class Decoder:
    """Weights and forward pass of one model. Parameters live under their HuggingFace names as views
    of fused tensors, so a reload in place is a copy and the fused products see it."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self.device = device
        self.parameters: dict[str, Tensor] = {}
        self._layers = [self._make_layer(index) for index in range(architecture.layers)]
        self._embedding = self._make("model.embed_tokens.weight")
        self._norm = self._make("model.norm.weight")
        self._head = self._embedding if architecture.tied else self._make("lm_head.weight")
        self._rope = _rope_table(architecture, 0, device)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies (HuggingFace name, tensor) pairs into the parameters, in place. Raises ModelError
        for an unknown, missing, repeated or wrongly shaped tensor."""
        missing = set(self.parameters)
        for name, tensor in weights:
            self.copy_in(name, tensor, missing)
        check_complete(missing)

    @torch.inference_mode()
    def copy_in(self, name: str, tensor: Tensor, missing: set[str]) -> None:
        """Copies one tensor into its parameter and takes it off the names that are still `missing`.
        A tied model accepts `lm_head.weight` too and ignores it."""
        if name == "lm_head.weight" and self.architecture.tied:
            return
        if name not in missing:
            what = "came twice" if name in self.parameters else "is not part of this model"
            raise ModelError(f"weights: tensor '{name}' {what}.{did_you_mean(name, missing)}")
        parameter = self.parameters[name]
        check_weight(name, tensor, tuple(parameter.shape))
        parameter.copy_(tensor)
        missing.remove(name)

    def reserve(self, positions: int) -> None:
        """Makes room for sequences of that many tokens; to be called before a `forward` that has
        them."""
        if positions > self._rope.shape[1]:
            self._rope = _rope_table(self.architecture, positions, self.device, self.dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, tensor) pairs, views of the weights in use."""
        yield from self.parameters.items()

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None
    ) -> Tensor:
        """Logits (N, vocab) in float32 after the flat `tokens` (N,) at `positions` (N,), below what
        was reserved; of the rows `last` only if given. Which tokens belong together is the business
        of `attend`."""
        model = self.architecture
        heads, groups, dim = model.heads, model.groups, model.head_dim
        cosine, sine = self._rope[0, positions, None], self._rope[1, positions, None]
        x = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = linear(
                self._normalized(x, layer["input_norm"]), layer["qkv"], layer.get("qkv_bias")
            )
            by_head = qkv.view(-1, heads + 2 * groups, dim)
            if model.qk_norm:
                by_head[:, :heads] = F.rms_norm(
                    by_head[:, :heads], (dim,), layer["q_norm"], model.norm_eps
                )
                by_head[:, heads:-groups] = F.rms_norm(
                    by_head[:, heads:-groups], (dim,), layer["k_norm"], model.norm_eps
                )
            rotated = by_head[:, :-groups]
            halves_swapped = torch.roll(rotated, dim // 2, -1)
            rotated.mul_(cosine).addcmul_(halves_swapped, sine)
            attended = attend(index, by_head[:, :heads], qkv[:, heads * dim :])
            x = x + linear(attended, layer["output"])
            gate, up = linear(self._normalized(x, layer["mlp_norm"]), layer["gate_up"]).chunk(
                2, dim=-1
            )
            x = x + linear(F.silu(gate).mul_(up), layer["down"])
        if last is not None:
            x = x[last]
        return linear(self._normalized(x, self._norm), self._head).float()

    def _normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.architecture.hidden,), weight, self.architecture.norm_eps)

    def _make(self, name: str) -> Tensor:
        shape = huggingface_shapes(self.architecture)[name]
        self.parameters[name] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self.parameters[name]

    def _fuse(self, names: list[str]) -> Tensor:
        """One tensor whose row blocks are the named parameters."""
        shapes = huggingface_shapes(self.architecture)
        rows = [shapes[name][0] for name in names]
        fused = torch.zeros(
            (sum(rows), *shapes[names[0]][1:]), dtype=self.dtype, device=self.device
        )
        self.parameters.update(zip(names, fused.split(rows)))
        return fused

    def _make_layer(self, index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        layer = {
            "input_norm": self._make(prefix + "input_layernorm.weight"),
            "qkv": self._fuse([f"{attention}{part}_proj.weight" for part in "qkv"]),
            "output": self._make(attention + "o_proj.weight"),
            "mlp_norm": self._make(prefix + "post_attention_layernorm.weight"),
            "gate_up": self._fuse([f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]),
            "down": self._make(prefix + "mlp.down_proj.weight"),
        }
        if self.architecture.qkv_bias:
            layer["qkv_bias"] = self._fuse([f"{attention}{part}_proj.bias" for part in "qkv"])
        if self.architecture.qk_norm:
            layer["q_norm"] = self._make(attention + "q_norm.weight")
            layer["k_norm"] = self._make(attention + "k_norm.weight")
        return layer


def check_complete(missing: set[str]) -> None:
    """Raises ModelError if a load left tensors out."""
    if missing:
        raise ModelError(
            f"weights: {len(missing)} tensors are missing, the first is '{min(missing)}'."
        )


def _rope_table(
    model: Architecture, length: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(2, length, head_dim): cosines, and sines with the sign of rotate_half, x * cos +
    swap_halves(x) * sin."""
    angles = torch.outer(
        torch.arange(length, dtype=torch.float32, device=device),
        _inverse_frequencies(model).to(device),
    )
    cosine, sine = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1))).to(dtype)


def _inverse_frequencies(model: Architecture) -> Tensor:
    """(head_dim / 2,) radians per position. Llama 3 divides the slow ones by `rope_factor`, with a
    smooth transition between wavelengths of 8192 / 4 and 8192 / 1 positions (Llama 3.1 model card;
    constants fixed by rlflow.models.architecture)."""
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
    frequencies = 1.0 / (model.rope_theta**exponents)
    if model.rope_factor is None:
        return frequencies
    low, high, original = 1.0, 4.0, 8192
    wavelengths = 2 * math.pi / frequencies
    # Of the unscaled frequency
    share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return share * frequencies + (1 - share) * frequencies / model.rope_factor
