"""safetensors without torch: the header that every file of ours starts with, and small files as numpy arrays.

A file is 8 bytes of length (little-endian), a JSON header, the tensors' bytes end to end.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float32]]

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}
"""The dtypes that objects are made of."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_METADATA = "__metadata__"


class BadFile(ValueError):
    """The bytes are not a whole safetensors file of dtypes that are read here; the message says what is wrong."""


def layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file of such tensors, (dtype, shape) by name, and where in it each one starts, in order.

    Larger items come first, as in the library's files: then all are aligned.
    """
    entries: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    offsets: dict[str, int] = {}
    at = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-ITEM_BYTES[item[1][0]], item[0])):
        end = at + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        offsets[name] = at
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def dump(arrays: Arrays) -> bytes:
    """The bytes of a file; the same arrays give the same bytes, and those that the engine would write."""
    header, places = layout({name: ("F32", array.shape) for name, array in arrays.items()}, None)
    return b"".join([header, *(np.ascontiguousarray(arrays[name], "<f4").tobytes() for name in places)])


def entries_of(file: Path) -> dict[str, Any]:
    """dtype, shape and data_offsets of a file's tensors by name, from its header alone."""
    with open(file, "rb") as opened:
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        return _entries(opened.read(length))


def read_one(file: Path, name: str) -> NDArray[np.float32]:
    """One tensor of a file, without reading the others. Raises KeyError, BadFile."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start = _LENGTH.size + _LENGTH.unpack_from(mapped)[0]
        entry = _entries(mapped[_LENGTH.size : start])[name]
        first, end = entry["data_offsets"]
        moved = entry | {"data_offsets": [0, end - first]}
        return _array(name, moved, memoryview(mapped[start + first : start + end]))


def load(data: bytes) -> Arrays:
    """The tensors of a file as float32, whichever float they are stored in. Raises BadFile."""
    if len(data) < _LENGTH.size:
        raise BadFile(f"{len(data)} bytes are too few for a safetensors file")
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    if start > len(data):
        raise BadFile(f"its header would be {start - _LENGTH.size} bytes long, and the file has only {len(data)}")
    body = memoryview(data)[start:]
    return {name: _array(name, entry, body) for name, entry in _entries(data[_LENGTH.size : start]).items()}


def described(data: bytes) -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of each tensor of a file that is whole: the tensors' bytes lie end to end. Raises BadFile."""
    if len(data) < _LENGTH.size or (start := _LENGTH.size + _LENGTH.unpack_from(data)[0]) > len(data):
        raise BadFile("its header is not all there")
    found: dict[str, tuple[str, list[int]]] = {}
    spans = []
    for name, entry in _entries(data[_LENGTH.size : start]).items():
        try:
            dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            fits = all(size >= 0 for size in shape) and end - first == prod(shape) * ITEM_BYTES[dtype]
        except (KeyError, TypeError, ValueError) as error:
            raise BadFile(f"tensor {name!r} is not described as one of {', '.join(ITEM_BYTES)}") from error
        if not fits:
            raise BadFile(f"the bytes of tensor {name!r} are not those of its shape")
        found[name] = (dtype, shape)
        spans.append((first, end))
    at = 0
    for first, end in sorted(spans):
        if first != at:
            raise BadFile("its tensors do not lie end to end")
        at = end
    if at != len(data) - start:
        raise BadFile("it is cut short, or has bytes to spare")
    return found


def _entries(header: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise BadFile("its header is not JSON") from error
    if not isinstance(entries, dict):
        raise BadFile("its header is not a JSON object")
    entries.pop(_METADATA, None)
    return entries


def _array(name: str, entry: Any, body: memoryview) -> NDArray[np.float32]:
    try:
        dtype, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not 0 <= first <= end <= len(body) or end - first != prod(shape) * ITEM_BYTES[dtype]:
            raise BadFile(f"the bytes of tensor {name!r} are not all there")
        return _FLOATS[dtype](body[first:end]).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadFile):
            raise
        raise BadFile(f"tensor {name!r} is not described as float32, float16, bfloat16 or float64") from error


def _from_bfloat16(data: memoryview) -> NDArray[np.float32]:
    """A bfloat16 is the upper half of a float32."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


_FLOATS = {
    "F64": lambda data: np.frombuffer(data, "<f8").astype(np.float32),
    "F32": lambda data: np.frombuffer(data, "<f4").astype(np.float32, copy=False),
    "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
    "BF16": _from_bfloat16,
}
