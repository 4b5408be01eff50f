"""TensorBoard event files: TFRecords of Event messages (event.proto, summary.proto in tensorboard/compat/proto).

Written here rather than by a library: tensorboardX 2.6.5 imports torch wherever that is installed, and on a full disk
its writing thread dies and the eleventh event waits for it for ever.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time as clock
from collections.abc import Mapping

from gradserve.crc32c import masked_crc32c
from gradserve.tracking.names import meaning
from gradserve.tracking.sinks import Begin

_START = 1
"""SessionLog.SessionStatus."""

_STRING = 7
"""DataType.DT_STRING."""


class TensorBoard:
    """``tensorboard --logdir FOLDER`` shows scalars, with what they mean, and texts.

    Every file says, after a resume, from which step on the earlier files' events no longer count.
    """

    def __init__(self, begin: Begin) -> None:
        now = clock.time()
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (begin.folder / name).open("xb", buffering=0)
        self._end = 0
        self._explained: set[str] = set()
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))
        if begin.resume_step is not None:
            self._write(_double(1, now) + _varint(2, begin.resume_step + 1) + _bytes(7, _varint(1, _START)))
        if begin.config:
            text = json.dumps(dict(begin.config), indent=2, default=str)
            self.text(begin.resume_step or 0, now, "config", f"{begin.run_name}\n\n```json\n{text}\n```")

    def metrics(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        found = {name: value for name, value in values.items() if value is not None}
        summary = b"".join(_bytes(1, self._scalar(name, value)) for name, value in found.items())
        self._write(_double(1, time) + _varint(2, step) + _bytes(5, summary))
        self._explained.update(found)

    def text(self, step: int, time: float, name: str, markdown: str) -> None:
        summary = _bytes(1, _text(name, markdown))
        self._write(_double(1, time) + _varint(2, step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _scalar(self, name: str, value: float) -> bytes:
        """A Summary.Value; a file's first of each name says what it means."""
        scalar = _bytes(1, name.encode()) + _float(2, value)
        explained = None if name in self._explained else meaning(name)
        return scalar if explained is None else scalar + _bytes(9, _bytes(3, explained.encode()))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + _checksum(length) + event + _checksum(event)
        self._file.seek(self._end)  # A write that failed before, on a full disk say, may have left a part.
        self._file.truncate()
        if self._file.write(record) != len(record):
            raise OSError(f"{self._file.name}: not all of an event could be written; is the disk full?")
        self._end += len(record)


def _text(name: str, markdown: str) -> bytes:
    """A Summary.Value whose tensor is one string, for the text plugin (tensorboard/plugins/text/summary.py)."""
    plugin = _bytes(1, b"text") + _bytes(2, b"")
    shape = _bytes(2, _varint(1, 1))
    tensor = _varint(1, _STRING) + _bytes(2, shape) + _bytes(8, markdown.encode("utf-8", "backslashreplace"))
    return _bytes(1, name.encode()) + _bytes(9, _bytes(1, plugin)) + _bytes(8, tensor)


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _digits(len(value)) + value


def _varint(field: int, value: int) -> bytes:
    """``value`` is not negative."""
    return bytes([field << 3]) + _digits(value)


def _digits(value: int) -> bytes:
    """Base 128, the lowest first; all but the last have their high bit set."""
    digits = []
    while value >= 128:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
