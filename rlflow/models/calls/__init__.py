"""Forms in which models write calls of tools, one file each, and which of them a chat template
has."""

from __future__ import annotations

from rlflow.models.calls import (
    deepseek,
    harmony,
    json_blocks,
    json_objects,
    key_blocks,
    mistral,
    pythonic,
    xml_blocks,
)
from rlflow.models.calls.form import CallForm

FORMS: tuple[CallForm, ...] = (
    xml_blocks.FORM,
    key_blocks.FORM,
    mistral.FORM,
    deepseek.FORM,
    harmony.FORM,
    pythonic.FORM,
    json_blocks.FORM,
    json_objects.FORM,
)
"""A template is of the first form that has a mark in it: those that share a mark with another stand
in front of it."""


def form_of(template: str) -> CallForm | None:
    """The form of calls that a chat template writes; None where none of the marks is in it."""
    for form in FORMS:
        if any(mark in template for mark in form.marks):
            return form
    return None
