"""A lean decoder of every family that is trained, in plain torch, made for decoding: flat tokens,
fused projections, an external cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rlflow.devices.matmul import linear
from rlflow.errors import ModelError, did_you_mean
from rlflow.models.adapter import Adapter
from rlflow.models.architecture import Architecture, own_rule, rules_of
from rlflow.models.entries import Yarn
from rlflow.models.layer_rules import EMBEDDING, FINAL_NORM, OUTPUT
from rlflow.models.rules import Rule
from rlflow.rollout.embedded.adapters import Applied, DecoderAdapter, Projection
from rlflow.rollout.engine import check_weight

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries (N, heads, key_dim), keys and values (N, groups * (key_dim + value_dim))) -> (N,
heads * value_dim). Stores the keys and values in the cache first."""


LAYER = {
    "input_norm": "decoder.layers.{i}.input_layernorm.weight",
    "qkv": "decoder.layers.{i}.self_attention.linear_qkv.weight",
    "qkv_bias": "decoder.layers.{i}.self_attention.linear_qkv.bias",
    "q_norm": "decoder.layers.{i}.self_attention.q_layernorm.weight",
    "k_norm": "decoder.layers.{i}.self_attention.k_layernorm.weight",
    "query": "decoder.layers.{i}.self_attention.linear_q_proj.weight",
    "query_down": "decoder.layers.{i}.self_attention.linear_q_down_proj.weight",
    "query_up": "decoder.layers.{i}.self_attention.linear_q_up_proj.weight",
    "latent_down": "decoder.layers.{i}.self_attention.linear_kv_down_proj.weight",
    "latent_norm": "decoder.layers.{i}.self_attention.kv_layernorm.weight",
    "latent_up": "decoder.layers.{i}.self_attention.linear_kv_up_proj.weight",
    "output": "decoder.layers.{i}.self_attention.linear_proj.weight",
    "attended_norm": "decoder.layers.{i}.self_attention.linear_proj.post_layernorm.weight",
    "mlp_norm": "decoder.layers.{i}.pre_mlp_layernorm.weight",
    "gate_up": "decoder.layers.{i}.mlp.linear_fc1.weight",
    "down": "decoder.layers.{i}.mlp.linear_fc2.weight",
    "mixed_norm": "decoder.layers.{i}.mlp.linear_fc2.post_layernorm.weight",
    "router": "decoder.layers.{i}.mlp.router.weight",
    "router_bias": "decoder.layers.{i}.mlp.router.expert_bias",
    "expert_gate_up": "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight",
    "expert_down": "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight",
    "shared_gate_up": "decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight",
    "shared_down": "decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight",
    "shared_gate": "decoder.layers.{i}.mlp.shared_experts.gate_weight",
}
"""Tensors of a layer here, by their names in the families' tables."""
ADAPTED = {"qkv", "output", "gate_up", "down"}
"""Those whose projections can have adapters."""

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Decoder:
    """Weights and forward pass of one model. Parameters live under their HuggingFace names as views
    of fused tensors, so a reload in place is a copy and the fused products see it.

    vocab: the first so many ids have logits (`known_vocab`); None: all."""

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        vocab: int | None = None,
    ) -> None:
        self.architecture = architecture
        self.vocab = architecture.vocab if vocab is None else vocab
        self.dtype = dtype
        self.device = device
        self.parameters: dict[str, Tensor] = {}
        self.adapters: dict[str, DecoderAdapter] = {}
        self._applied: Sequence[Applied] = ()
        self._projections: dict[str, Projection] = {}
        self._layers = [self._make_layer(index) for index in range(architecture.layers)]
        self._embedding = self._make(own_rule(architecture, EMBEDDING))
        self._norm = self._make(own_rule(architecture, FINAL_NORM))
        output = own_rule(architecture, OUTPUT)
        self._head = self._embedding if architecture.tied else self._make(output)
        self._repeated = output.names() if architecture.tied else []
        self._activate = ACTIVATIONS[architecture.activation]
        # Rounded as transformers does
        self._embedding_scale = torch.tensor(architecture.embedding_scale, dtype=dtype).item()
        self._rope = _rope_tables(architecture, 0, device)
        self.routes: Tensor | None = None

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
        A tied model accepts the output layer's weight too and ignores it."""
        if name in self._repeated:
            return
        if name not in missing:
            what = "came twice" if name in self.parameters else "is not part of this model"
            raise ModelError(f"weights: tensor '{name}' {what}.{did_you_mean(name, missing)}")
        parameter = self.parameters[name]
        check_weight(name, tensor, tuple(parameter.shape))
        parameter.copy_(tensor)
        missing.remove(name)

    @torch.inference_mode()
    def adapt(self, adapter: Adapter, name: str = "") -> bool:
        """Puts an adapter over the parameters, in place of the one of that name before. Returns
        whether it lies where that one did. Raises ModelError where it is not of this model."""
        before = self.adapters.get(name)
        if before is not None and before.is_like(adapter):
            before.copy_in(adapter)
            return True
        made = DecoderAdapter(adapter, self._projections, self.dtype, self.device)
        self.adapters[name] = made
        return False

    def reserve(self, positions: int) -> None:
        """Makes room for sequences of that many tokens; to be called before a `forward` that has
        them."""
        if positions > self._rope.shape[2]:
            self._rope = _rope_tables(self.architecture, positions, self.device, self.dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, tensor) pairs, views of the weights in use."""
        yield from self.parameters.items()

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        last: Tensor | None = None,
        applied: Sequence[Applied] | None = None,
    ) -> Tensor:
        """Logits (N, vocab) in float32 after the flat `tokens` (N,) at `positions` (N,), below what
        was reserved; of the rows `last` only if given. Which tokens belong together is the business
        of `attend`. applied: adapters, and the tokens that they are for; None: the one without a
        name is for all. Leaves `routes` (N, layers with experts, k): the experts that each token went
        to."""
        turns = [(table[0, positions, None], table[1, positions, None]) for table in self._rope]
        if applied is None:
            applied = [(self.adapters[""], None)] if "" in self.adapters else []
        self._applied = applied
        x = F.embedding(tokens, self._embedding)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        routes: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            normed = self._normalized(x, layer["input_norm"])
            project = self._latent if "latent_down" in layer else self._projected
            windowed = self.architecture.window_at(index) is not None
            cosine, sine = turns[-1 if windowed else 0]
            attended = attend(index, *project(normed, index, cosine, sine))
            output = self._product(attended, index, "output")
            x = x + self._post_normalized(output, layer, "attended_norm")
            normed = self._normalized(x, layer["mlp_norm"])
            if "router" in layer:
                mixed, chosen = self._mixed(normed, layer)
                x = x + mixed
                routes.append(chosen)
            else:
                gate, up = self._product(normed, index, "gate_up").chunk(2, dim=-1)
                mixed = self._product(self._activate(gate).mul_(up), index, "down")
                x = x + self._post_normalized(mixed, layer, "mixed_norm")
        self.routes = torch.stack(routes, 1) if routes else None
        if last is not None:
            x = x[last]
        return linear(self._normalized(x, self._norm), self._head)[:, : self.vocab].float()

    def _product(self, x: Tensor, index: int, part: str, bias: Tensor | None = None) -> Tensor:
        """A fused product of a layer, with what the adapter adds to it."""
        product = linear(x, self._layers[index][part], bias)
        for adapter, rows in self._applied:
            adapter.add_to(product, x, index, part, rows)
        return product

    def _normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.architecture.norm_eps
        if self.architecture.zero_centered_norms:
            return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def _post_normalized(self, x: Tensor, layer: dict[str, Tensor], norm: str) -> Tensor:
        """What is added to the residual stream, normalized in families that do so."""
        return self._normalized(x, layer[norm]) if norm in layer else x

    def _mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        return linear(self._activate(gate).mul_(up), down)

    def _projected(
        self, x: Tensor, index: int, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries, and keys with values, as `Attend` takes them."""
        model, layer = self.architecture, self._layers[index]
        heads, groups, dim = model.heads, model.groups, model.head_dim
        qkv = self._product(x, index, "qkv", layer.get("qkv_bias"))
        by_head = qkv.view(-1, heads + 2 * groups, dim)
        if model.qk_norm:
            queries, keys = by_head[:, :heads], by_head[:, heads:-groups]
            by_head[:, :heads] = self._normalized(queries, layer["q_norm"])
            by_head[:, heads:-groups] = self._normalized(keys, layer["k_norm"])
        _rotate(by_head[:, :-groups, : model.rotary_dim], cosine, sine)
        return by_head[:, :heads], qkv[:, heads * dim :]

    def _latent(self, x: Tensor, index: int, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """The same of latent attention, whose keys and values are made of fewer numbers. What
        rotates lies in pairs in the weights, and in halves from here on."""
        model, latent, layer = self.architecture, self.architecture.latent, self._layers[index]
        assert latent is not None
        if "query" in layer:
            queries = linear(x, layer["query"])
        else:
            narrow = self._normalized(linear(x, layer["query_down"]), layer["q_norm"])
            queries = linear(narrow, layer["query_up"])
        queries = queries.view(-1, model.heads, model.key_dim)
        content, turning = linear(x, layer["latent_down"]).tensor_split([latent.key_rank], -1)
        made = linear(self._normalized(content, layer["latent_norm"]), layer["latent_up"])
        plain, values = made.view(-1, model.heads, latent.plain + latent.value).tensor_split(
            [latent.plain], -1
        )
        apart = torch.cat((queries[..., latent.plain :], turning[:, None]), 1)
        halves = torch.cat((apart[..., 0::2], apart[..., 1::2]), -1)
        _rotate(halves, cosine, sine)
        queries[..., latent.plain :] = halves[:, :-1]
        keys = torch.cat((plain, halves[:, -1:].expand(-1, model.heads, -1)), -1)
        return queries, torch.cat((keys.flatten(1), values.flatten(1)), -1)

    def _mixed(self, x: Tensor, layer: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(N, hidden): what the experts make of each token that the router sends them, by its
        weights, and the MLP beside them; (N, k): to which."""
        experts = self.architecture.experts
        assert experts is not None
        weights, chosen = self._routed(x, layer)
        by_expert, order = chosen.flatten().sort(stable=True)
        sources = order // experts.top_k
        counts = by_expert.bincount(minlength=experts.count).tolist()
        made = [
            self._mlp(part, layer["expert_gate_up"][expert], layer["expert_down"][expert])
            for expert, part in enumerate(x[sources].split(counts))
            if len(part)
        ]
        weighed = torch.cat(made) * weights.to(x.dtype).flatten()[order, None]
        mixed = torch.zeros_like(x).index_add_(0, sources, weighed)
        if "shared_down" in layer:
            beside = self._mlp(x, layer["shared_gate_up"], layer["shared_down"])
            if "shared_gate" in layer:
                beside *= linear(x, layer["shared_gate"]).sigmoid()
            mixed += beside
        return mixed, chosen

    def _routed(self, x: Tensor, layer: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(N, k) each: weights of the experts that tokens go to, float32, and which they are."""
        experts, routing = self.architecture.experts, self.architecture.routing
        assert experts is not None
        if routing is None:
            scores = ranked = linear(x, layer["router"]).softmax(-1, dtype=torch.float32)
        else:
            logits = F.linear(x.float(), layer["router"].float())
            scores = ranked = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
            if routing.sigmoid:
                ranked = scores + layer["router_bias"]
            if routing.groups > 1:
                ranked = _of_best_groups(ranked, routing.groups, routing.chosen)
        chosen = ranked.topk(experts.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if experts.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights if routing is None else weights * routing.scaling, chosen

    def _make_layer(self, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer, by their names in LAYER."""
        model = self.architecture
        rules = {rule.megatron: rule for rule in rules_of(model) if model.has(rule.where, layer)}
        parts = {part: rules[name] for part, name in LAYER.items() if name in rules}
        for part in ADAPTED & parts.keys():
            rule, start = parts[part], 0
            shapes = rule.shapes(model)
            outputs = sum(rows for rows, _ in shapes)
            for name, (rows, inputs) in zip(rule.names(layer), shapes, strict=True):
                place = Projection(layer, part, start, rows, outputs, inputs)
                self._projections[name.removesuffix(".weight")] = place
                start += rows
        return {part: self._make(rule, layer) for part, rule in parts.items()}

    def _make(self, rule: Rule, layer: int = 0) -> Tensor:
        """The tensor of a rule: its sources, which are parameters, as blocks of rows. That of
        experts has one more dimension, the first."""
        experts, shapes = self.architecture.experts, rule.shapes(self.architecture)
        count = experts.count if experts is not None and rule.per_expert else 1
        rows = [shape[0] for shape in shapes]
        size = (count, sum(rows), *shapes[0][1:])
        dtype = torch.float32 if rule.exact else self.dtype
        whole = torch.zeros(size, dtype=dtype, device=self.device)
        for expert, fused in enumerate(whole):
            names = (rule.of_expert(expert) if rule.per_expert else rule).names(layer)
            self.parameters.update(zip(names, fused.split(rows), strict=True))
        return whole if rule.per_expert else whole[0]


def _rotate(values: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Turns (N, heads, D) in place."""
    halves_swapped = torch.roll(values, values.shape[-1] // 2, -1)
    values.mul_(cosine).addcmul_(halves_swapped, sine)


def _of_best_groups(ranked: Tensor, groups: int, count: int) -> Tensor:
    """The ranks (N, experts), -inf where an expert is of none of the best groups by their two
    best."""
    grouped = ranked.unflatten(-1, (groups, -1))
    best = grouped.topk(2, -1).values.sum(-1).topk(count, -1).indices
    left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)


def check_complete(missing: set[str]) -> None:
    """Raises ModelError if a load left tensors out."""
    if missing:
        raise ModelError(
            f"weights: {len(missing)} tensors are missing, the first is '{min(missing)}'."
        )


def _rope_tables(
    model: Architecture, length: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(1 or 2, 2, length, rotary_dim): cosines, and sines with the sign of rotate_half, x * cos +
    swap_halves(x) * sin. Layers with a window take the last table, others the first."""
    tables = [_inverse_frequencies(model)]
    if model.window is not None and model.window.rope_theta is not None:
        tables.append(_plain_frequencies(model.rotary_dim, model.window.rope_theta))
    steps = torch.arange(length, dtype=torch.float32, device=device)
    angles = steps[:, None] * torch.stack(tables).to(device)[:, None]
    strength = model.yarn.attention if model.yarn else 1.0
    cosine, sine = angles.cos() * strength, angles.sin() * strength
    both = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    return torch.stack(both, 1).to(dtype)


def _plain_frequencies(dim: int, base: float) -> Tensor:
    """(dim / 2,) radians per position."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (base**exponents)


def _inverse_frequencies(model: Architecture) -> Tensor:
    """(rotary_dim / 2,) radians per position. Llama 3 divides the slow ones by `rope_factor`, with
    a smooth transition between wavelengths of 8192 / 4 and 8192 / 1 positions (Llama 3.1 model
    card; constants fixed by rlflow.models.architecture)."""
    dim = model.rotary_dim
    frequencies = _plain_frequencies(dim, model.rope_theta)
    if model.yarn is not None:
        return _slowed(frequencies, model.yarn, dim, model.rope_theta)
    if model.rope_factor is None:
        return frequencies / model.rope_divisor
    low, high, original = 1.0, 4.0, 8192
    wavelengths = 2 * math.pi / frequencies
    # Of the unscaled frequency
    share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return share * frequencies + (1 - share) * frequencies / model.rope_factor


def _slowed(frequencies: Tensor, yarn: Yarn, dim: int, base: float) -> Tensor:
    """By `yarn.factor` where they turn less often than `beta_slow` within the original positions,
    as they are above `beta_fast`, and a mixture of both between (arXiv 2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        return dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32)
    share = ((steps - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn.factor * share + frequencies * (1 - share)
