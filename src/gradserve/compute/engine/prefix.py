"""Keys and values of prompts and conversations that were computed before, for whoever starts with the same tokens.

Blocks of BLOCK tokens, each named by a hash chain: SHA-256 over the name of the block before it and its own tokens,
beginning with the digest of the weights. So a name stands for (weights, all tokens up to the block's end), and other
weights never meet it. Letters: L layers, Hkv key heads, D head size; a block is [L, 2 (key, value), Hkv, BLOCK, D].

Invariant: in order of last use a block stands before the blocks it continues, so the block that is dropped first is
always the end of a chain and what remains can always be found.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 16
"""Tokens of a block."""


def chain(weights: str | None, ids: NDArray[np.int32]) -> list[bytes]:
    """The names of the full blocks of ``ids`` under these weights (None: the base alone)."""
    names: list[bytes] = []
    name = hashlib.sha256((weights or "base").encode()).digest()
    data = np.ascontiguousarray(ids, dtype="<i4").tobytes()
    for end in range(4 * BLOCK, len(data) + 1, 4 * BLOCK):
        name = hashlib.sha256(name + data[end - 4 * BLOCK : end]).digest()
        names.append(name)
    return names


class PrefixCache:
    """The blocks, least recently used first. Says nothing about how many there may be: its owner drops them."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def tokens(self) -> int:
        """Token places held."""
        return BLOCK * len(self._blocks)

    def match(self, names: Sequence[bytes]) -> int:
        """How many blocks from the start of the chain are here."""
        return next((index for index, name in enumerate(names) if name not in self._blocks), len(names))

    def touch(self, names: Sequence[bytes]) -> None:
        """Note the use of a chain: its end first, so that it also goes first."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def read(self, names: Sequence[bytes], into: Tensor) -> None:
        """Copy these blocks, all of which are here, to the start of ``into`` [L, 2, Hkv, P, D]."""
        for index, name in enumerate(names):
            into[:, :, :, BLOCK * index : BLOCK * (index + 1)] = self._blocks[name]

    def put(self, name: bytes, layers: Sequence[Tensor], index: int) -> None:
        """Keep block ``index`` of a sequence whose layers [2, Hkv, T, D] are given."""
        self._blocks[name] = torch.stack([layer[:, :, BLOCK * index : BLOCK * (index + 1)] for layer in layers])

    def oldest(self) -> bytes | None:
        """The block to go first."""
        return next(iter(self._blocks), None)

    def drop(self) -> None:
        """Forget the oldest block."""
        self._blocks.popitem(last=False)
