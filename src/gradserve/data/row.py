"""A row and its bytes: the same bytes for the same content, whatever file it came from."""

from __future__ import annotations

import datetime
import hashlib
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gradserve.data.errors import BadRow, DataError

Row = dict[str, Any]
"""Column names to values, e.g. ``{"prompt": "2+2?", "answer": "4"}``."""

_ARRAY, _DATETIME, _DATE, _TIME = 1, 2, 3, 4
"""Codes of msgpack's extension types."""

_PLAIN = (type(None), bool, float, str, bytes)


class Found(NamedTuple):
    """What a reader met at one place."""

    source: str
    place: str
    """For people: "line 3", "record 7"."""
    row: Row | BadRow


def pack(value: object) -> bytes:
    """Sorted msgpack. DataError for a value that is no number, text, bytes, list, dict, array, date or time."""
    return _ENCODER.encode(_plain(value))


def unpack(data: bytes) -> Any:
    return _DECODER.decode(data)


def digest(value: object) -> bytes:
    """[16 bytes] of a row or of any value in one."""
    return hashlib.blake2b(pack(value), digest_size=16).digest()


def _plain(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise DataError(f"the integer {value} has more than 64 bits; write it as a string")
        return value
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return _plain(value.item())
    return _extension(value)


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise DataError(f"the key {key!r} is no string; name columns and fields by strings")
    return key


def _extension(value: object) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return msgspec.msgpack.Ext(_ARRAY, file.getvalue())
    # msgpack's own timestamps lose what has no time zone.
    for code, kind in ((_DATETIME, datetime.datetime), (_DATE, datetime.date), (_TIME, datetime.time)):
        if isinstance(value, kind):
            return msgspec.msgpack.Ext(code, value.isoformat().encode())
    raise DataError(
        f"a value of type {type(value).__name__} has no bytes of its own, which a full shuffle, dedup, splits and "
        "fingerprints need; make it a number, text, bytes, list, dict, array, date or time"
    )


def _from_extension(code: int, data: memoryview) -> object:
    if code == _ARRAY:
        return np.load(io.BytesIO(data), allow_pickle=False)
    return _FROM_ISO[code](bytes(data).decode())


_FROM_ISO: dict[int, Callable[[str], object]] = {
    _DATETIME: datetime.datetime.fromisoformat,
    _DATE: datetime.date.fromisoformat,
    _TIME: datetime.time.fromisoformat,
}
_ENCODER = msgspec.msgpack.Encoder(order="deterministic")
_DECODER = msgspec.msgpack.Decoder(ext_hook=_from_extension)
