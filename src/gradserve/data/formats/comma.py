"""CSV with a header; all values are strings, as the file has them."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from gradserve.data.errors import BadRow, DataError
from gradserve.data.files import File
from gradserve.data.formats.stream import opened
from gradserve.data.row import Found, Row


def read(file: File) -> Iterator[Found]:
    with opened(file) as stream:
        # Bytes that are no UTF-8 become surrogates, so that the row which has them can be named.
        records = csv.reader((line.decode(errors="surrogateescape") for line in stream), strict=True)
        columns = _header(file.name, records)
        while True:
            place = f"line {records.line_num + 1}"
            try:
                values = next(records)
            except StopIteration:
                return
            except csv.Error as error:
                bad = BadRow(file.name, place, f"no CSV ({error})", "mend its quotes, or write long texts as JSONL")
                yield Found(file.name, place, bad)
                continue
            if values:
                yield Found(file.name, place, _row(file.name, place, columns, values))


def _header(source: str, records: Iterator[list[str]]) -> list[str]:
    try:
        columns = next(records, None)
    except csv.Error as error:
        raise DataError(f"{source}, line 1: the header is no CSV ({error}); mend it") from error
    if not columns:
        raise DataError(f"{source}, line 1: there is no header; write the columns' names into the first line")
    columns[0] = columns[0].removeprefix("\ufeff")
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"{source}, line 1: more than one column is named {twice[0]!r}; rename one")
    return columns


def _row(source: str, place: str, columns: list[str], values: list[str]) -> Row | BadRow:
    if len(values) != len(columns):
        reason = f"{len(values)} values for {len(columns)} columns"
        return BadRow(source, place, reason, "add what is missing, and quote values that contain commas")
    if any("\udc80" <= letter <= "\udcff" for value in values for letter in value):
        return BadRow(source, place, "bytes that are no UTF-8", "save the file as UTF-8")
    return dict(zip(columns, values, strict=True))
