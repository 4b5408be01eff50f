"""The order of a pass's tokens: by adapter, so that each adapter's tokens lie together and are routed as one slice.

Within an adapter come first the decoding rows, pool by pool in slot order, then the pieces of stems.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradserve.compute.engine.kv import Pool
from gradserve.compute.engine.lora import Adapter
from gradserve.compute.engine.sequences import Sequence, Stem


@dataclass(frozen=True)
class Piece:
    """The next ``count`` tokens of a stem."""

    stem: Stem
    count: int


@dataclass
class Arrangement:
    """A pass, token by token.

    ``runs`` are (adapter, number of tokens) in token order. ``rows`` and ``pieces`` come with the index of their
    first token, in token order; ``slots[i]`` lists the token of each slot of pool i.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    runs: list[tuple[Adapter | None, int]] = field(default_factory=list)
    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    pieces: list[tuple[Piece, int]] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)


@dataclass
class _Group:
    """What one adapter has in the pass; rows with the index of their pool."""

    adapter: Adapter | None
    rows: list[tuple[int, Sequence]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


def arrange(pools: list[Pool], pieces: list[Piece]) -> Arrangement:
    """Order a pass in which every row of ``pools`` decodes its newest token and ``pieces`` are prefilled."""
    made = Arrangement(slots=[[0] * len(pool.rows) for pool in pools])
    for group in _groups(pools, pieces):
        start = len(made.tokens)
        for pool, row in group.rows:
            at = len(made.tokens)
            made.slots[pool][row.slot] = at
            made.rows.append((row, at))
            made.tokens.append(row.tokens[-1])
            made.positions.append(row.cached)
        for piece in group.pieces:
            first, end = piece.stem.done, piece.stem.done + piece.count
            made.pieces.append((piece, len(made.tokens)))
            made.tokens += piece.stem.ids[first:end].tolist()
            made.positions += range(first, end)
        made.runs.append((group.adapter, len(made.tokens) - start))
    return made


def _groups(pools: list[Pool], pieces: list[Piece]) -> list[_Group]:
    """One for each adapter (compared by identity), as they appear."""
    groups: dict[int, _Group] = {}

    def of(adapter: Adapter | None) -> _Group:
        key = id(adapter)
        if key not in groups:
            groups[key] = _Group(adapter)
        return groups[key]

    for index, pool in enumerate(pools):
        for row in pool.rows:
            of(row.request.adapter).rows.append((index, row))
    for piece in pieces:
        of(piece.stem.request.adapter).pieces.append(piece)
    return list(groups.values())
