"""The reference trainer: a transformers model on one device and torch's AdamW. The oracle that
other trainers are held to.

Simple rather than fast: whole logits, no packing, no parallelism. Nothing in it is random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.batching import plan_microbatches
from rlflow.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    StorageError,
)
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.models.layer_rules import dtype_of
from rlflow.models.vocabulary import known_vocab
from rlflow.storage.integrity import (
    TRAINER_MANIFEST,
    error_reason,
    find_damage,
    fingerprint,
    read_fingerprints,
    read_sealed,
    write_manifest,
)
from rlflow.trainer import lora
from rlflow.trainer.base import BASE, LossFunction, Trainer, check_wanted
from rlflow.trainer.options import TrainerOptions, torch_dtype
from rlflow.trainer.reducing import (
    check_batch,
    check_finite,
    combine,
    finish_metrics,
    reduce_tokens,
    skipped,
)
from rlflow.trainer.scoring import (
    check_new_name,
    check_tokens,
    check_top_k,
    empty_scores,
    unknown_model,
)
from rlflow.types import TEACHER_TOP_IDS, Batch, Loss, PolicyOutput, as_loss
from tests.reference.adapters import attach, named_factors
from tests.reference.model import Critic, at_tokens, load_model, policy_output

FILES = ("policy.safetensors", "snapshots.safetensors", "optimizer.pt")
CANNOT = {
    "packing": "pads",
    "distributed_optimizer": "runs on one device",
    "expert_parallel": "runs on one device",
    "router_replay": "lets routers choose",
    "balance": "adds no loss of the load of experts",
    "recompute": "keeps all activations",
    "offload_snapshots": "runs on one device",
    "release_gradients": "runs on one device",
    "fp8": "computes in the precision of the weights",
}
"""Options that must stay as they are by default, and why."""


class ReferenceTrainer(Trainer):
    """Takes the keywords of every trainer (`TrainerOptions`), but for what needs more than one
    device.

    Parameters, gradients and optimizer state are float32; dtype bfloat16 computes under autocast
    and gives out bfloat16 weights. `seed` and `logits_chunk_mib` are accepted because every trainer
    takes them; logits are whole here. values: a critic, whose `score` gives values and whose losses
    get them."""

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        seed: int = 0,
        trust_remote_code: bool = False,
        device: str | None = None,
        values: bool = False,
        **options: Any,
    ) -> None:
        given = TrainerOptions.of(options)
        self.check_options(given)
        adamw = given.adamw
        self.learning_rate = given.learning_rate()
        self.dtype = torch_dtype(dtype)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.max_gradient_norm = given.max_gradient_norm
        self.tokens_per_microbatch = given.tokens_per_microbatch
        self.values = values
        policy = load_model(path, trust_remote_code)
        self.vocab = known_vocab(path, _rows(policy))
        self.model = (Critic(policy) if values else policy).to(self.device)
        self.lora = given.lora
        self.adapter_scale = None if given.lora is None else given.lora.scale
        self.adapters = {} if self.lora is None else attach(self.model, self.lora, seed)
        self.identity = lora.identity(self.lora, digest(iterate_weights(path)) if self.lora else "")
        parameters = list(self._trained().values())
        matrices = [value for value in parameters if value.dim() > 1]
        vectors = [value for value in parameters if value.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": adamw.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=given.lr,
            betas=(adamw.beta1, adamw.beta2),
            eps=adamw.eps,
        )
        self.updates = 0  # optimizer steps so far; the learning rate follows them
        self.snapshots: dict[str, dict[str, Tensor]] = {}
        self.frozen: dict[str, torch.nn.Module] = {}
        self.frozen_vocab: dict[str, int] = {}

    @classmethod
    def check_options(cls, options: TrainerOptions, ranks: int = 0) -> None:
        if options.layout.model_ranks > 1 or ranks > 1:
            raise ConfigError(
                "trainer.backend: 'reference' runs on one device; expected tensor_parallel, "
                "pipeline_parallel, context_parallel and cluster.ranks at most 1, found "
                f"{options.tensor_parallel}, {options.pipeline_parallel}, "
                f"{options.context_parallel}, {ranks}."
            )
        if options.adamw.offload:
            raise ConfigError(
                "trainer.optimizer.offload: 'reference' runs on one device; expected false, found "
                "true."
            )
        for name, why in CANNOT.items():
            found, expected = getattr(options, name), getattr(TrainerOptions, name)
            if found != expected:
                raise ConfigError(
                    f"trainer.{name}: 'reference' {why}; expected {str(expected).lower()}, found "
                    f"{str(found).lower()}. Use trainer.backend=megatron."
                )

    @torch.no_grad()
    def score(
        self,
        batch: Batch,
        model: str = "policy",
        want: Sequence[str] = ("logprobs",),
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        check_wanted(want, self.values)
        check_tokens(batch.tokens, self.vocab)
        if top_k:
            check_top_k(top_k, self.vocab)
        result = empty_scores(batch, want, top_k)
        needs = frozenset(want) | ({"top_logprobs"} if top_k else set())
        for rows in self._microbatches(batch):
            part = batch.select(rows).to(self.device)
            found = self._head(part, model)
            if top_k:
                # A teacher may have more rows, of padding
                likeliest = found[:, :-1, : self.vocab].topk(top_k, dim=-1).indices
                ids = F.pad(likeliest, (0, 0, 1, 0))
                positions = torch.arange(ids.shape[1], device=ids.device)
                ids *= (positions < part.lengths[:, None])[..., None]
                part = part.replace(extras={TEACHER_TOP_IDS: ids})
            output = self._described(found, part, needs)
            for name, whole in result.items():
                values = ids if name == "top_ids" else getattr(output, name)
                whole[torch.tensor(rows), : values.shape[1]] = values.to(whole)
        return result

    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        loss = as_loss(loss)
        check_batch(batch)
        check_tokens(batch.tokens, self.vocab)
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {"loss": 0.0}
        microbatches = self._microbatches(batch)
        for rows in microbatches:
            part = batch.select(rows).to(self.device)
            head = self._head(part, "policy")
            output = self._described(head, part, loss.needs, part.trained)
            values, metrics = loss(output, part)
            (part.weights * values).sum().backward()
            for name, value in {**metrics, "loss": values.detach()}.items():
                found = reduce_tokens(value, part, loss.reductions.get(name, "mean"))
                totals[name] = combine(totals.get(name), found, loss.reductions.get(name, "mean"))
        totals = finish_metrics(totals, loss.reductions, batch)
        check_finite("loss", totals["loss"], self.updates)
        rate = self.learning_rate(self.updates)
        norm = self._step(rate)
        counts = {"tokens": float(batch.lengths.sum()), "microbatches": float(len(microbatches))}
        return {**totals, "gradient_norm": norm, "lr": rate, **counts, **skipped(norm)}

    def snapshot(self, name: str) -> None:
        check_new_name("snapshot", name, self.frozen)
        trained = self._trained().items()
        self.snapshots[name] = {key: value.detach().clone() for key, value in trained}

    def load_frozen(self, name: str, path: str | Path) -> None:
        check_new_name("load_frozen", name, [*self.snapshots, *self.frozen])
        model = load_model(path)
        self.frozen_vocab[name] = known_vocab(path, _rows(model))
        self.frozen[name] = model.to(self.device).requires_grad_(False)

    def weights(
        self, device: str | None = "cpu", merged: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        value: Tensor
        in_files = self.model.state_dict().keys()
        buffers = ((name, value) for name, value in self.model.named_buffers() if name in in_files)
        # A tied lm_head is named once, as the embedding
        for name, value in chain(self.model.named_parameters(), buffers):
            layer, _, kind = name.rpartition(".")
            if name.startswith("output_layer.") or ".lora." in name:  # a critic's own, adapters
                continue
            own = self.dtype
            if kind == "weight" and layer in self.adapters:
                own = merged or self.dtype
                value = self.adapters[layer].merged(value, own)
            for saved, part in self._as_saved(name, value.detach()).items():
                dtype = dtype_of(saved, own)
                yield saved, part.to(device=device, dtype=dtype, copy=device is not None)

    def _as_saved(self, name: str, value: Tensor) -> Mapping[str, Tensor]:
        """A parameter as files have it; in memory, transformers makes one of a layer's experts."""
        if self.values or not hasattr(self.model.config, "num_experts_per_tok"):
            return {name: value}
        from transformers.core_model_loading import revert_weight_conversion

        model: Any = self.model
        return revert_weight_conversion(model, {name: value})

    def adapters_arrived(self) -> float | None:
        if not self.adapters:
            return None
        return lora.arrived(torch.stack([one.arrival for one in self.adapters.values()]).sum(0))

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in named_factors(self.adapters):
            yield name, value.detach().to(device="cpu", dtype=self.dtype, copy=True)

    def save(self, path: str | Path, step: int) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        directory = Path(path)
        frozen = {
            f"{name}/{key}": value
            for name, copy in self.snapshots.items()
            for key, value in copy.items()
        }
        content = {
            "backend": "reference",
            "step": step,
            "updates": self.updates,
            "lora": self.identity,
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: value.detach().contiguous() for name, value in self._trained().items()},
                directory / "policy.safetensors",
            )
            save_file(frozen, directory / "snapshots.safetensors")
            torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")
            files = {name: fingerprint(directory / name) for name in FILES}
            write_manifest(directory / TRAINER_MANIFEST, content, files)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise StorageError(
                f"{directory}: the checkpoint cannot be written ({error_reason(error)})."
            ) from error

    def load(self, path: str | Path) -> int:
        from safetensors.torch import load_file

        directory = Path(path)
        state = read_sealed(directory / TRAINER_MANIFEST)
        if state.get("backend") != "reference":
            raise CheckpointError(
                f"{directory}: not a checkpoint of the reference trainer; set trainer.backend as "
                "it was."
            )
        lora.check_identity(directory, state.get("lora"), self.identity)
        damage = find_damage(directory, read_fingerprints(state, directory / TRAINER_MANIFEST))
        if damage is not None:
            raise DamagedCheckpointError(f"{damage}.")
        policy = load_file(directory / "policy.safetensors")
        frozen = load_file(directory / "snapshots.safetensors")
        optimizer = torch.load(
            directory / "optimizer.pt", map_location=self.device, weights_only=True
        )
        self._restore(policy, directory)
        loaded: dict[str, dict[str, Tensor]] = {}
        for key, value in frozen.items():
            name, _, parameter = key.partition("/")
            loaded.setdefault(name, {})[parameter] = value.to(self.device)
        self.snapshots |= loaded
        self.optimizer.load_state_dict(optimizer)
        self.updates = int(state["updates"])
        return int(state["step"])

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        named = self.model.named_parameters()
        return {name: value for name, value in named if value.requires_grad}

    def _microbatches(self, batch: Batch) -> list[list[int]]:
        [plan] = plan_microbatches(batch.lengths, self.tokens_per_microbatch)
        return [rows for rows in plan if rows]

    def _described(
        self, found: Tensor, batch: Batch, want: frozenset[str], wanted: Tensor | None = None
    ) -> PolicyOutput:
        """What the head gave, at the tokens that it describes."""
        if self.values:
            values = at_tokens(found[:, :-1].float(), batch, wanted)
            return PolicyOutput(logprobs=torch.full_like(values, torch.nan), values=values)
        return policy_output(found, batch, want, wanted)

    def _head(self, batch: Batch, model: str) -> Tensor:
        """(B, T, V) logits; (B, T) values of a critic. Rows are right-padded and attention is
        causal, so padding cannot reach a real token and needs no attention mask."""
        arguments = {"input_ids": batch.tokens, "use_cache": False}
        halved = self.dtype is torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=halved):
            if model == "policy" or model in self.frozen:
                output = self.frozen.get(model, self.model)(**arguments)
            elif model in self.snapshots or (model == BASE and self.adapters):
                without = {f"{name}.lora.b": 0 * one.b for name, one in self.adapters.items()}
                weights = self.snapshots.get(model, without)
                output = torch.func.functional_call(self.model, weights, (), arguments)
            else:
                raise unknown_model(model, [*self.snapshots, *self.frozen])
        if self.values:
            return output
        return output.logits[..., : self.frozen_vocab.get(model, self.vocab)]

    def _step(self, rate: float) -> float:
        """Clips, steps and returns the gradient norm before clipping; max_gradient_norm 0 clips
        nothing."""
        limit = self.max_gradient_norm if self.max_gradient_norm > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        check_finite("gradient norm", norm, self.updates)
        if norm == 0:  # the moments alone would move the weights, and nothing asked for that
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates += 1
        return norm

    @torch.no_grad()
    def _restore(self, policy: Mapping[str, Tensor], directory: Path) -> None:
        parameters = self._trained()
        wrong = sorted(set(parameters) ^ set(policy)) or [
            name for name, value in policy.items() if value.shape != parameters[name].shape
        ]
        if wrong:
            raise CheckpointError(
                f"{directory}: belongs to another model: {len(wrong)} tensors differ in name or "
                f"shape, the first is {wrong[0]}"
            )
        for name, value in policy.items():
            parameters[name].copy_(value)


def _rows(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)
