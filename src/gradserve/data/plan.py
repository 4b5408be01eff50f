"""The rows of an epoch in their order, from any place in it."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gradserve.data.errors import BadRow, DataError
from gradserve.data.order import buffered, permutation
from gradserve.data.row import Found, Row, digest
from gradserve.data.selection import Counts, Selection
from gradserve.data.source import Source
from gradserve.data.spool import Spool


@dataclass(frozen=True)
class Shard:
    """One of ``count`` workers: it has the rows whose number in the epoch's order leaves the rest ``index``."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise DataError(f"there is no shard {self.index} of {self.count}; they are numbered from 0")


@dataclass
class Plan:
    """Shared by all who read the same rows in the same order."""

    source: Source
    selection: Selection
    shuffle_seed: int | None = None
    shuffle_buffer: int | None = None
    """None shuffles all rows."""
    counts: Counts = field(default_factory=Counts)
    """Of the latest pass through the source; complete when it has come to the end."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _table: tuple[int, Callable[[int], Row]] | None = None

    def __post_init__(self) -> None:
        if self.shuffle_buffer is not None and (self.shuffle_seed is None or self.shuffle_buffer < 1):
            raise DataError("shuffle_buffer is a number of rows from 1, and wants a shuffle_seed")

    @cached_property
    def identity(self) -> str:
        """Changes with the settings and, as far as is seen without reading it, with the source."""
        selection = self.selection
        settings = (
            self.shuffle_seed,
            self.shuffle_buffer,
            (selection.split.part, selection.split.lower, selection.split.upper),
            (selection.dedup, selection.min_length, selection.max_length, selection.skip_bad_rows),
            self.source.identity,
        )
        return hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        hashed = hashlib.sha256()
        for _, found, row in self._selected():
            try:
                hashed.update(digest(row))
            except DataError as error:
                raise DataError(f"{found.source}, {found.place}: {error}") from error
        return hashed.hexdigest()

    def rows(self, epoch: int, taken: int, shard: Shard) -> Iterator[tuple[int, Row]]:
        """(number in the epoch's order, row) from number ``taken`` on.

        A full shuffle begins there at once; an order that follows the files reads again what lies before.
        """
        if self.shuffle_seed is not None and self.shuffle_buffer is None:
            size, at = self._shuffled_from()
            order = permutation(size, self.shuffle_seed, epoch)
            first = taken + (shard.index - taken) % shard.count
            return ((number, at(int(order[number]))) for number in range(first, size, shard.count))
        rows: Iterator[Row] = (row for _, _, row in self._selected())
        if self.shuffle_seed is not None and self.shuffle_buffer is not None:
            rows = buffered(rows, self.shuffle_buffer, self.shuffle_seed, epoch)
        return (
            (number, row)
            for number, row in itertools.islice(enumerate(rows), taken, None)
            if number % shard.count == shard.index
        )

    def known_rows(self) -> int | None:
        """Where a full shuffle needs the number anyway, or rows are in memory."""
        full = self.shuffle_seed is not None and self.shuffle_buffer is None
        return self._shuffled_from()[0] if full or self.source.at is not None else None

    def _selected(self) -> Iterator[tuple[int, Found, Row]]:
        self.counts = Counts()
        return self.selection.select(self.source.scan(), self.counts)

    def _shuffled_from(self) -> tuple[int, Callable[[int], Row]]:
        """The number of rows and what gives one; made once, by a pass through the source."""
        with self._lock:
            if self._table is None:
                self._table = self._spooled() if self.source.at is None else self._numbered(self.source)
            return self._table

    def _spooled(self) -> tuple[int, Callable[[int], Row]]:
        spool = Spool()
        for _, found, row in self._selected():
            try:
                spool.append(row)
            except DataError as error:
                if not self.selection.skip_bad_rows:
                    reason = "it can't be copied for a full shuffle"
                    raise BadRow(found.source, found.place, reason, str(error)) from error
                self.counts.taken, self.counts.bad = self.counts.taken - 1, self.counts.bad + 1
        return len(spool), spool.__getitem__

    def _numbered(self, source: Source) -> tuple[int, Callable[[int], Row]]:
        numbers = [number for number, _, _ in self._selected()]

        def at(index: int) -> Row:
            assert source.at is not None
            row = source.at(numbers[index]).row
            if isinstance(row, dict):
                return row
            raise row

        return len(numbers), at
