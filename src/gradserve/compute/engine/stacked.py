"""Many small groups of rows, each with its own adapter, in two batched products instead of two products per adapter.

In a decode pass over hundreds of tenants every adapter has a row or two; one call per adapter and module would cost
more than the base. Ranks may differ (zeros fill up) and so may targets (an adapter without one has zeros there).
Letters: E adapters, n rows of the largest group, R the largest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from gradserve.compute.engine.lora import Adapter, Route

SMALL = 16
"""Rows up to which a group is stacked; larger ones fill a product of their own."""
ENOUGH = 5
"""Groups from which on stacking pays. One core: 0.9x to 1.4x with 4 groups, 1.3x to 4x with 8, 2x to 9x with 64."""


class Stack:
    """The matrices of some adapters side by side, made per module at its first use, for passes without gradients."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = tuple(adapters)
        self._places = {id(adapter): place for place, adapter in enumerate(adapters)}
        self._pairs: dict[str, tuple[Tensor, Tensor] | None] = {}

    def serves(self, routes: Sequence[Route]) -> bool:
        """Whether all routes' adapters are in it, and not much else."""
        known = all(id(route.adapter) in self._places for route in routes)
        return known and len(self.adapters) <= 2 * len(routes)

    def place(self, route: Route) -> int:
        """The adapter's index in the stack."""
        return self._places[id(route.adapter)]

    def pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """A^T [E, in, R] and scale * B^T [E, R, out] of a module; None when no adapter has it."""
        if name not in self._pairs:
            self._pairs[name] = self._make(name)
        return self._pairs[name]

    def _make(self, name: str) -> tuple[Tensor, Tensor] | None:
        pairs = [adapter.pairs.get(name) for adapter in self.adapters]
        some = next((pair for pair in pairs if pair is not None), None)
        if some is None:
            return None
        absent = some[0][:0], some[1].t()[:0]
        a = [absent[0] if pair is None else pair[0] for pair in pairs]
        b = [
            absent[1] if pair is None else pair[1].t() * adapter.scale
            for pair, adapter in zip(pairs, self.adapters, strict=True)
        ]
        return pad_sequence(a, batch_first=True).transpose(1, 2).contiguous(), pad_sequence(b, batch_first=True)


@dataclass(frozen=True)
class Groups:
    """The rows of one pass by their place in a stack. ``index`` [E, n] names rows of the pass, row 0 where a group ends
    early; ``flat`` are the cells of it that count (None: all), ``rows`` the rows they name."""

    stack: Stack
    index: Tensor
    flat: Tensor | None
    rows: Tensor

    @classmethod
    def of(cls, stack: Stack, routes: Sequence[Route], device: torch.device) -> Groups:
        """Routes of adapters that the stack serves."""
        members = [torch.empty(0, dtype=torch.int64, device=device)] * len(stack.adapters)
        for route in routes:
            members[stack.place(route)] = route.indices(device)
        index = pad_sequence(members, batch_first=True)
        counts = torch.tensor([len(rows) for rows in members], device=device)
        valid = (torch.arange(index.shape[1], device=device) < counts[:, None]).view(-1)
        if bool(valid.all()):
            return cls(stack, index, None, index.view(-1))
        flat = valid.nonzero()[:, 0]
        return cls(stack, index, flat, index.view(-1)[flat])

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        """y += each row's own low-rank product of x; x [N, in], y [N, out]."""
        pair = self.stack.pair(name)
        if pair is None:
            return
        a, b = pair
        z = torch.bmm(torch.bmm(x[self.index].to(a.dtype), a), b).flatten(0, 1)
        if self.flat is not None:
            z = z[self.flat]
        if z.dtype == y.dtype:
            y.index_add_(0, self.rows, z)
        else:  # a half-precision base: summed in float32, rounded once
            y[self.rows] = (y[self.rows] + z).to(y.dtype)
