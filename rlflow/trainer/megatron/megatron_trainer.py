"""The Trainer over megatron-core: one rank of it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.batching import ROUTES, teaches
from rlflow.models.architecture import architecture
from rlflow.models.huggingface import WeightFiles, read_config
from rlflow.models.vocabulary import known_vocab
from rlflow.trainer.base import BASE, LossFunction, Trainer, check_wanted
from rlflow.trainer.lora import check_layers
from rlflow.trainer.megatron import (
    adapters,
    checkpoint,
    cpu,
    offload,
    optimizer,
    router_replay,
    step,
    world,
    writing,
)
from rlflow.trainer.megatron.balancing import Balancing
from rlflow.trainer.megatron.frozen import FrozenModel
from rlflow.trainer.megatron.model import (
    FP8_GRANULES,
    PolicyModel,
    ValueModel,
    build_model,
    check_fp8,
    layers_name,
    trained_parameters,
)
from rlflow.trainer.megatron.model_weights import gather_weights, load_weights
from rlflow.trainer.options import TrainerOptions, torch_dtype
from rlflow.trainer.reducing import check_batch, check_finite, finish_metrics, skipped
from rlflow.trainer.routing import balance_of
from rlflow.trainer.scoring import (
    check_new_name,
    check_tokens,
    check_top_k,
    empty_scores,
    unknown_model,
)
from rlflow.types import Batch, Loss, as_loss

logger = logging.getLogger(__name__)


class MegatronTrainer(Trainer):
    """One rank of a Megatron trainer over the weights of a HuggingFace directory.

    The ranks are those of torch.distributed where the caller initialised it (data parallel = ranks
    / (tensor * pipeline * context)); otherwise this process alone. options: those of
    `TrainerOptions`. logits_chunk_mib: what a micro-batch has beyond it is computed again in the
    backward pass. recompute: none, selective (attention and MLP), full (whole layers) or parts of a
    layer. values: a critic, with a value head in place of the output layer; `score` gives values,
    and losses get them. `trust_remote_code` is accepted for symmetry; no code of a model directory
    is ever run here."""

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        seed: int = 0,
        trust_remote_code: bool = False,
        values: bool = False,
        **options: Any,
    ) -> None:
        given = TrainerOptions.of(options)
        layout, adamw, weights_dtype = given.layout, given.adamw, torch_dtype(dtype)
        self._learning_rate = given.learning_rate()
        if not torch.cuda.is_available():
            given.check_without_gpu()
        self._read_config(path, given, values)
        # Any number is a size, 1e308 too
        self._chunk_bytes = int(min(given.logits_chunk_mib, 2**40) * 2**20)
        weights = WeightFiles(path)
        check_fp8(given.fp8)
        granule = FP8_GRANULES[given.fp8]
        self._limits = step.MicrobatchLimits(given.tokens_per_microbatch, given.packing, granule)
        self._offload_snapshots = given.offload_snapshots
        self._release_gradients = given.release_gradients
        self._values, self._updates = values, 0
        self._snapshots: dict[str, dict[str, Tensor]] = {}
        self._unchanged: set[str] = set()  # snapshots under which no adapter changes anything
        self._frozen: dict[str, FrozenModel] = {}
        self._lora = given.lora
        self.adapter_scale = None if given.lora is None else given.lora.scale
        self._saving: writing.OngoingWrite | None = None
        self._world = world.join(layout, seed)
        try:
            with cpu.adapted():
                kind = ValueModel if values else PolicyModel
                self._chunks = build_model(
                    self._architecture,
                    self._world,
                    weights_dtype,
                    self._chunk_bytes,
                    given.recomputed,
                    kind,
                    given.fp8,
                    fused=self._lora is None,
                    vocab=self._vocab,
                )
                logger.info("layers: %s", layers_name())
                load_weights(self._chunks, self._architecture, self._world, weights)
                if self._lora is not None:
                    adapters.attach(self._chunks, self._architecture, self._world, self._lora, seed)
                self._identity = adapters.base_identity(self._lora, weights)
                self._model = optimizer.wrap(self._chunks, given.distributed_optimizer)
                self._optimizer = optimizer.make_optimizer(
                    self._model, adamw, given.lr, given.max_gradient_norm
                )
                if self._release_gradients:
                    offload.release_gradients(self._model)
        except BaseException:  # nobody could close a trainer that was never made
            self.close()
            raise

    def _read_config(self, path: str | Path, given: TrainerOptions, values: bool) -> None:
        """Raises ConfigError where the model cannot do what is asked."""
        config = read_config(path)
        model = self._architecture = architecture(config)
        self._vocab = known_vocab(path, model.vocab)
        given.layout.check_model(model)
        check_layers(given.lora, model)
        self.routing = router_replay.routing_of(given.router_replay, model)
        # A critic is another model
        self._replays = given.router_replay != "off" and not values
        self._balance = None if values else balance_of(given, config, model)
        self._biases = self._balance is not None and self._balance.bias_rate > 0  # they move

    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        """One optimizer step. Besides `loss`, `gradient_norm`, `lr` and the loss's metrics:
        `tokens` (without padding) of the batch and `microbatches` per rank. Raises RLFlowError
        where loss or gradients are not finite; the weights stay."""
        check_batch(batch)
        self._check(batch)
        if self._replays:
            router_replay.check_routes(batch, self._architecture)
        loss = as_loss(loss)
        tokens = int(batch.lengths.sum())
        microbatches = step.plan(batch, self._limits, self._world)
        rate = self._learning_rate(self._updates)
        gradients: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._release_gradients:
            gradients = offload.gradients_allocated(self._model)
        with cpu.adapted(), gradients:
            self._set_training(True)
            optimizer.zero_gradients(self._model, self._optimizer)
            routing: router_replay.ExpertChoice | None = None
            if self._replays:
                routing = router_replay.Replaying(self._world)
            balancing = None
            # Routers have a gradient everywhere: without this, rows that teach nothing would make
            # a whole step of the optimizer
            if self._balance is not None and teaches(batch, loss):
                balancing = Balancing(
                    self._balance, self._world, self._architecture, self._chunks, batch
                )
                routing = balancing.begin(microbatches, routing)
            metrics = step.forward_backward(
                self._model, self._world, microbatches, loss, tokens, routing
            )
            # All ranks know it: they raise together
            check_finite("loss", metrics["loss"], self._updates)
            norm = optimizer.step(self._optimizer, rate, self._updates)
            balance = {} if balancing is None else balancing.finish(moved=norm > 0)
        self._updates += norm > 0
        return {
            **finish_metrics(metrics, loss.reductions, batch),
            **balance,
            "gradient_norm": norm,
            "lr": rate,
            "tokens": float(tokens),
            "microbatches": float(len(microbatches)),
            **skipped(norm),
        }

    def score(
        self,
        batch: Batch,
        model: str = "policy",
        want: Sequence[str] = ("logprobs",),
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        recorded, want = ROUTES in want, [name for name in want if name != ROUTES]
        check_wanted(want, self._values)
        vocab = self._vocab
        check_top_k(top_k, vocab)
        if len(batch) == 0:
            return empty_scores(batch, want, top_k)
        self._check(batch)
        if model in self._frozen:
            frozen = self._frozen[model]
            with frozen.on_device(), cpu.adapted():
                return step.score(
                    frozen.chunks,
                    self._world,
                    batch,
                    self._limits,
                    want,
                    top_k,
                    min(vocab, frozen.vocab),
                )
        with self._swapped(model), cpu.adapted():
            self._set_training(False)
            score = functools.partial(
                step.score, self._model, self._world, batch, self._limits, want, top_k, vocab
            )
            if recorded:
                recording = router_replay.Recording(self._world, self._architecture, batch)
                return {**score(recording), ROUTES: recording.routes.cpu()}
            replay = self._replays and model == "policy" and ROUTES in batch.extras
            return score(router_replay.Replaying(self._world) if replay else None)

    def snapshot(self, name: str) -> None:
        check_new_name("snapshot", name, self._frozen)
        trained = trained_parameters(self._chunks, self._biases)
        values = {key: parameter.detach() for key, parameter in trained}
        held = self._snapshots.get(name, {})
        if held.keys() == values.keys():  # a GPU may have no memory for a second copy
            for key, value in values.items():
                held[key].copy_(value)
        else:
            self._snapshots[name] = self._kept(values)
        self._note_unchanged(name)

    def load_frozen(self, name: str, path: str | Path) -> None:
        check_new_name("load_frozen", name, [*self._snapshots, *self._frozen])
        dtype = next(self._chunks[0].parameters()).dtype
        with cpu.adapted():
            self._frozen[name] = FrozenModel.load(
                path, self._world, dtype, self._chunk_bytes, self._offload_snapshots
            )

    def weights(
        self, device: str | None = "cpu", merged: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        offload.empty_cache()
        rounded = None if merged is None or self._lora is None else (self._lora, merged)
        return gather_weights(self._chunks, self._architecture, self._world, device, rounded)

    def adapters_arrived(self) -> float | None:
        return None if self._lora is None else adapters.arrived(self._chunks)

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self._lora is None:
            return iter(())
        return adapters.gather_adapters(self._chunks, self._architecture, self._world, self._lora)

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
            if not wait and not self._saving.finished_everywhere():
                return False
            saving, self._saving = self._saving, None
            saving.finish()
        return True

    def load(self, path: str | Path) -> int:
        with cpu.adapted():
            state = checkpoint.load(Path(path), self._state(0), self._kept)
        self._biases |= state.biases
        moved = dict(trained_parameters(self._chunks, self._biases))  # that a snapshot may lack
        for name, values in state.snapshots.items():
            lacked = {key: now.detach() for key, now in moved.items() if key not in values}
            self._snapshots[name] = {**values, **self._kept(lacked)}
            self._note_unchanged(name)
        self._updates = state.updates
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

    def _note_unchanged(self, name: str) -> None:
        """Notes whether a snapshot is the frozen weights alone, as the reference is: no copy of
        adapters is needed then."""
        if self._lora is not None and adapters.all_zero(self._snapshots[name]):
            self._unchanged.add(name)
        else:
            self._unchanged.discard(name)

    def _state(self, step: int) -> checkpoint.TrainerState:
        world.check_joined(self._world)
        return checkpoint.TrainerState(
            world=self._world,
            architecture=self._architecture,
            modules=self._chunks,
            optimizer=self._optimizer,
            snapshots=self._snapshots,
            updates=self._updates,
            step=step,
            lora=self._identity,
            biases=self._biases,
        )

    def _set_training(self, training: bool) -> None:
        for chunk in self._model:
            chunk.train(training)

    def _check(self, batch: Batch) -> None:
        world.check_joined(self._world)
        check_tokens(batch.tokens, self._vocab)

    def _swapped(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Inside, the parameters hold a snapshot's values."""
        if name == "policy":
            return contextlib.nullcontext()
        if name == BASE and name not in self._snapshots and self._lora is not None:
            return adapters.switched_off(self._chunks)
        if name not in self._snapshots:
            raise unknown_model(name, [*self._snapshots, *self._frozen])
        if name in self._unchanged:
            return adapters.switched_off(self._chunks)
        parameters = dict(trained_parameters(self._chunks, self._biases))
        return offload.swapped(parameters, self._snapshots[name])
