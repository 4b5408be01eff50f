"""JSONL: one JSON object a line. Blank lines are nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gradserve.data.errors import BadRow
from gradserve.data.files import File
from gradserve.data.formats.stream import opened
from gradserve.data.row import Found, Row

_BOM = b"\xef\xbb\xbf"


def read(file: File) -> Iterator[Found]:
    with opened(file) as stream:
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                place = f"line {number}"
                yield Found(file.name, place, _row(file.name, place, text))


def _row(source: str, place: str, text: bytes) -> Row | BadRow:
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(source, place, f"no JSON ({error}): {_start(text)}", "mend the line")
    if not isinstance(row, dict):
        return BadRow(
            source, place, f"a JSON {type(row).__name__}, not an object: {_start(text)}", "name its columns: {...}"
        )
    return row


def _start(text: bytes) -> str:
    return repr(text[:60].decode(errors="replace").strip())
