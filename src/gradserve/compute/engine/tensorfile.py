"""safetensors files without a copy too many: 8 bytes of length, a JSON header, the tensors' bytes end to end.

An adapter has hundreds of small tensors, and every step writes three such files and maps them again. The library's
own functions handle tensors one by one (measured: 1.4 ms to write and 1.3 ms to read the 58 tensors of a tiny model's
adapter); here they are one array.
"""

from __future__ import annotations

import json
import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradserve.compute import safetensors_file
from gradserve.compute.engine.lora import Tensors

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that objects are made of."""

_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


def dump(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytearray:
    """The bytes of a safetensors file; the same tensors give the same bytes, whatever their order in the dict."""
    header, places = layout(tensors, metadata)
    data = bytearray(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
    data[: len(header)] = header
    if len(data) > len(header):
        whole = torch.frombuffer(data, dtype=torch.uint8, offset=len(header))
        torch.cat([tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8) for name in places], out=whole)
    return data


def layout(tensors: Tensors, metadata: dict[str, str] | None) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file of such tensors (meta tensors will do), and where in it each one starts, in order."""
    return safetensors_file.layout({name: (_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}, metadata)


def load(file: Path, device: torch.device) -> tuple[Tensors, dict[str, str]]:
    """Tensors and metadata of a file that :func:`dump` or the library wrote.

    On a CPU the tensors are the file's pages, read when touched.
    """
    with open(file, "rb") as opened:
        # A private mapping: whoever wrote into a tensor by mistake would get a page of its own, not change the object.
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    (length,) = _LENGTH.unpack_from(mapped)
    start = _LENGTH.size + length
    header = json.loads(mapped[_LENGTH.size : start])
    metadata = header.pop(_METADATA, {})
    return {name: _view(mapped, start, entry).to(device) for name, entry in header.items()}, metadata


def _view(mapped: mmap.mmap, start: int, entry: dict[str, Any]) -> Tensor:
    shape: list[int] = entry["shape"]
    count, first = prod(shape), entry["data_offsets"][0]
    dtype = _TYPES[entry["dtype"]]
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + first).view(shape)
