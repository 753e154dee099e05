"""Trainers: the interface, the Megatron trainer, and the reference trainer that tests hold it against."""

from rlflow.trainer.base import Loss, Trainer

__all__ = ["Loss", "Trainer"]
