"""A file's bytes from its start to its end, unpacked if they are gzipped."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from typing import BinaryIO, cast

from gradserve.data.files import File


@contextlib.contextmanager
def opened(file: File) -> Iterator[BinaryIO]:
    with file.open() as raw:
        if not file.gzipped:
            yield raw
            return
        with gzip.open(raw, "rb") as unpacked:
            yield cast(BinaryIO, unpacked)
