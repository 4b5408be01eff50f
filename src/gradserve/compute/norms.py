"""How large weights are, read from their file without torch."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path

import numpy as np

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def weight_norms(file: Path) -> dict[str, float]:
    """L2 norm of all tensors of a safetensors file together ("all"), and by kind: the last name part that is no number.

    An adapter's kinds are e.g. ``q_proj.lora_B``. bfloat16 tensors are read as the upper halves of float32.
    """
    squares: dict[str, float] = {}
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            square = _square(mapped[start + first : start + last], entry["dtype"])
            for kind in ("all", _kind(name)):
                squares[kind] = squares.get(kind, 0.0) + square
    return {kind: math.sqrt(square) for kind, square in sorted(squares.items())}


def _square(data: bytes, dtype: str) -> float:
    if dtype == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype in _DTYPES:
        values = np.frombuffer(data, _DTYPES[dtype])
    else:
        return 0.0
    wide = values.astype(np.float64)
    return float(wide @ wide)


def _kind(name: str) -> str:
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    return ".".join(parts[-2:])
