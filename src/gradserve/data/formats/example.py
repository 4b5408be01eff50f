"""tf.train.Example from its protobuf bytes.

Example{1: Features{1: map<string, Feature>}}; Feature is one of 1: BytesList, 2: FloatList, 3: Int64List, each with its
values in field 1 (tensorflow/core/example/feature.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from gradserve.data.row import Row

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""


class NoExample(ValueError):
    """The bytes are no such message."""


Values = list[bytes] | list[float] | list[int]


def parse(data: bytes) -> Row:
    row: Row = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            names, values = list(_messages(entry, 1)), list(_messages(entry, 2))
            try:
                name = names[-1].decode() if names else ""
            except UnicodeDecodeError as error:
                raise NoExample("a name that is no UTF-8") from error
            row[name] = _values(values[-1]) if values else []
    return row


def _values(feature: bytes) -> Values:
    for number, _, value in _fields(feature):
        if number in _LISTS:
            if not isinstance(value, bytes):
                raise NoExample("a list that is no message")
            return _LISTS[number](value)
    return []


def _bytes_list(data: bytes) -> list[bytes]:
    return list(_messages(data, 1))


def _float_list(data: bytes) -> list[float]:
    """Packed or one by one."""
    packed = b"".join(value if isinstance(value, bytes) else b"" for number, _, value in _fields(data) if number == 1)
    if len(packed) % 4:
        raise NoExample("floats of less than 4 bytes")
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def _int64_list(data: bytes) -> list[int]:
    values: list[int] = []
    for number, _, value in _fields(data):
        if number != 1:
            continue
        if isinstance(value, int):
            values.append(_signed(value))
            continue
        at = 0
        while at < len(value):
            integer, at = _varint(value, at)
            values.append(_signed(integer))
    return values


_LISTS: dict[int, Callable[[bytes], Values]] = {1: _bytes_list, 2: _float_list, 3: _int64_list}


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """Of the length-delimited fields those with the number ``wanted``."""
    for number, kind, value in _fields(data):
        if number == wanted:
            if kind != _BYTES or not isinstance(value, bytes):
                raise NoExample(f"field {number} has wire type {kind}, not {_BYTES}")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """(number, wire type, value); a varint is an int, all else bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value: bytes | int
            value, at = _varint(data, at)
        else:
            if kind == _BYTES:
                size, at = _varint(data, at)
            elif kind in (_FIXED32, _FIXED64):
                size = 4 if kind == _FIXED32 else 8
            else:
                raise NoExample(f"wire type {kind}")
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise NoExample("it ends within a field")
        yield number, kind, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The unsigned integer at ``at``, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise NoExample("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise NoExample("a number of more than 10 bytes")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
