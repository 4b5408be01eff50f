"""Which rows of a source are taken: those that are good, of the split, of the right length, and not there already."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradserve.data.errors import BadRow, DataError
from gradserve.data.row import Found, Row, digest

Length = Callable[[Row], int]


@dataclass
class Counts:
    """What became of the rows of a source."""

    taken: int = 0
    bad: int = 0
    other_split: int = 0
    wrong_length: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class Split:
    """Rows of ``part`` whose hash falls into [lower, upper) of a hundred."""

    part: str = ""
    lower: int = 0
    upper: int = 100

    @classmethod
    def parse(cls, text: str | None) -> Split:
        """``"train"``, ``"[:90%]"``, ``"train[90%:]"``, ``"test[10%:20%]"``."""
        matched = re.fullmatch(r"([\w.-]*)(?:\[(?:(\d+)%)?:(?:(\d+)%)?\])?", text or "")
        if not matched:
            raise DataError(f"split={text!r} can't be read; write it like 'train', '[:90%]' or 'train[90%:]'")
        lower, upper = int(matched[2] or 0), int(matched[3] or 100)
        if not lower < upper <= 100:
            raise DataError(f"split={text!r} is empty or over 100%; write it like '[90%:]'")
        return cls(matched[1], lower, upper)

    @property
    def whole(self) -> bool:
        return (self.lower, self.upper) == (0, 100)

    def has(self, key: bytes) -> bool:
        return self.lower <= percent(key) < self.upper


def percent(key: bytes) -> int:
    """0 to 99, of a digest; the same on every machine."""
    return int.from_bytes(key[:8], "big") * 100 >> 64


@dataclass(frozen=True)
class Selection:
    split: Split = Split()
    dedup: bool | tuple[str, ...] = False
    """True compares whole rows, names compare those columns alone."""
    length: Length | None = None
    min_length: int | None = None
    max_length: int | None = None
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        bounded = self.min_length is not None or self.max_length is not None
        if bounded != (self.length is not None):
            raise DataError(
                "a length filter is a function and a bound: length=lambda row: len(row['text']), max_length=2000"
            )

    def select(self, found: Iterator[Found], counts: Counts) -> Iterator[tuple[int, Found, Row]]:
        """(number in the source, where it was found, the row). Raises BadRow unless such rows are skipped.

        For dedup 16 bytes of each taken row are kept in memory. Rows with the same key are on one side of a split.
        """
        seen: set[bytes] = set()
        for number, one in enumerate(found):
            try:
                row = _good(one)
                key = self._key(one, row)
                length_fits = self._length_fits(one, row)
            except BadRow:
                if not self.skip_bad_rows:
                    raise
                counts.bad += 1
                continue
            if not self.split.has(key):
                counts.other_split += 1
            elif not length_fits:
                counts.wrong_length += 1
            elif self.dedup and key in seen:
                counts.duplicates += 1
            else:
                if self.dedup:
                    seen.add(key)
                counts.taken += 1
                yield number, one, row

    def _key(self, found: Found, row: Row) -> bytes:
        """What a row is known by: of the columns to compare, or of all."""
        if self.dedup is False and self.split.whole:
            return b""
        columns = self.dedup if isinstance(self.dedup, tuple) else None
        try:
            return digest(row if columns is None else [row[name] for name in columns])
        except KeyError as error:
            raise BadRow(found.source, found.place, f"there is no column {error}", "add it") from error
        except DataError as error:
            raise BadRow(found.source, found.place, "it can't be compared", str(error)) from error

    def _length_fits(self, found: Found, row: Row) -> bool:
        if self.length is None:
            return True
        try:
            length = self.length(row)
        except Exception as error:
            reason = f"the length function raised {type(error).__name__}: {error}"
            raise BadRow(found.source, found.place, reason, "mend the row or the function") from error
        lower = 0 if self.min_length is None else self.min_length
        return lower <= length and (self.max_length is None or length <= self.max_length)


def _good(found: Found) -> Row:
    if isinstance(found.row, BadRow):
        raise found.row
    return found.row
