"""How many numbers a run trains and passes through, from the headers of the base's files alone."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from gradserve.compute.catalog import BaseFacts, parameter_shapes
from gradserve.compute.checkpoints import target_modules
from gradserve.wire.ops import LoraConfig

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class ModelSize(msgspec.Struct, frozen=True):
    """``multiplied`` counts the numbers in matrices that every token is multiplied with, the head's included;
    ``trained`` those that a gradient has."""

    multiplied: int
    trained: int
    full: bool


def size_of(base: BaseFacts, lora: LoraConfig | None) -> ModelSize | None:
    """The size of a base with adapters, or (``lora`` None) trained whole; None when its files do not say.

    A token is looked up in the embedding, not multiplied with it, unless that is the head too.
    """
    shapes = parameter_shapes(Path(base.path))
    if not shapes:
        return None
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    if _EMBEDDING in matrices and _HEAD in matrices:
        del matrices[_EMBEDDING]
    multiplied = sum(map(math.prod, matrices.values()))
    if lora is None:
        return ModelSize(multiplied, sum(map(math.prod, shapes.values())), full=True)
    return ModelSize(multiplied, sum(_adapter(name, shape, lora) for name, shape in matrices.items()), full=False)


def _adapter(name: str, shape: tuple[int, ...], lora: LoraConfig) -> int:
    """Numbers in the adapter of a matrix: rank * (inputs + outputs), 0 where there is none."""
    module = _HEAD if name == _EMBEDDING else name  # an embedding that is still here is the head
    last = module.removesuffix(".weight").rpartition(".")[2]
    return lora.rank * sum(shape) if last in target_modules(lora) else 0
