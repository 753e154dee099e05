"""Trainers: the interface, the Megatron trainer, and the reference trainer that tests hold it
against."""

from rlflow.trainer.base import LossFunction, Trainer

__all__ = ["LossFunction", "Trainer"]

BUILT_IN = {
    "megatron": "rlflow.trainer.megatron:MegatronTrainer",
    "reference": "rlflow.trainer.reference:ReferenceTrainer",
}
"""Backends: name -> `module:Name`."""
