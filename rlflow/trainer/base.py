"""The Trainer interface, how one is made from a HuggingFace directory, and a policy with a critic
beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.components import TRAINER
from rlflow.devices.gpu_buckets import GpuBucket, GpuSharing, gpu_buckets
from rlflow.errors import CheckpointError, ConfigError, did_you_mean
from rlflow.models.adapter import adapter_update
from rlflow.trainer.options import CriticOptions, Routing, TrainerOptions, section
from rlflow.types import Batch, Loss, LossResult, PolicyOutput, as_loss

BASE = "base"
"""The model below the adapters, for `Trainer.score`."""
CRITIC = "critic"
"""The folder of the critic in a checkpoint."""

LossFunction = Callable[[PolicyOutput, Batch], LossResult]
"""(PolicyOutput, Batch) -> per-token loss (B, T) and metrics, (B, T) each. A `Loss` says besides
what it `needs`."""


class Trainer(ABC):
    """Holds the policy, its optimizer and frozen copies of it. Every method is a collective: all
    ranks call it with the same arguments and get the same answers."""

    exports: bool = True
    """Whether `weights` are what was learned, so that a run writes them at its end."""

    routing: Routing | None = None
    """Of a policy with experts, where `score` can be asked for them (`routes`)."""

    adapter_scale: float | None = None
    """What the product of the adapters' factors is multiplied by; None where all weights are
    trained."""

    @staticmethod
    def from_pretrained(
        path: str | Path,
        backend: str = "megatron",
        *,
        critic: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Trainer:
        """A trainer over the weights of a HuggingFace directory. backend: megatron, one of an
        installed package, `package.module:Name` or `file.py:Name`. options: those of
        `TrainerOptions`, dtype, seed, trust_remote_code. critic: `CriticOptions` of a critic beside
        it (`ActorCritic`). Raises ConfigError."""
        make = TRAINER.resolve(backend, "trainer.backend")
        if critic is None:
            return make(path, **options)
        own = section(CriticOptions, critic, "algorithm.critic")
        policy = make(path, **options)
        try:
            values = make(path, **{**options, "lr": own.lr, "schedule": own.schedule}, values=True)
        except BaseException:  # nobody could close it any more
            policy.close()
            raise
        return ActorCritic(policy, values, own.warmup_updates)

    @classmethod
    def check_options(cls, options: TrainerOptions, ranks: int = 0) -> None:
        """Raises ConfigError for what this backend cannot do."""

    @abstractmethod
    def score(
        self,
        batch: Batch,
        model: str = "policy",
        want: Sequence[str] = ("logprobs",),
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        """Without gradients: {name: (B, T) float32 on the CPU}; position t scores token t, at the
        row's temperature; of tokens that are not `Batch.wanted`, 0 where that saves work. model:
        policy, the name of a snapshot or of a frozen model, or with adapters `base`, the policy
        without them. want:
        logprobs, entropy; with a critic values (of the state before the token); with `routing`
        routes (B, T, layers, k), the experts that the policy chooses itself. top_k: `top_ids`
        (B, T, k) too, the likeliest tokens in the place of each, and `top_logprobs`. Raises
        ConfigError for a k above the vocabulary."""

    @abstractmethod
    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        """One optimizer step that minimizes sum(weights * loss). Returns loss, gradient_norm, lr
        and the loss's metrics, each reduced as the loss says: the mean under the weights, or the
        maximum or sum over the trained tokens."""

    @abstractmethod
    def snapshot(self, name: str) -> None:
        """Freezes a copy of today's policy under a name (reference, proximal); it is part of the
        checkpoint."""

    def load_frozen(self, name: str, path: str | Path) -> None:
        """Loads the model of a HuggingFace directory beside the policy, for `score` alone. It may
        have another size and another family. It is not part of the checkpoint. Raises ConfigError
        where the trainer has none, it cannot be split as the policy is, or the name is in use;
        ModelError."""
        raise ConfigError(
            f"{type(self).__name__}: it cannot score another model than its policy; take "
            "trainer.backend=megatron."
        )

    @abstractmethod
    def weights(
        self, device: str | None = "cpu", merged: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Today's policy as (HuggingFace name, full tensor) pairs, one at a time; adapters are
        merged in. device: where copies of them are made; None: what the trainer has, where it has
        it, which is not to be written to and changes with the next update. merged: what layers
        with adapters are rounded to; None: what the frozen weights are in, of which bfloat16 loses
        most of what adapters have learned in few updates (`adapters_arrived`)."""

    def gpu_weights(
        self, how: GpuSharing, merged: torch.dtype | None = None
    ) -> Iterator[GpuBucket]:
        """Today's policy in memory of its GPUs, for other processes to open; see `gpu_buckets`.
        merged: as for `weights`."""
        # A backend without adapters need not know of it
        made = self.weights(None) if merged is None else self.weights(None, merged)
        return gpu_buckets(made, how)

    def adapters_arrived(self) -> float | None:
        """The share of what adapters add to their layers that the last `weights` held (`Arrival`);
        None without adapters, and before they add anything."""
        return None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters that are trained (`trainer.lora`), else nothing: for each target of each
        layer, by its HuggingFace name, `LAYER.lora_A.weight` (rank, in) and `LAYER.lora_B.weight`
        (out, rank), full tensors on the CPU."""
        return iter(())

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Today's policy for engines that take adapters alone (`Engine.takes_adapters`) over the
        weights that training began from: their scale, then `adapter_weights`. Raises ConfigError
        where all weights are trained."""
        if self.adapter_scale is None:
            raise ConfigError(
                "trainer.adapters: all weights are trained; give engines trainer.weights(), or set "
                "trainer.lora."
            )
        return adapter_update(self.adapter_scale, self.adapter_weights())

    @abstractmethod
    def save(self, path: str | Path, step: int) -> None:
        """Writes model, optimizer, snapshots, RNG into the directory `path` (made here). Raises
        StorageError."""

    def begin_save(self, path: str | Path, step: int) -> None:
        """The first half of a save: may return once the state is copied, so that training goes on
        while the copy is written. Only `finish_save` makes a checkpoint of it. Raises
        StorageError."""
        self.save(path, step)

    def finish_save(self, wait: bool = True) -> bool:
        """Ends a begun save, if there is one; without `wait`, only if everything is written by now.
        Returns whether no save is under way any more. Raises StorageError where the save failed."""
        return True

    @abstractmethod
    def load(self, path: str | Path) -> int:
        """Restores what `save` wrote, into any layout; returns its step. Snapshots that it does not
        hold stay.

        Raises DamagedCheckpointError where a file is missing or not what was written,
        CheckpointError where the checkpoint is missing or another model's."""

    def peak_memory(self) -> dict[str, float]:
        """Where the trainer runs in processes of its own: {phase: the highest peak among them since
        the last call, GiB}."""
        return {}

    def close(self) -> None:
        """Frees process groups and memory."""


def check_wanted(want: Sequence[str], critic: bool) -> None:
    """Raises ConfigError for what a trainer cannot score: a policy gives logprobs and entropy, a
    critic values."""
    known = ("values",) if critic else ("logprobs", "entropy")
    for name in want:
        if name == "values" and not critic:
            raise ConfigError(
                "trainer.score: values come from a critic, found none; set algorithm.critic={lr: "
                "1e-5}."
            )
        if name not in known:
            raise ConfigError(
                f"trainer.score: expected {' or '.join(known)}, found "
                f"'{name}'.{did_you_mean(name, known)}"
            )


class ActorCritic(Trainer):
    """A policy and a critic: a second model of the same backend and layout, with a value head in
    place of the output layer, its own optimizer, learning rate and gradient norm. It starts from
    the policy's weights and a head of zeros.

    `update` gives each the terms of the loss that are about it (`Loss.split`). The first
    `warmup_updates` updates are the critic's alone; checkpoints hold it in a folder of its own;
    `weights`, snapshots and what follows from them are the policy's."""

    def __init__(self, policy: Trainer, critic: Trainer, warmup_updates: int = 0) -> None:
        self.policy, self.critic, self.warmup_updates = policy, critic, warmup_updates
        self.critic_updates, self.routing = 0, policy.routing

    def score(
        self,
        batch: Batch,
        model: str = "policy",
        want: Sequence[str] = ("logprobs",),
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        of_policy = tuple(name for name in want if name != "values")
        scores = self.policy.score(batch, model, of_policy, top_k) if of_policy or top_k else {}
        return scores | self.critic.score(batch, want=("values",)) if "values" in want else scores

    def update(self, batch: Batch, loss: Loss | LossFunction) -> dict[str, float]:
        """Metrics are the policy's, those that only the critic's terms have, and the critic's loss,
        gradient_norm and lr as `critic_...`. While the critic is warmed up alone, lr is 0 and the
        policy has no others."""
        of_policy, of_critic = as_loss(loss).split()
        metrics, values = {"lr": 0.0}, {}
        warming = of_critic is not None and self.critic_updates < self.warmup_updates
        if of_critic is not None:
            values = self.critic.update(batch, of_critic)
            self.critic_updates += 1
        if of_policy is not None and not warming:
            metrics = self.policy.update(batch, of_policy)
        values.pop("updates_skipped", None)
        own = ("loss", "gradient_norm", "lr")
        named = {f"critic_{name}" if name in own else name: value for name, value in values.items()}
        return {**named, **metrics}

    def snapshot(self, name: str) -> None:
        self.policy.snapshot(name)

    def load_frozen(self, name: str, path: str | Path) -> None:
        self.policy.load_frozen(name, path)

    def weights(
        self, device: str | None = "cpu", merged: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if merged is None:
            return self.policy.weights(device)
        return self.policy.weights(device, merged)

    def adapters_arrived(self) -> float | None:
        return self.policy.adapters_arrived()

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.adapter_weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.adapters()

    def save(self, path: str | Path, step: int) -> None:
        self.policy.save(path, step)
        self.critic.save(Path(path) / CRITIC, self.critic_updates)

    def begin_save(self, path: str | Path, step: int) -> None:
        self.policy.begin_save(path, step)
        # Its step is the count of its updates
        self.critic.begin_save(Path(path) / CRITIC, self.critic_updates)

    def finish_save(self, wait: bool = True) -> bool:
        return self.policy.finish_save(wait) & self.critic.finish_save(wait)

    def load(self, path: str | Path) -> int:
        if not (Path(path) / CRITIC).is_dir():
            raise CheckpointError(
                f"{path}: expected a critic in it, found none: it was written without "
                "algorithm.critic. Begin a new run from its export, or resume without a critic."
            )
        step = self.policy.load(path)
        self.critic_updates = self.critic.load(Path(path) / CRITIC)
        return step

    def peak_memory(self) -> dict[str, float]:
        return self.policy.peak_memory()

    def close(self) -> None:
        self.critic.close()
        self.policy.close()
