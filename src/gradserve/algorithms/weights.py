"""A module's tensors as the bytes of a safetensors file, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def packed(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file; ``metadata`` goes into its header."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)


def unpacked(file: bytes) -> dict[str, Tensor]:
    """The inverse, without the metadata."""
    from safetensors.torch import load

    return load(file)


def digest_of(file: bytes) -> str:
    """The name by which the server knows these bytes."""
    return hashlib.sha256(file).hexdigest()
