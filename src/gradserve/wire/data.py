"""Arrays and rows as they travel and as the journal keeps them.

An :class:`Array` is raw little-endian bytes with a dtype and a shape, so that a batch is decoded by
``numpy.frombuffer`` and never becomes a Python list of numbers.

>>> tokens_of(Row(tokens=as_tokens([5, 6, 7]), inputs={})).tolist()
[5, 6, 7]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

DType = Literal["float32", "int64", "int32"]

Tokens = NDArray[np.int32]


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A dense array: ``data`` holds ``prod(shape)`` little-endian items of ``dtype`` in row-major order."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> Array:
        """The Array that holds ``values``; float64 is narrowed to float32."""
        if values.dtype == np.float64:
            values = values.astype(np.float32)
        name = values.dtype.name
        if name not in ("float32", "int64", "int32"):
            raise TypeError(f"an Array holds float32, int64 or int32, not {name}")
        return cls(name, values.shape, np.ascontiguousarray(values).tobytes())  # type: ignore[arg-type]

    def numpy(self) -> NDArray[np.generic]:
        """A read-only numpy view of the bytes, without a copy."""
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One training example ("datum").

    ``tokens`` are the N input ids (int32). Each input of the loss has shape [N] or [N, K]; position i of an
    input belongs to the prediction made *at* position i (the client has already shifted the targets).
    """

    tokens: bytes
    inputs: dict[str, Array]

    @property
    def length(self) -> int:
        """N, the number of input tokens."""
        return len(self.tokens) // 4


def tokens_of(row: Row) -> Tokens:
    """The ids of a row, int32 [N], read-only."""
    return np.frombuffer(row.tokens, dtype="<i4")


def as_tokens(ids: Iterable[int] | Tokens) -> bytes:
    """Ids as little-endian int32 bytes."""
    return np.asarray(list(ids) if not isinstance(ids, np.ndarray) else ids, dtype="<i4").tobytes()
