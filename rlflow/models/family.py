"""What rlflow knows of a family of models."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.models.rules import Rule, Where


@dataclass(frozen=True)
class Family:
    """What is particular to the models of one `model_type`; docs/add_a_model_family.md shows how to
    add one.

    rules: of which HuggingFace tensors Megatron's are made, in the order of a forward pass. They
    also say which parts the layers have."""

    rules: tuple[Rule, ...]

    def has(self, rule: Rule) -> bool:
        """Whether the family makes the rule's Megatron tensor, under whatever names of its own."""
        return any(own.stands_for(rule) for own in self.rules)

    @property
    def has_experts(self) -> bool:
        return any(rule.where is Where.SPARSE for rule in self.rules)
