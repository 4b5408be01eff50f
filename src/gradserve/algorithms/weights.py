"""A module's tensors as the bytes of a safetensors file, and back into the module."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

    Module = TypeVar("Module", bound=nn.Module)


def packed(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file; ``metadata`` goes into its header."""
    from safetensors.torch import save

    file: bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    return file


def unpacked(file: bytes) -> dict[str, Tensor]:
    """The inverse, without the metadata."""
    from safetensors.torch import load

    tensors: dict[str, Tensor] = load(file)
    return tensors


def digest_of(file: bytes) -> str:
    """The name by which the server knows these bytes."""
    return hashlib.sha256(file).hexdigest()


def trained(module: Module, weights: Mapping[str, Tensor]) -> Module:
    """A copy of the module with the weights of a run; others among them are left out.

    Tied parameters are one in a run, under the first of their names.
    """
    first: dict[int, str] = {}
    state = module.state_dict(keep_vars=True)
    copied = copy.deepcopy(module)
    copied.load_state_dict({name: weights[first.setdefault(id(tensor), name)] for name, tensor in state.items()})
    return copied
