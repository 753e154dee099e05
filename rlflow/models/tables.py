"""The families as tables of rules, as scripts name them that were written before each family had a
file: `FAMILIES["seed_oss"] = (EMBEDDING, *DENSE_LAYER, ...)` adds one."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from rlflow.models import families
from rlflow.models.family import ModelFamily
from rlflow.models.layer_rules import (
    ATTENTION,
    BIASES,
    DENSE_LAYER,
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    K_NORM,
    LATENT_ATTENTION,
    OUTPUT,
    Q_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_GATE,
)
from rlflow.models.rules import Rule, Split, Where

__all__ = [
    "ATTENTION",
    "BIASES",
    "DENSE_LAYER",
    "DENSE_MLP",
    "EMBEDDING",
    "FAMILIES",
    "FINAL_NORM",
    "K_NORM",
    "LATENT_ATTENTION",
    "OUTPUT",
    "QKV_BIAS",
    "Q_NORM",
    "ROUTER_BIAS",
    "SHARED_GATE",
    "Rule",
    "Split",
    "Where",
]


class _RulesOfFamilies(MutableMapping[str, tuple[Rule, ...]]):
    """The rules by `model_type`. Whatever is set here is a family of which rules alone are
    known."""

    def __getitem__(self, model_type: str) -> tuple[Rule, ...]:
        return families.FAMILIES[model_type].rules

    def __setitem__(self, model_type: str, rules: tuple[Rule, ...]) -> None:
        families.FAMILIES[model_type] = ModelFamily(rules)

    def __delitem__(self, model_type: str) -> None:
        del families.FAMILIES[model_type]

    def __iter__(self) -> Iterator[str]:
        return iter(families.FAMILIES)

    def __len__(self) -> int:
        return len(families.FAMILIES)


FAMILIES = _RulesOfFamilies()
