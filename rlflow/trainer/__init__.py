"""Trainers: the interface and the Megatron trainer."""

from rlflow.trainer.base import LossFunction, Trainer

__all__ = ["LossFunction", "Trainer"]

BUILT_IN = {"megatron": "rlflow.trainer.megatron:MegatronTrainer"}
"""Backends: name -> `module:Name`."""
