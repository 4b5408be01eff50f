"""What a training reads from: rows in a known order, and the place where it is."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradserve.data.errors import DataError
from gradserve.data.plan import Plan, Shard
from gradserve.data.prefetch import ahead
from gradserve.data.row import Row
from gradserve.data.selection import Counts, Length, Selection, Split
from gradserve.data.source import resolve


class Dataset:
    """Iterating goes on from the place where it is to the end of the epoch; then the next epoch begins.

    >>> dataset = Dataset([{"text": "a"}, {"text": "b"}, {"text": "c"}])
    >>> first = next(iter(dataset)); saved = dataset.position()
    >>> [row["text"] for row in dataset.at(saved)]
    ['b', 'c']

    Errors are DataError, for a single row BadRow with its file and line.
    """

    def __init__(
        self,
        source: Any,
        *,
        format: str | None = None,
        split: str | None = None,
        shuffle_seed: int | None = None,
        shuffle_buffer: int | None = None,
        dedup: bool | Sequence[str] = False,
        length: Length | None = None,
        min_length: int | None = None,
        max_length: int | None = None,
        skip_bad_rows: bool = False,
        prefetch: int = 64,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        """``source``: a path, folder, glob, fsspec URL, list of dicts, HF dataset, or function that makes an iterable.

        split: ``"train"``, ``"[:90%]"``, ``"train[90%:]"``: by a hash of each row, so a row stays on its side whatever
        else the data has. dedup: True for equal rows, or names of columns to compare; the first one stays, and a split
        goes by these columns too. A shuffle is of all rows, which are first copied to a temporary file unless they are
        in memory already, or of a buffer of ``shuffle_buffer`` rows. length: a row's, in your unit; both bounds are
        included. prefetch: rows that a thread reads ahead; 0 for none. cache: a folder on
        this disk for copies of remote files, which are fetched again only when they have changed.
        """
        self.told = {name: value for name, value in locals().items() if name != "self"}
        """The keywords of this call, for a manifest."""
        if prefetch < 0:
            raise DataError("prefetch is a number of rows, or 0 for none")
        cut = Split.parse(split)
        columns = dedup if isinstance(dedup, bool) else ((dedup,) if isinstance(dedup, str) else tuple(dedup))
        if isinstance(cache, bool):
            raise DataError(f"cache is {cache}: give the folder for the copies")
        folder = None if cache is None else Path(cache).expanduser()
        selection = Selection(cut, columns, length, min_length, max_length, skip_bad_rows)
        self._plan = Plan(resolve(source, format, cut.part, folder), selection, shuffle_seed, shuffle_buffer)
        self._prefetch = prefetch
        self._shard = Shard()
        self._epoch = self._taken = 0
        self._reading: object = None
        self.data_loading_time = 0.0
        """Seconds that whoever iterates has waited for rows."""

    @property
    def epoch(self) -> int:
        """From 0."""
        return self._epoch

    @property
    def counts(self) -> Counts:
        """What became of the source's rows in the latest pass through it: taken, bad, duplicates and so on."""
        return self._plan.counts

    def __iter__(self) -> Iterator[Row]:
        self._reading = reading = object()
        with contextlib.closing(self._rows()) as rows:
            while True:
                began = time.perf_counter()
                following = next(rows, None)
                self.data_loading_time += time.perf_counter() - began
                if self._reading is not reading:
                    raise DataError(
                        "another loop has begun on this dataset; use dataset.at(dataset.position()) for two"
                    )
                if following is None:
                    break
                number, row = following
                # Counted for all workers: those in step have the same position, and as many as one likes resume at it.
                self._taken = number - self._shard.index + self._shard.count
                yield row
        self._epoch, self._taken = self._epoch + 1, 0

    def _rows(self) -> Generator[tuple[int, Row]]:
        rows = (found for found in self._plan.rows(self._epoch, self._taken, self._shard))
        return ahead(rows, self._prefetch) if self._prefetch else rows

    def known_rows(self) -> int | None:
        """Rows of an epoch, of all shards; None for an order that follows the files, whose end nobody knows before."""
        return self._plan.known_rows()

    def position(self) -> str:
        """JSON of some 60 bytes: the next row, of those that the loop has been given, not of those read ahead."""
        return json.dumps({"epoch": self._epoch, "taken": self._taken, "order": self._plan.identity})

    def at(self, position: str | bytes) -> Dataset:
        """The same rows from there on. DataError if settings or files are others than when it was taken."""
        try:
            found = json.loads(position)
            epoch, taken, order = int(found["epoch"]), int(found["taken"]), found["order"]
            if epoch < 0 or taken < 0:
                raise ValueError("it counts from 0")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{position!r} is no position of a dataset; take it from dataset.position()") from error
        if order != self._plan.identity:
            raise DataError(
                "this position is of another order: the files, the split, the shuffle or a filter differ; restore them "
                "or begin the epoch again"
            )
        return self._with(self._shard, epoch, taken)

    def shard(self, index: int, count: int) -> Dataset:
        """Worker ``index`` of ``count``: every ``count``-th row of the same order, from the same position."""
        return self._with(Shard(index, count), self._epoch, self._taken)

    def _with(self, shard: Shard, epoch: int, taken: int) -> Dataset:
        other = copy.copy(self)
        other._shard, other._epoch, other._taken = shard, epoch, taken
        other._reading, other.data_loading_time = None, 0.0
        return other

    def fingerprint(self) -> str:
        """64 hex digits of the selected rows in the files' order, whatever the format; reads all of them, once."""
        return self._plan.fingerprint
