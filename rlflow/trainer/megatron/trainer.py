"""The Trainer over megatron-core: one rank of it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import ConfigError, DataError, RLFlowError, did_you_mean
from rlflow.models.architecture import architecture
from rlflow.models.huggingface import WeightFiles, read_config
from rlflow.trainer.base import Loss, Trainer
from rlflow.trainer.layout import Layout
from rlflow.trainer.megatron import checkpoint, cpu, offload, optimizer, step, world
from rlflow.trainer.megatron.model import RECOMPUTE, build_model, gather_weights, load_weights, named_parameters
from rlflow.trainer.schedule import learning_rate
from rlflow.types import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCORES = ("logprobs", "entropy")


class MegatronTrainer(Trainer):
    """One rank of a Megatron trainer over the weights of a HuggingFace directory.

    The ranks are those of torch.distributed where the caller initialised it (data parallel = ranks / (tensor * pipeline *
    context)); otherwise this process alone. lr_*: see `learning_rate`. tokens_per_microbatch: rows times longest row of one
    forward pass; with `packing` (rows end to end, unpadded) the sum of their lengths. logits_chunk_mib: of float32 logits
    that exist at a time; what a micro-batch has beyond it is computed again in the backward pass. recompute: none,
    selective (attention and MLP) or full (whole layers). offload_*: into host memory, Adam's moments and update or the
    weights of snapshots. release_gradients: no gradient buffers between updates. `trust_remote_code` is accepted for
    symmetry; no code of a model directory is ever run here."""

    def __init__(
        self,
        path: str | Path,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        context_parallel: int = 1,
        virtual_pipeline: int = 1,
        sequence_parallel: bool = False,
        distributed_optimizer: bool = False,
        recompute: str = "none",
        lr: float = 1e-6,
        lr_schedule: str = "constant",
        lr_warmup_steps: int = 0,
        lr_decay_steps: int | None = None,
        min_lr: float = 0.0,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_gradient_norm: float = 1.0,
        tokens_per_microbatch: int = 16384,
        packing: bool = False,
        logits_chunk_mib: float = 512.0,
        offload_optimizer: bool = False,
        offload_snapshots: bool = False,
        release_gradients: bool = False,
        dtype: str = "float32",
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        _check_choice("model.dtype", dtype, DTYPES)
        _check_choice("trainer.recompute", recompute, RECOMPUTE)
        cpu.check_version()
        offload.check_gpu(offload_optimizer=offload_optimizer, offload_snapshots=offload_snapshots)
        self._architecture = architecture(read_config(path))
        layout = Layout(tensor_parallel, pipeline_parallel, context_parallel, virtual_pipeline, sequence_parallel)
        layout.check_model(self._architecture)
        weights = WeightFiles(path)
        self._schedule: dict[str, Any] = {
            "lr": lr,
            "schedule": lr_schedule,
            "warmup_steps": lr_warmup_steps,
            "decay_steps": lr_decay_steps,
            "min_lr": min_lr,
        }
        learning_rate(0, **self._schedule)  # a wrong schedule is an error now, not after the first rollout
        self._limits = step.MicrobatchLimits(tokens_per_microbatch, packing)
        self._offload_snapshots, self._release_gradients = offload_snapshots, release_gradients
        self._updates = 0
        self._snapshots: dict[str, dict[str, Tensor]] = {}
        self._saving: checkpoint.PendingSave | None = None
        self._world = world.join(layout, seed)
        try:
            with cpu.adapted():
                chunk_bytes = int(logits_chunk_mib * 2**20)
                self._chunks = build_model(self._architecture, self._world, DTYPES[dtype], chunk_bytes, recompute)
                load_weights(self._chunks, self._architecture, self._world, weights)
                self._model = optimizer.wrap(self._chunks, distributed_optimizer)
                options = optimizer.AdamOptions(
                    lr, beta1, beta2, eps, weight_decay, max_gradient_norm, offload_optimizer
                )
                self._optimizer = optimizer.make_optimizer(self._model, options)
        except BaseException:  # nobody could close a trainer that was never made
            self.close()
            raise

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        """One optimizer step. Besides `loss`, `gradient_norm`, `lr` and the loss's metrics: `tokens` (without padding) of the
        batch and `microbatches` per rank. Raises RLFlowError where loss or gradients are not finite; the weights stay."""
        if len(batch) == 0:
            raise RLFlowError(
                "update: the batch has no rows; every trajectory of the step was aborted or filtered out."
            )
        self._check(batch)
        tokens = int(batch.lengths.sum())
        microbatches = step.plan(batch, self._limits, self._world)
        rate = learning_rate(self._updates, **self._schedule)
        with cpu.adapted():
            self._set_training(True)
            if self._release_gradients:
                offload.restore_gradients(self._model)
            optimizer.zero_gradients(self._model, self._optimizer)
            metrics = step.forward_backward(self._model, self._world, microbatches, loss, tokens)
            norm = optimizer.step(self._optimizer, rate)
            if self._release_gradients:
                offload.release_gradients(self._model)
        self._updates += 1
        share = float(batch.weights.sum()) or 1.0
        return {
            **{name: value if name == "loss" else value / share for name, value in metrics.items()},
            "gradient_norm": norm,
            "lr": rate,
            "tokens": float(tokens),
            "microbatches": float(len(microbatches)),
        }

    def score(self, batch: Batch, model: str = "policy", want: Sequence[str] = ("logprobs",)) -> dict[str, Tensor]:
        for name in want:
            if name not in SCORES:
                raise ConfigError(f"score: unknown quantity '{name}'.{did_you_mean(name, SCORES)}")
        if len(batch) == 0:
            return {name: torch.zeros(batch.tokens.shape) for name in want}
        self._check(batch)
        with self._swapped(model), cpu.adapted():
            self._set_training(False)
            return step.score(self._model, self._world, batch, self._limits, want)

    def snapshot(self, name: str) -> None:
        if name == "policy":
            raise ConfigError("snapshot: 'policy' is the model in training; choose another name, e.g. 'reference'.")
        values = {key: parameter.detach() for key, parameter in named_parameters(self._chunks)}
        self._snapshots[name] = self._kept(values)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return gather_weights(self._chunks, self._architecture, self._world)

    def save(self, path: str | Path, step: int) -> None:
        self._begin_save(path, step, background=False)
        self.finish_save()

    def begin_save(self, path: str | Path, step: int) -> None:
        self._begin_save(path, step, background=True)

    def _begin_save(self, path: str | Path, step: int, background: bool) -> None:
        self.finish_save()  # one at a time
        with cpu.adapted():
            self._saving = checkpoint.begin_save(Path(path), self._state(step), background)

    def finish_save(self, wait: bool = True) -> bool:
        if self._saving is None:
            return True
        with cpu.adapted():
            if not wait and not self._saving.files.finished_everywhere():
                return False
            saving, self._saving = self._saving, None
            saving.finish()
        return True

    def load(self, path: str | Path) -> int:
        with cpu.adapted():
            state = checkpoint.load(Path(path), self._state(0))
        snapshots = {name: self._kept(values) for name, values in state.snapshots.items()}
        self._updates, self._snapshots = state.updates, {**self._snapshots, **snapshots}
        return state.step

    def close(self) -> None:
        world.leave(self._world)

    def _kept(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of a snapshot's weights, where they are to stay."""
        return (
            offload.to_host(values)
            if self._offload_snapshots
            else {key: value.clone() for key, value in values.items()}
        )

    def _state(self, step: int) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(
            world=self._world,
            architecture=self._architecture,
            modules=self._chunks,
            optimizer=self._optimizer,
            snapshots=self._snapshots,
            updates=self._updates,
            step=step,
        )

    def _set_training(self, training: bool) -> None:
        for chunk in self._model:
            chunk.train(training)

    def _check(self, batch: Batch) -> None:
        lowest, highest = int(batch.tokens.min()), int(batch.tokens.max())
        vocab = self._architecture.vocab
        if lowest < 0 or highest >= vocab:
            raise DataError(
                f"batch: token ids must be 0 to {vocab - 1} (the model's vocabulary), found {lowest} to {highest}."
            )

    @contextlib.contextmanager
    def _swapped(self, name: str) -> Iterator[None]:
        """Inside, the parameters hold a snapshot's values."""
        if name == "policy":
            yield
            return
        if name not in self._snapshots:
            known = ["policy", *self._snapshots]
            raise ConfigError(
                f"score: there is no model '{name}'; known: {', '.join(known)}.{did_you_mean(name, known)}"
            )
        parameters = dict(named_parameters(self._chunks))
        policy = {key: parameter.data for key, parameter in parameters.items()}
        try:
            for key, value in self._snapshots[name].items():
                parameters[key].data = value.to(policy[key].device, non_blocking=True)
            yield
        finally:
            for key, value in policy.items():
                parameters[key].data = value


def _check_choice(key: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}: expected {' or '.join(choices)}, found '{value}'.{did_you_mean(value, choices)}")
