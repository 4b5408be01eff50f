"""safetensors without torch, against the library and against the engine's own writer."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from safetensors.torch import save as save_torch

from gradserve.compute import safetensors_file
from gradserve.compute.engine import tensorfile
from gradserve.compute.safetensors_file import BadFile

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([[0.5]], np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def test_what_is_written_is_what_the_engine_writes() -> None:
    """So an adapter that leaves and comes back is the same object."""
    data = safetensors_file.dump(ARRAYS)
    assert data == tensorfile.dump({name: torch.from_numpy(array) for name, array in ARRAYS.items()})
    back = load(data)
    assert back.keys() == ARRAYS.keys()
    assert all(np.array_equal(back[name], ARRAYS[name]) for name in ARRAYS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_is_read_as_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -0.1], [3e-5, 40000.0]]).to(dtype)
    data = save_torch({"x": values, "other": torch.zeros(3)})
    (tmp_path / "f").write_bytes(data)
    for found in (safetensors_file.load(data)["x"], safetensors_file.read_one(tmp_path / "f", "x")):
        assert torch.equal(torch.from_numpy(found.copy()), values.float())


def file(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
        file([]),
        file({"x": 1}),
        file({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        file({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(4)),
        file({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        file({"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, bytes(4)),
        file({"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, bytes(4)),
        file({"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        save({"x": np.ones(3, np.float32)})[:-1],
    ],
)
def test_what_is_no_whole_file_is_refused(data: bytes) -> None:
    with pytest.raises(BadFile):
        safetensors_file.load(data)
