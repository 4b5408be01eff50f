"""Checks of runs that train all parameters of their base; see docs/decisions/0009."""

from __future__ import annotations

from gradserve.compute.catalog import BaseFacts
from gradserve.gateway.bodies import ExtensionBody, LoraBody
from gradserve.wire.errors import Invalid

_OBJECTS = 7
"""Arrays of the model's size that exist as objects while the optimizer steps: weights, two moments, the gradient, and
the new weights and moments beside the old."""
_SUMS = 1
"""The worker's own sum of gradients."""
_BYTES = 4
_GIB = 2**30


def trains_all_parameters(extension: ExtensionBody | None, lora: LoraBody | None) -> bool:
    """Whether create_model asks for that. Raises Invalid when it asks for adapters as well."""
    if extension is None or extension.parameters == "lora":
        return False
    if extension.value_head:
        raise Invalid(
            "full.value_head",
            "A value head is trained beside adapters only.",
            field="gradserve.value_head",
            fix="Send a lora_config, or leave value_head out.",
        )
    if lora is not None:
        raise Invalid(
            "full.lora_config",
            'gradserve.parameters is "full", and there is a lora_config.',
            field="lora_config",
            fix="Send one of them: adapters or all parameters.",
        )
    return True


def full_parameters_fit(facts: BaseFacts, free_memory: int, free_for_objects: int) -> None:
    """Refuse a run that could not make its first step. Bytes; activations come on top and are not known yet."""
    if facts.parameters is None:
        return
    array = facts.parameters * _BYTES
    _refuse_beyond(facts, (_OBJECTS + _SUMS) * array, free_memory, "of memory")
    _refuse_beyond(facts, _OBJECTS * array, free_for_objects, "in the object store's fast tier")


def _refuse_beyond(facts: BaseFacts, needed: int, free: int, where: str) -> None:
    if needed > free:
        raise Invalid(
            "full.memory",
            f"Training all {facts.parameters:,} parameters of {facts.name} takes {needed / _GIB:.2f} GiB {where} "
            f"(float32 weights, gradient and moments, old and new side by side); {free / _GIB:.2f} GiB are free.",
            field="gradserve.parameters",
            fix="Train adapters (send lora_config), or a smaller base.",
        )
