"""Rows of a request laid end to end, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gradserve.wire.data import Row, tokens_of
from gradserve.wire.errors import Invalid


@dataclass(frozen=True)
class Packed:
    """Rows laid end to end. ``targets`` is int64 [N, K]; ``widths`` is each row's own K, None for a flat [N]."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    inputs: dict[str, Tensor]
    lengths: list[int]
    widths: list[int | None]

    @property
    def count(self) -> int:
        """N, the number of tokens."""
        return self.tokens.numel()


def pack(rows: list[Row], device: torch.device) -> Packed:
    """Raises Invalid (with the row's index) when an input's shape doesn't fit its row."""
    if not rows:
        raise Invalid("no_rows", "there are no rows", field="data")
    lengths = [row.length for row in rows]
    targets = [_input(row, index, "target_tokens") for index, row in enumerate(rows)]
    width = max(1 if target.ndim == 1 else target.shape[1] for target in targets)
    return Packed(
        tokens=_tensor(np.concatenate([tokens_of(row) for row in rows]), device, torch.int64),
        positions=torch.cat([torch.arange(length, device=device) for length in lengths]),
        targets=_tensor(np.concatenate([_widen(target, width) for target in targets]), device, torch.int64),
        inputs=_pack_inputs(rows, width, device),
        lengths=lengths,
        widths=[None if target.ndim == 1 else target.shape[1] for target in targets],
    )


def bare(rows: list[Row]) -> list[Row]:
    """The rows with their targets alone."""
    return [Row(row.tokens, {"target_tokens": row.inputs["target_tokens"]}) for row in rows]


def _pack_inputs(rows: list[Row], width: int, device: torch.device) -> dict[str, Tensor]:
    """float32 [N, K] by name. An input that only some rows have is a mistake, except weights, which are then ones."""
    names = {name for row in rows for name in row.inputs} - {"target_tokens"}
    packed = {}
    for name in sorted(names):
        columns = []
        for index, row in enumerate(rows):
            if name in row.inputs:
                column = _input(row, index, name)
            elif name == "weights":
                column = np.ones_like(_input(row, index, "target_tokens"), dtype=np.float32)
            else:
                raise Invalid("missing_input", f"some rows have {name!r}, this one does not", index=index)
            columns.append(_widen(column, width))
        packed[name] = _tensor(np.concatenate(columns), device, torch.float32)
    # Cells that only fill up a narrower row must not count: without given weights they would be ones.
    if width > 1 and "weights" not in packed:
        ones = [
            _widen(np.ones_like(_input(r, i, "target_tokens"), dtype=np.float32), width) for i, r in enumerate(rows)
        ]
        packed["weights"] = _tensor(np.concatenate(ones), device, torch.float32)
    return packed


def _input(row: Row, index: int, name: str) -> NDArray[np.generic]:
    if name not in row.inputs:
        raise Invalid("missing_input", f"the loss needs {name!r}", field=name, index=index)
    values = row.inputs[name].numpy()
    if values.ndim not in (1, 2) or values.shape[0] != row.length or row.length == 0:
        raise Invalid(
            "bad_shape", f"{name!r} has shape {values.shape} for {row.length} tokens", field=name, index=index
        )
    return values


def _widen(values: NDArray[np.generic], width: int) -> NDArray[np.generic]:
    """[n] or [n, k] -> [n, width], zeros at the right."""
    columns = values[:, None] if values.ndim == 1 else values
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))


def _tensor(values: NDArray[np.generic], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)


def join(parts: list[Packed]) -> Packed:
    """Several requests as one, in order; their inputs stay with them, since only their own losses know those."""
    width = max(part.targets.shape[1] for part in parts)
    return Packed(
        tokens=torch.cat([part.tokens for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        targets=torch.cat([F.pad(part.targets, (0, width - part.targets.shape[1])) for part in parts]),
        inputs={},
        lengths=[length for part in parts for length in part.lengths],
        widths=[width for part in parts for width in part.widths],
    )
