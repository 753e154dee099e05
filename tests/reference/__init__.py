"""The oracle that the trainers are held to, used as a backend of a user's own is."""

ORACLE = "tests.reference.trainer:ReferenceTrainer"
"""For `trainer.backend`."""
