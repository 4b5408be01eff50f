"""TFRecord files of tf.train.Example messages, without TensorFlow.

A record is its length (8 bytes, little-endian), the length's masked CRC-32C (4), the bytes, and theirs (4).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from gradserve.crc32c import masked_crc32c
from gradserve.data.errors import BadRow, DataError
from gradserve.data.files import File
from gradserve.data.formats.example import NoExample, parse
from gradserve.data.formats.stream import opened
from gradserve.data.row import Found, Row


def read(file: File) -> Iterator[Found]:
    """Each column is a list: of bytes, of floats or of ints."""
    with opened(file) as stream:
        number = 0
        while (length := _length(file.name, number + 1, stream)) is not None:
            number += 1
            place = f"record {number}"
            payload = _exactly(file.name, place, stream, length)
            (crc,) = struct.unpack("<I", _exactly(file.name, place, stream, 4))
            yield Found(file.name, place, _row(file.name, place, payload, crc))


def _length(source: str, number: int, stream: BinaryIO) -> int | None:
    """None at the end of the file. Where the next record begins is lost with a wrong length, so that ends it."""
    place = f"record {number}"
    head = stream.read(8)
    if not head:
        return None
    head += _exactly(source, place, stream, 8 - len(head))
    (crc,) = struct.unpack("<I", _exactly(source, place, stream, 4))
    if crc != masked_crc32c(head):
        raise DataError(
            f"{source}, {place}: its length's checksum is wrong; the file is damaged or no TFRecord; write it again"
        )
    return int(struct.unpack("<Q", head)[0])


def _exactly(source: str, place: str, stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise DataError(f"{source}, {place}: the file ends within it; it was cut off; copy or write it again")
    return data


def _row(source: str, place: str, payload: bytes, crc: int) -> Row | BadRow:
    if crc != masked_crc32c(payload):
        return BadRow(source, place, "the checksum of its bytes is wrong", "write the file again")
    try:
        return parse(payload)
    except NoExample as error:
        return BadRow(source, place, f"no tf.train.Example ({error})", "write tf.train.Example messages")
