"""What can be wrong with data. Both say what to do about it."""

from __future__ import annotations


class DataError(ValueError):
    """The source as a whole can't be read as asked."""


class BadRow(DataError):
    """One row can't be used: ``source`` (the file), ``place`` ("line 3", "record 7"), ``reason``, ``cure``.

    The rows after it can be read: Dataset(..., skip_bad_rows=True) leaves it out and counts it.
    """

    def __init__(self, source: str, place: str, reason: str, cure: str) -> None:
        super().__init__(f"{source}, {place}: {reason}; {cure}, or leave such rows out with skip_bad_rows=True")
        self.source, self.place, self.reason, self.cure = source, place, reason, cure
